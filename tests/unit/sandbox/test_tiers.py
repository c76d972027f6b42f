"""What isolates programs on machines of different kinds: for root, for an ordinary user, in a container.

Programs here touch nothing but files of the test itself.
"""

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.doctor.finding import Severity
from megarl.doctor.machine import check_sandbox
from megarl.host.temp_dir import make_temp_dir
from megarl_sandbox import Check, Ending, Isolation, RunWithInput, Sandbox, SandboxOptions, process
from megarl_sandbox.jail import calls
from megarl_sandbox.jail.scratch import delete_tree
from tests.helpers.sandboxes import BRIEF, LIMITS
from tests.helpers.second_user import as_nobody, needs_second_user
from tests.helpers.waiting import wait_until
from tests.unit.rewards.code.test_forgery import FORGERS

ROOT = str(Path(__file__).parents[3])
REFUSED = """
import errno, os, signal, socket, sys, threading
def refused(function, *arguments, **options):
    try:
        result = function(*arguments, **options)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "succeeded"
"""
# An ordinary user, in a new user namespace.
USER = """
import ctypes, os, sys
from megarl_sandbox import *
from megarl_sandbox.jail import kernel
def write(path, text):
    with open(path, "w") as file:
        file.write(text)
user, group = os.getuid(), os.getgid()
kernel.unshare(kernel.CLONE_NEWUSER)
write("/proc/self/setgroups", "deny")
write("/proc/self/uid_map", f"4321 {user} 1")
write("/proc/self/gid_map", f"4321 {group} 1")
"""
# As Docker, Podman and containerd do: a /proc of the container's own, of which parts are covered. The kernel then lets
# nobody inside mount another one.
MASKED = (
    USER
    + """
kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_PRIVATE)
kernel.mount("proc", "/proc", "proc", 0)
kernel.mount("/dev/null", "/proc/interrupts", "none", kernel.MS_BIND)
kernel.mount("tmpfs", "/proc/fs", "tmpfs", kernel.MS_RDONLY)
kernel.mount("/proc/sys", "/proc/sys", "none", kernel.MS_BIND)
kernel.restrict_mounts("/proc/sys", kernel.MS_RDONLY)
"""
)
NO_NAMESPACES = 'write("/proc/sys/user/max_user_namespaces", "0")\n'
# A filter of system calls for which the kernel has no Landlock: 444 is landlock_create_ruleset, 38 "no such call".
NO_LANDLOCK = """
from megarl_sandbox.jail import syscalls
steps = [syscalls._step(0x20, 0), *syscalls._answer_if(0x15, 444, 0x50026), syscalls._step(0x06, 0x7FFF0000)]
code = syscalls._Program(length=len(steps), instructions=b"".join(steps))
kernel.prctl(38, 1)
kernel.prctl(22, 2, ctypes.addressof(code))
"""
TRY = """
source = '''
import sys
if sys.stdin.read().strip():
    text = [b"x" * (24 << 20) for _ in range(20)]
'''
with Sandbox(SandboxOptions(limits=Limits(memory_mib=128))) as sandbox, sandbox.program(source) as program:
    print(sandbox.tier, [refusal[:45] for refusal in sandbox.refusals])
    for text in ("\\n", "it holds more than it may\\n"):
        outcome = program.run(RunWithInput(text=text))
        print(outcome.ending, outcome.exit_code)
    print(program.run(Check(test="assert os.getpid() > 0")).answer)
"""


def run_there(source: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def landlock() -> Iterator[Sandbox]:
    with Sandbox(SandboxOptions(limits=LIMITS, isolation=Isolation.LANDLOCK)) as sandbox:
        yield sandbox


def printed(sandbox: Sandbox, source: str) -> str:
    with sandbox.program(source) as program:
        outcome = program.run(RunWithInput(text=""))
    assert outcome.succeeded, outcome
    return outcome.stdout.decode()


def test_where_proc_is_masked_namespaces_are_still_granted() -> None:
    tier, *outcomes, verdict = run_there(MASKED + TRY)
    assert tier == "namespaces []"
    assert outcomes == ["exited 0", "exited 1"]
    assert json.loads(verdict[2:-1])["passed"]


def test_where_proc_is_masked_memory_of_several_processes_is_watched() -> None:
    bomb = """
source = '''
import os, time
for _ in range(4):
    if os.fork() == 0:
        break
text = b"x" * (48 << 20)
time.sleep(60)
'''
with Sandbox(SandboxOptions(limits=Limits(memory_mib=128))) as sandbox, sandbox.program(source) as program:
    print(program.run(RunWithInput(text="")).ending)
"""
    assert run_there(MASKED + bomb) == ["memory"]


def test_an_ordinary_user_without_namespaces_gets_landlock() -> None:
    tier, *outcomes, verdict = run_there(USER + NO_NAMESPACES + TRY)
    assert tier == 'landlock ["it refuses namespaces at the step \'user names"]'
    assert outcomes == ["exited 0", "exited 1"]
    assert json.loads(verdict[2:-1])["passed"]


def test_where_both_are_missing_programs_are_refused() -> None:
    refuse = """
try:
    Sandbox().program("")
except ValueError as error:
    print(type(error).__name__, error)
"""
    (refusal,) = run_there(USER + NO_NAMESPACES + NO_LANDLOCK + refuse)
    assert refusal.startswith("OptionError isolation=auto: this machine isolates no programs: it refuses ")
    assert "namespaces at the step 'user namespace' (unshare: No space left on device); allow user " in refusal
    assert "it refuses landlock at the step 'landlock' (system call 444: Function not implemented); run on " in refusal
    assert refusal.endswith("which protects neither files nor the network from programs")


class TestLandlock:
    def test_files(self, landlock: Sandbox, tmp_path: Path) -> None:
        mine = tmp_path / "mine"
        mine.write_text("untouched")
        mine.chmod(0o666)
        tmp_path.chmod(0o777)
        attempt = f"""
mine, directory = {str(mine)!r}, {str(tmp_path)!r}
os.symlink(mine, "link")
for place in (mine, "link", "/proc/self/status", "/proc/1/environ"):
    print(refused(open, place), refused(open, place, "a"))
print(refused(os.listdir, directory), refused(os.mkdir, directory + "/new"), refused(os.unlink, mine))
print(refused(os.rename, mine, "taken"), refused(os.link, mine, "hard"), refused(os.truncate, mine, 0))
print(refused(os.chmod, mine, 0o777), refused(os.utime, mine), refused(os.chown, mine, -1, -1))
print(refused(os.setxattr, mine, "user.x", b"x"), refused(os.mkfifo, directory + "/fifo"))
open("own", "w").write("x")
print("own:", *sorted(os.listdir(".")), open("own").read())
"""
        *errors, own = printed(landlock, REFUSED + attempt).splitlines()
        assert set(" ".join(errors).split()) <= {"EACCES", "EPERM", "EXDEV", "ENOENT"}
        assert own == "own: link own x"
        assert (mine.read_text(), mine.stat().st_mode & 0o777) == ("untouched", 0o666)
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]

    def test_processes_signals_and_network(self, landlock: Sandbox) -> None:
        attempt = """
print(refused(os.fork), refused(os.kill, os.getppid(), 0), refused(os.kill, -1, 0), refused(os.killpg, 0, 0))
print(refused(os.execv, "/nowhere", ["x"]), refused(os.nice, -1), refused(os.memfd_create, "x"))
print(*(refused(socket.socket, family) for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)))
print(refused(__import__("resource").prlimit, os.getppid(), 7), refused(os.setsid))
"""
        assert set(printed(landlock, REFUSED + attempt).split()) == {"EPERM"}

    def test_no_datagram_reaches_a_socket_of_the_host(self, landlock: Sandbox, tmp_path: Path) -> None:
        """An end of a pair of datagram sockets can send to any address; SOCK_RAW is another word for it."""
        path = str(tmp_path / "s")
        tmp_path.chmod(0o777)
        attempt = f"""
def send(kind):
    with socket.socketpair(socket.AF_UNIX, kind)[0] as end:
        end.sendto(b"from inside", {path!r})
print(*(refused(send, kind) for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET)))
print(refused(socket.socketpair, 30, socket.SOCK_STREAM))
first, second = socket.socketpair()
first.sendall(b"inside")
print(second.recv(9))
"""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mine:
            mine.bind(path)
            os.chmod(path, 0o777)
            mine.setblocking(False)
            assert printed(landlock, REFUSED + attempt) == "EPERM EPERM EPERM\nEPERM\nb'inside'\n"
            with pytest.raises(BlockingIOError):
                mine.recv(99)

    def test_what_a_program_hides_from_its_bounds(self) -> None:
        """Below a path that is too long, or a directory without the right to list it. Nothing stays on the host."""
        long = "for _ in range(17): os.mkdir('n' * 255); os.chdir('n' * 255)"
        secret = "os.umask(0o477); os.mkdir('d'); os.chdir('d')"
        for hide in (long, secret):
            source = (
                f"import os, time\n{hide}\nfor i in range(9): open(str(i), 'wb').write(bytes(1 << 20))\ntime.sleep(60)"
            )
            attempt = f"""
options = SandboxOptions(limits=Limits(files_mib=1), isolation=Isolation.LANDLOCK)
with Sandbox(options) as sandbox, sandbox.program({source!r}) as program:
    print(*(program.run(RunWithInput(text="")).ending for _ in range(2)))
    place = f"{{sandbox._scratch}}/{{program.keeper}}"
    print(os.path.exists(place))
print(os.path.exists(place))
"""
            assert run_there(USER + attempt) == ["output output", "True", "False"], hide

    def test_what_programs_need_is_there(self, landlock: Sandbox) -> None:
        source = """
import asyncio, ctypes, decimal, json, lzma, signal, sqlite3, ssl, tempfile, threading, zlib, os, time
from concurrent.futures import ThreadPoolExecutor
async def five():
    await asyncio.sleep(0.001)
    return 5
with ThreadPoolExecutor(2) as pool:
    print(sum(pool.map(len, ["a", "bc"])), asyncio.run(five()))
with tempfile.TemporaryFile() as file:
    file.write(b"x")
signal.signal(signal.SIGUSR1, lambda *_: print("signal"))
os.kill(os.getpid(), signal.SIGUSR1)
print(sqlite3.connect("base").execute("select 7").fetchone())
"""
        assert printed(landlock, source) == "3 5\nsignal\n(7,)\n"

    def test_limits(self, landlock: Sandbox) -> None:
        fill = "for i in range(4):\n    open(str(i), 'wb').write(bytes(1 << 19))\nimport time; time.sleep(60)"
        many = "import os, time\nfor i in range(99): os.mkdir(str(i))\ntime.sleep(60)"
        programs = {
            "text = bytearray(1 << 30)": Ending.EXITED,
            "while True: pass": Ending.CPU_TIME,
            "while True: print('x' * 1000)": Ending.OUTPUT,
            fill: Ending.OUTPUT,
            many: Ending.OUTPUT,
        }
        for source, ending in programs.items():
            with landlock.program(source) as program:
                outcome = program.run(RunWithInput(text=""))
            assert (outcome.ending, outcome.succeeded) == (ending, False), source

    def test_nothing_is_left(self) -> None:
        with Sandbox(SandboxOptions(limits=BRIEF, isolation=Isolation.LANDLOCK)) as sandbox:
            with sandbox.program("open('x', 'w')\nimport time\ntime.sleep(60)") as program:
                keeper = psutil.Process(program.keeper)
                outcomes = [program.run(RunWithInput(text="")) for _ in range(2)]
                place = Path(f"{sandbox._scratch}/{program.keeper}")
                assert place.is_dir()
            assert [outcome.ending for outcome in outcomes] == [Ending.WALL_TIME] * 2
            assert not place.exists()
            assert psutil.wait_procs([keeper], timeout=20)[1] == []

    def test_a_killed_keeper_takes_its_program_along(self) -> None:
        source = "import ctypes\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nimport time\ntime.sleep(600)"
        with Sandbox(SandboxOptions(isolation=Isolation.LANDLOCK)) as sandbox, sandbox.program(source) as program:
            runner = threading.Thread(target=program.run, args=(RunWithInput(text=""),))
            runner.start()
            keeper = psutil.Process(program.keeper)
            children = wait_until(keeper.children, "the program's process")
            keeper.kill()
            runner.join()
            assert psutil.wait_procs([keeper, *children], timeout=20)[1] == []

    def test_a_forger_gets_no_further_than_elsewhere(self, landlock: Sandbox) -> None:
        for forger in ("a killed judge", "a verdict on every descriptor", "the expected value among all objects"):
            with landlock.program(FORGERS[forger]) as program:
                outcome = program.run(Check(test="assert f(3) == 9"))
            assert not outcome.answer or json.loads(outcome.answer)["passed"] is False, forger
        with landlock.program("def f(x): return x * x") as program:
            assert json.loads(program.run(Check(test="assert f(3) == 9")).answer)["passed"]


@pytest.mark.parametrize("isolation", [Isolation.NAMESPACES, Isolation.LANDLOCK])
def test_the_kernel_signals_nobody_for_a_program(isolation: Isolation) -> None:
    """The owner of a descriptor gets the signal that the program chose, SIGKILL too; breaking a lease makes others
    wait.
    """
    source = """
import fcntl, struct
reader, writer = os.pipe()
end, _ = socket.socketpair()
parent = os.getppid()
print(refused(fcntl.fcntl, reader, 8, parent), refused(fcntl.fcntl, reader, 10, 9))
print(refused(fcntl.fcntl, reader, 15, struct.pack("ii", 1, parent)), refused(fcntl.fcntl, reader, 1024, 0))
print(*(refused(fcntl.ioctl, end, number, struct.pack("i", parent)) for number in (0x8901, 0x8902)))
os.set_blocking(reader, False)
"""
    with Sandbox(SandboxOptions(limits=LIMITS, isolation=isolation)) as sandbox:
        assert set(printed(sandbox, REFUSED + source).split()) == {"EPERM"}


def test_a_tree_is_deleted_however_deep_it_is(tmp_path: Path) -> None:
    """Deeper than Python recurses and longer than a path may be, with names that occur on every level."""
    here = os.open(".", os.O_RDONLY)
    try:
        (tmp_path / "tree").mkdir()
        os.chdir(tmp_path / "tree")
        for _ in range(1500):
            os.symlink(tmp_path, "link")
            os.mkdir("name")
            os.chdir("name")
    finally:
        os.fchdir(here)
        os.close(here)
    (tmp_path / "mine").write_text("untouched")
    delete_tree(str(tmp_path / "tree"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_directory_that_is_replaced_while_it_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a link to what is dear to us, after it has been looked at: once as the tree, once as a directory in it."""
    dear = tmp_path / "dear"
    dear.mkdir(mode=0o750)
    (dear / "file").write_text("unchanged")
    (tmp_path / "link").symlink_to(dear)
    with pytest.raises(NotADirectoryError):
        delete_tree(str(tmp_path / "link"))
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    listed = os.listdir

    def replace(place: int) -> list[str]:
        if "inner" in (names := listed(place)):
            (tmp_path / "tree" / "inner").rmdir()
            (tmp_path / "tree" / "inner").symlink_to(dear)
        return names

    monkeypatch.setattr(os, "listdir", replace)
    delete_tree(str(tmp_path / "tree"))
    monkeypatch.undo()
    assert not (tmp_path / "tree").exists()
    assert (dear / "file").read_text() == "unchanged"
    assert stat.S_IMODE(dear.stat().st_mode) == 0o750


@needs_second_user
def test_others_can_put_nothing_among_the_directories_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the directory for temporary files is a run's, which a user without rights cannot enter."""
    run = make_temp_dir("0000abcd")
    monkeypatch.setattr(tempfile, "tempdir", str(run))
    monkeypatch.setenv("TMPDIR", str(run))
    try:
        with Sandbox(SandboxOptions(limits=LIMITS, isolation=Isolation.LANDLOCK)) as sandbox:
            assert printed(sandbox, "open('x', 'w').write('y'); print(open('x').read())") == "y\n"
            scratch = Path(sandbox._scratch)
            done = as_nobody("import os, sys; os.mkdir(sys.argv[1])", scratch / "12345")
            assert "PermissionError" in done.stderr
        assert not scratch.exists()
    finally:
        shutil.rmtree(run)


def test_the_doctor_names_the_weaker_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(process._TIERS, Isolation.AUTO, (Isolation.LANDLOCK,))  # type: ignore[misc]
    finding = check_sandbox()
    assert finding.status is Severity.OK
    assert finding.found.startswith("Landlock (the weaker of two kinds")


def test_the_list_of_calls() -> None:
    """Numbers from the kernel's tables: read, openat, futex and kill of both machines; socket and execve in none."""
    for column, (read, openat, futex, kill, absent) in enumerate(
        [(0, 257, 202, 62, (41, 59, 322)), (63, 56, 98, 129, (198, 221, 281))]
    ):
        alone, together = (set(calls.numbers(column, one_process=value)) for value in (True, False))
        assert {read, openat, futex} <= alone < together
        assert kill in together - alone
        assert not together & set(absent)
