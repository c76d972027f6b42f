"""Processes that are forked behave like new interpreters, and end together with whoever asked for them."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.host.fork_client import VARIABLE
from megarl.host.fork_server import ForkServers
from tests.helpers.waiting import wait_until

SERVER = """
import sys
import decimal
from megarl.host.fork_server import serve_forks
serve_forks(int(sys.argv[1].partition("=")[2]))
"""
SCRIPT = """
import json, os, sys, time
print(json.dumps({
    "imported": "decimal" in sys.modules, "argv": sys.argv, "directory": os.getcwd(), "X": os.environ["X"],
    "here": sys.path[0], "others": sorted(set(os.environ) - set(sys.argv[2].split(","))), "pid": os.getpid(),
}), flush=True)
if sys.argv[1] == "sleep":
    time.sleep(300)
if sys.argv[1] == "fail":
    raise ValueError("of the script's own")
sys.exit(int(sys.argv[1]))
"""
# Shells and interpreters add some themselves.
NAMES = ("X", VARIABLE, "PATH", "PWD", "SHLVL", "_", "LC_CTYPE")


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServers]:
    (tmp_path / "small_server.py").write_text(SERVER)
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    started = ForkServers(tmp_path, "small_server", ["kind"], {"PYTHONPATH": path, "ONLY": "the server's"})
    yield started
    started.close()


def begin(servers: ForkServers, directory: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = servers.runtime_envs()["kind"]
    variables = environment["env_vars"]
    assert isinstance(variables, dict)
    command = f"exec {environment['py_executable']} {directory / 'script.py'} {' '.join(arguments)} {','.join(NAMES)}"
    return subprocess.Popen(
        ["bash", "-c", command],
        env={"PATH": os.environ["PATH"], "X": "ü and more", **variables},
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def first_line(process: subprocess.Popen[str]) -> dict[str, object]:

    assert process.stdout is not None
    found: dict[str, object] = json.loads(process.stdout.readline())
    return found


def test_a_fork_has_the_clients_arguments_environment_directory_and_output(
    servers: ForkServers, tmp_path: Path
) -> None:
    with begin(servers, tmp_path, "7") as process:
        told = first_line(process)
    assert told.pop("pid") != process.pid
    assert told == {
        "imported": True,
        "argv": [str(tmp_path / "script.py"), "7", ",".join(NAMES)],
        "directory": "/",
        "X": "ü and more",
        "here": str(tmp_path),
        "others": [],
    }
    assert process.returncode == 7


def test_an_error_of_the_script_is_the_clients(servers: ForkServers, tmp_path: Path) -> None:
    with begin(servers, tmp_path, "fail") as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "ValueError: of the script's own"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_client_ends_the_fork(servers: ForkServers, tmp_path: Path, signum: signal.Signals) -> None:
    with begin(servers, tmp_path, "sleep") as process:
        fork = psutil.Process(int(str(first_line(process)["pid"])))
        process.send_signal(signum)
        assert psutil.wait_procs([fork], timeout=30)[1] == []
    assert process.returncode == -signum


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_the_client_ends_as_the_fork_does(servers: ForkServers, tmp_path: Path, signum: signal.Signals) -> None:
    with begin(servers, tmp_path, "sleep") as process:
        os.kill(int(str(first_line(process)["pid"])), signum)
        assert process.wait(timeout=30) == -signum


def test_a_server_lives_as_long_as_its_forks_and_they_no_longer_than_it(servers: ForkServers, tmp_path: Path) -> None:
    with begin(servers, tmp_path, "sleep") as first:
        fork = psutil.Process(int(str(first_line(first)["pid"])))
        server = fork.parent()
        assert server is not None
        servers.close()
        time.sleep(0.2)
        assert server.is_running()
        # Whoever comes now gets a new interpreter.
        with begin(servers, tmp_path, "3") as late:
            told = first_line(late)
        assert (told["imported"], late.returncode) == (False, 3)
        server.kill()
        assert psutil.wait_procs([server, fork], timeout=30)[1] == []
    assert first.returncode == -signal.SIGKILL


def test_what_ends_the_group_of_a_fork_spares_the_server_and_other_forks(servers: ForkServers, tmp_path: Path) -> None:
    """Ray does so when a worker has died."""
    with begin(servers, tmp_path, "sleep") as first, begin(servers, tmp_path, "sleep") as second:
        one, other = (psutil.Process(int(str(first_line(each)["pid"]))) for each in (first, second))
        os.killpg(os.getpgid(one.pid), signal.SIGKILL)
        assert first.wait(timeout=30) == -signal.SIGKILL
        with begin(servers, tmp_path, "3") as third:
            assert first_line(third)["imported"]
        assert other.is_running()
        server = other.parent()
        assert server is not None
        servers.close()
        other.kill()
    assert psutil.wait_procs([server], timeout=30)[1] == []


def test_without_forks_a_server_ends_when_it_is_closed(servers: ForkServers, tmp_path: Path) -> None:
    with begin(servers, tmp_path, "0") as process:
        first_line(process)
    (server,) = [each for each in psutil.Process().children() if "small_server" in " ".join(each.cmdline())]
    servers.close()
    wait_until(lambda: server.status() == psutil.STATUS_ZOMBIE or not server.is_running(), "the server's end")


def test_servers_that_were_offered_to_nobody_end_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow_server.py").write_text("import time\ntime.sleep(300)\n")
    servers = ForkServers(tmp_path, "slow_server", ["kind"], {"PYTHONPATH": str(tmp_path)})
    (server,) = [each for each in psutil.Process().children() if "slow_server" in " ".join(each.cmdline())]
    servers.close()
    assert not server.is_running()
