"""Sandboxes for the work of agents: real bubblewrap, and what Apptainer and Docker are asked."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.environments import sandboxes
from megarl.environments.agent import Ended
from megarl.environments.sandboxes import SANDBOXES, WorkSandbox, sandbox_maker
from megarl.errors import ConfigError
from megarl.host import child_environment
from tests.helpers.agent_talk import Talk, converse

LOCAL = ["process", "bubblewrap"]
VARIABLES = {"PATH": os.environ["PATH"]}


@pytest.fixture(scope="module", autouse=True)
def bubblewrap() -> None:
    """Debian's, which is installed where it is missing, as Slurm is for its tests."""
    if shutil.which("bwrap") is None:
        for words in (["update"], ["install", "-y", "--no-install-recommends", "bubblewrap"]):
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(["apt-get", "-qq", *words], check=True, env=environment, timeout=300)


def within(
    kind: str, work: Callable[[WorkSandbox], Awaitable[None]], template: Path | None = None, **settings: Any
) -> None:
    async def run() -> None:
        box = sandbox_maker(kind, settings, template)()
        try:
            await box.start()
            await work(box)
        finally:
            await box.stop()

    asyncio.run(run())


async def output(box: WorkSandbox, *command: str, **rest: Any) -> str:
    ended = await box.run(command, variables=VARIABLES, **rest)
    return (ended.output + ended.errors).decode()


@pytest.mark.parametrize("kind", LOCAL)
def test_files_are_written_and_read_in_the_workspace(kind: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("x = 1\n")
    (tmp_path / "out").symlink_to("/var/tmp")

    async def work(box: WorkSandbox) -> None:
        assert await box.read("src/a.py") == "x = 1\n"
        await box.write("new/b.txt", "é\n")
        assert await output(box, "cat", "new/b.txt") == "é\n"
        assert await output(box, "cat", stdin="read") == "read"
        assert await output(box, "sh", "-c", "pwd; echo $HOME") == f"{box.workspace}\n{box.home}\n"
        with pytest.raises(FileNotFoundError, match=r"none: .*No such file"):
            await box.read("none")
        for path in ("../c.txt", "out/c.txt", "/var/tmp/c.txt"):
            with pytest.raises(RuntimeError, match=r"writing .* ended with 1"):
                await box.write(path, "x")

    within(kind, work, tmp_path)
    assert (tmp_path / "src" / "a.py").read_text() == "x = 1\n"
    assert not (tmp_path / "new").exists()
    assert not Path("/var/tmp/c.txt").exists()


@pytest.mark.parametrize("kind", LOCAL)
def test_forks_begin_with_the_same_files_and_go_apart(kind: str) -> None:
    async def work(box: WorkSandbox) -> None:
        await box.write("a.txt", "1")
        await output(box, "sh", "-c", "echo 2 > $HOME/b.txt")
        fork = await box.fork()
        await box.write("a.txt", "mine")
        assert await output(fork, "sh", "-c", "cat a.txt $HOME/b.txt") == "12\n"
        await fork.write("a.txt", "theirs")
        assert await box.read("a.txt") == "mine"
        await fork.stop()
        assert await box.read("a.txt") == "mine"

    within(kind, work)


@pytest.mark.parametrize("kind", LOCAL)
def test_pipes_and_sockets_are_copied_and_never_waited_for(kind: str) -> None:
    """Reading a pipe never ends, and a socket cannot be opened as a file."""
    left = "mkfifo pipe && python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"bound\")'"

    async def work(box: WorkSandbox) -> None:
        (await box.run(["sh", "-c", left], variables=VARIABLES)).require_success("leaving")
        fork = await box.fork()
        assert await output(fork, "sh", "-c", "[ -p pipe ] && [ -S bound ] && echo both") == "both\n"
        await fork.stop()
        with pytest.raises(FileNotFoundError, match=r"pipe: error: no regular file"):
            await box.read("pipe")
        with pytest.raises(RuntimeError, match=r"writing pipe ended with 1"):
            await box.write("pipe", "x")

    within(kind, work)


def test_read_only_directories_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a user who is not root, too. (Debian's `sh` takes the rights of root again.)"""
    kept: list[Path] = []
    # That of a run, which an earlier test of this process may have made, is root's alone.
    monkeypatch.setattr(tempfile, "tempdir", os.path.join(os.sep, "tmp"))

    async def work(box: WorkSandbox) -> None:
        kept.append(Path(box.workspace))
        for command in (["mkdir", "cache"], ["touch", "cache/a"], ["chmod", "500", "cache"]):
            (await box.run(command, variables=VARIABLES)).require_success(command[0])

    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        within("process", work)
    finally:
        os.seteuid(user)
    assert not kept[0].parent.exists()


def test_bubblewrap_hides_the_host(tmp_path: Path) -> None:
    """Its loopback, its sockets in the file system, its processes, and what is not the system's."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    local = socket.socket(socket.AF_UNIX)
    local.bind(str(tmp_path / "socket"))
    local.listen()
    look = (
        "import os, socket, sys\n"
        "for place in (('127.0.0.1', int(sys.argv[1])), sys.argv[2]):\n"
        "    try:\n"
        "        socket.socket(socket.AF_INET if isinstance(place, tuple) else socket.AF_UNIX).connect(place)\n"
        "        print('connected')\n"
        "    except OSError as error:\n"
        "        print(type(error).__name__)\n"
        "print(sorted(os.listdir('/')), len([each for each in os.listdir('/proc') if each.isdigit()]) < 5)\n"
        "print([each for each in os.listdir('/proc/self/fd') if int(each) > 3])\n"
        "try:\n    open('/usr/mine', 'w')\nexcept OSError as error:\n    print(error.strerror)\n"
    )

    async def work(box: WorkSandbox) -> None:
        said = (await output(box, sys.executable, "-c", look, str(port), str(tmp_path / "socket"))).splitlines()
        assert said[:2] == ["ConnectionRefusedError", "FileNotFoundError"]
        assert not {"root", "var", "run", "srv", "mnt"} & set(said[2])
        assert said[2].endswith("True")
        assert said[3:] == ["[]", "Read-only file system"]

    with listener, local:
        within("bubblewrap", work)


# An agent without any client: one request by a socket.
ASK = """
import json, os, sys, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": sys.stdin.read()}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer)
try:
    urllib.request.urlopen(sys.argv[1], timeout=5)
    open("answer.txt", "w").write("reached")
except OSError:
    pass
"""
HARNESS = """
import sys
from megarl.environments.harness import Launch

def mine(given):
    return Launch(command=[sys.executable, "-c", {ask!r}, *given.options], variables={{}})
"""


def test_an_agent_in_bubblewrap_reaches_its_endpoint_and_no_other_port_of_the_host(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(HARNESS.format(ask=ASK))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        entry = {
            "harness": f"{mine}:mine",
            "check": ["grep", "-qx", "3", "answer.txt"],
            "sandbox": "bubblewrap",
            "options": [f"http://127.0.0.1:{listener.getsockname()[1]}"],
        }
        talks = [asyncio.run(converse(entry, answer, kind="harness", extra_info={})) for answer in ("3", "4")]
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert [(talk.last.failure, talk.last.reward) for talk in talks] == [("", 1.0), ("", 0.0)], talks


# A repository with a fault; its tests are the row's.
FAULTY = "def add(a, b):\n    return a - b\n"
TESTS = {"check_files": {"test_add.py": "from add import add\nassert add(1, 2) == 3\n"}}
FIX = "sed -i s/-/+/ add.py"
SEES = "cat add.py"


def shell(command: str) -> str:
    return f'<tool_call>{{"name": "bash", "arguments": {{"command": "{command}"}}}}</tool_call>'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "repository"
    place.mkdir()
    (place / "add.py").write_text(FAULTY)
    own = {"env": {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}, "cwd": place, "check": True}
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "first"]):
        subprocess.run(["git", *words], **own)  # type: ignore[call-overload]
    return place


def repair(repository: Path, *turns: str | tuple[str, ...], **arguments: Any) -> Talk:
    entry = {"workspace": str(repository), "check": [sys.executable, "test_add.py"], "patch": True, **arguments}
    return asyncio.run(converse(entry, *turns, kind="shell", extra_info=TESTS))


@pytest.mark.parametrize("kind", LOCAL)
def test_the_tests_of_a_row_judge_the_patch_in_a_new_sandbox(kind: str, repository: Path) -> None:
    talk = repair(repository, shell(SEES), shell(FIX), "Fixed.", sandbox=kind)
    assert (talk.last.done, talk.last.reward, talk.last.details) == (True, 1.0, {"correct": True}), talk.last
    said = [TOKENIZED.split("<|im_end|>")[-2].rpartition("\n")[2] for TOKENIZED in [talk.text]]
    assert said == ["Fixed."]
    assert f"<|im_start|>tool\n{FAULTY}<|im_end|>" in talk.text
    # A commit does not hide the fix, what the index has does not either, and what git ignores is no part of it.
    commit = "git -c user.name=a -c user.email=a commit -qam fix"
    assert repair(repository, shell(f"{FIX}; {commit}"), "Fixed.", sandbox=kind).last.reward == 1.0
    assert repair(repository, "I do nothing.", sandbox=kind).last.reward == 0.0
    assert repair(repository, shell("rm -rf .git"), "Gone.", sandbox=kind).last.reward == 0.0
    assert (repository / "add.py").read_text() == FAULTY


def test_tries_work_on_forks_of_the_same_files(repository: Path) -> None:
    """Two branches, turn by turn side by side; the second is right, and both see what was there at first."""
    both = (shell(SEES), shell(f"{FIX}; {SEES}"))
    talk = repair(repository, both, shell(SEES), shell(SEES), "Done.", "Done.", tries=2)
    assert (talk.last.done, talk.last.reward, dict(talk.last.rewards)) == (True, 0.5, {4: 0.0}), talk.last
    fixed = FAULTY.replace("-", "+")
    assert talk.text.count(f"<|im_start|>tool\n{FAULTY}<|im_end|>") == 2
    assert talk.text.count(f"<|im_start|>tool\n{fixed}<|im_end|>") == 2


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("docker", {"image": "debian"}, r"docker does not work here \(.*\); start Docker's daemon"),
        ("apptainer", {"image": "a.sif"}, r"apptainer does not work here \(.*\); install Apptainer"),
        (
            "bubblewrap",
            {"image": "debian"},
            "sandbox_settings: got {'image': 'debian'} for bubblewrap; .*unexpected keyw",
        ),
        ("bubblewrap", {"readable": ["/no/where"]}, "readable: /no/where is not there; correct its path"),
        ("bubblewarp", {}, "did you mean 'bubblewrap'"),
    ],
)
def test_what_this_machine_lacks_is_said_at_the_start(
    kind: str, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither works, wherever the tests run.
    monkeypatch.setenv("PATH", "/nowhere" if kind in ("docker", "apptainer") else os.environ["PATH"])
    sandboxes._refusal.cache_clear()
    with pytest.raises(ConfigError, match=message):
        sandbox_maker(kind, settings, None)
    sandboxes._refusal.cache_clear()


def test_what_apptainer_and_docker_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their manuals. Values of variables stand on no command line, and a container ends with its program."""
    asked: list[tuple[list[str], dict[str, str]]] = []

    async def run_program(command: Sequence[str], text: str, variables: Mapping[str, str], **_: Any) -> Ended:
        asked.append(([*command], dict(variables)))
        return Ended(exit_code=0, output=b"", errors=b"")

    monkeypatch.setattr(sandboxes, "run_program", run_program)
    monkeypatch.setattr(sandboxes, "_refusal", lambda trial: "")
    # As Docker without root has it.
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/user/1000/docker.sock")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    monkeypatch.setenv("APPTAINER_CACHEDIR", "/cache")
    monkeypatch.setenv("APPTAINER_BINDPATH", "/data")
    user = dict(os.environ)
    # As the process does that runs environments.
    monkeypatch.setattr(os, "environ", dict(user))
    monkeypatch.setattr(child_environment, "_of_clients", {})
    child_environment.limit_environment([], key="environment.pass_env")
    assert not [name for name in os.environ if name.startswith(("DOCKER_", "APPTAINER_"))]
    variables = {"PATH": "/mine", "HOME": "/mine", "KEY": "secret"}
    places = []

    async def run(kind: str, **settings: Any) -> None:
        box: Any = SANDBOXES.get(kind)(template=None, **settings)
        await box.start()
        places.append(str(box._scratch))
        await box.run(["make", "it"], variables=variables, url="http://127.0.0.1:80/v1")
        await box.stop()

    asyncio.run(run("apptainer", image="a.sif"))
    asyncio.run(run("docker", image="debian:12"))
    (apptainer, theirs), (docker, docked), (removed, removing) = asked
    first, second = places
    assert (
        apptainer
        == (
            f"apptainer --quiet exec --containall --overlay {first}/overlay --bind {first}/workspace:/workspace "
            f"--bind {first}/home:/home/agent --home /home/agent --pwd /workspace a.sif make it"
        ).split()
    )
    assert {name: theirs[name] for name in theirs if "KEY" in name} == {"APPTAINERENV_KEY": "secret"}
    name = docker[docker.index("--name") + 1]
    assert (
        docker
        == (
            f"docker run --rm --interactive --init --name {name} --network host --user {os.getuid()}:{os.getgid()} "
            f"--volume {second}/workspace:/workspace --volume {second}/home:/home/agent --workdir /workspace "
            "--env HOME=/home/agent --env KEY debian:12 make it"
        ).split()
    )
    assert (docked["KEY"], docked["PATH"]) == ("secret", os.environ["PATH"])
    assert removed == ["docker", "rm", "--force", name]
    assert "SSH_AUTH_SOCK" not in theirs
    for client, told in (
        (docked, "SSH_AUTH_SOCK"),
        (docked, "DOCKER_HOST"),
        (removing, "DOCKER_HOST"),
        (theirs, "APPTAINER_CACHEDIR"),
    ):
        assert client[told] == user[told]
        assert "APPTAINER_BINDPATH" not in client


REMOTE = '''
import json, urllib.request
from megarl.environments.agent import Ended

class Remote:
    """A client of a service that keeps sandboxes; six methods."""
    workspace, home = "/workspace", "/home/agent"

    def __init__(self, *, template, url):
        self._url = url

    def _ask(self, what, **body):
        request = urllib.request.Request(f"{self._url}/{what}", json.dumps(body).encode())
        return json.load(urllib.request.urlopen(request))

    async def start(self):
        self._id = self._ask("start")["id"]

    async def run(self, command, *, stdin="", variables, url=""):
        found = self._ask(f"{self._id}/run", command=list(command), text=stdin)
        return Ended(exit_code=found["code"], output=found["output"].encode(), errors=b"")

    async def read(self, path):
        return self._ask(f"{self._id}/read", path=path)["text"]

    async def write(self, path, text):
        self._ask(f"{self._id}/write", path=path, text=text)

    async def fork(self):
        other = Remote(template=None, url=self._url)
        other._id = self._ask(f"{self._id}/fork")["id"]
        return other

    async def stop(self):
        self._ask(f"{self._id}/stop")
'''


def test_a_remote_sandbox_of_six_methods(tmp_path: Path) -> None:
    """Its service is recorded by hand: what it was asked, and what it answers."""
    import json
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    (tmp_path / "remote.py").write_text(REMOTE)
    asked: list[tuple[str, Any]] = []

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            what = self.path.rpartition("/")[2]
            count = sum(path.endswith(("start", "fork")) for path, _ in asked)
            is_check = body.get("command") == ["true"]
            said = {"start": {"id": f"box{count}"}, "fork": {"id": f"box{count}"}}
            said["run"] = {"code": 0, "output": "" if is_check else f"seen by {self.path.split('/')[1]}"}
            text = json.dumps(said.get(what, {})).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_address[1]}"
        entry = {"check": ["true"], "sandbox": f"{tmp_path}/remote.py:Remote", "sandbox_settings": {"url": place}}
        info = {"files": {"a.txt": "1"}}
        turns = ((shell("one"), shell("two")), "Done.", "Done.")
        talk = asyncio.run(converse({**entry, "tries": 2}, *turns, kind="shell", extra_info=info))
        server.shutdown()
    assert (talk.last.done, talk.last.failure) == (True, ""), talk.last
    assert "seen by box1" in talk.text
    assert "seen by box2" in talk.text
    paths = [path for path, _ in asked]
    assert paths[:3] == ["/start", "/box1/write", "/box1/fork"]
    assert sorted(paths[3:]) == sorted([*["/box1/run", "/box2/run"] * 2, "/box1/stop", "/box2/stop"])
    assert asked[1][1] == {"path": "a.txt", "text": "1"}
