"""Programs that try to get out, to see, to stay or to take too much. Each has to fail at it.

These tests never skip: where the kernel grants no namespaces they fail with the reason.
"""

import os
import socket
import sys
from pathlib import Path

import pytest

from megarl_sandbox import Ending, RunWithInput, Sandbox
from tests.helpers.sandboxes import BRIEF, LIMITS, printed, run_contained

MIB = 2**20
# Statements after which `refused(f, ...)` says with what error a call fails.
REFUSED = """
import os, sys, errno
def refused(function, *arguments, **options):
    try:
        result = function(*arguments, **options)
    except OSError as error:
        return errno.errorcode[error.errno]
    return f"succeeded: {result!r}"
"""


def test_fork_bomb(brief_sandbox: Sandbox) -> None:
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    (outcome,) = run_contained(brief_sandbox, bomb)
    assert outcome.ending in (Ending.WALL_TIME, Ending.CPU_TIME)


def test_number_of_processes(sandbox: Sandbox) -> None:
    count = """
import os, time
children = 0
try:
    while os.fork():
        children += 1
    time.sleep(60)
except OSError:
    print(children)
"""
    assert 1 <= int(printed(sandbox, count)) < LIMITS.processes


def test_number_of_threads(sandbox: Sandbox) -> None:
    count = """
import threading
event = threading.Event()
threads = []
try:
    while True:
        threads.append(threading.Thread(target=event.wait))
        threads[-1].start()
except RuntimeError:
    print(len(threads) - 1)
event.set()
"""
    assert 1 <= int(printed(sandbox, count)) < LIMITS.processes


def test_memory_of_one_process(sandbox: Sandbox) -> None:
    (outcome,) = run_contained(sandbox, "text = bytearray(1 << 30)")
    assert outcome.exit_code == 1
    assert b"MemoryError" in outcome.stderr


def test_memory_of_several_processes(sandbox: Sandbox) -> None:
    bomb = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        break
text = b"x" * (48 << 20)
time.sleep(60)
"""
    (outcome,) = run_contained(sandbox, bomb)
    assert outcome.ending is Ending.MEMORY


def test_memory_that_belongs_to_no_process(sandbox: Sandbox) -> None:
    attempt = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(refused(os.memfd_create, "x"), libc.shmget(0, 1 << 30, 0o1600), errno.errorcode[ctypes.get_errno()])
"""
    assert printed(sandbox, REFUSED + attempt) == "EPERM -1 EPERM\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output(sandbox: Sandbox, stream: str) -> None:
    (outcome,) = run_contained(sandbox, f"import sys\nwhile True:\n    sys.{stream}.write('x' * 1000)")
    assert outcome.ending is Ending.OUTPUT
    assert len(outcome.stdout) + len(outcome.stderr) <= LIMITS.output_bytes


def test_output_of_exactly_the_limit(sandbox: Sandbox) -> None:
    outcomes = run_contained(
        sandbox,
        "import os\nn = int(input())\nwhile n:\n    n -= os.write(1, b'x' * n)",
        *(RunWithInput(text=str(LIMITS.output_bytes + more)) for more in (0, 1)),
    )
    assert [outcome.ending for outcome in outcomes] == [Ending.EXITED, Ending.OUTPUT]
    assert len(outcomes[0].stdout) == LIMITS.output_bytes


def test_writes_outside(sandbox: Sandbox, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("untouched")
    places = [
        "/x",
        "/etc/x",
        "/dev/x",
        "/proc/x",
        "/usr/x",
        os.__file__,
        str(mine),
        str(tmp_path / "new"),
        "/dev/shm/x",
    ]
    attempt = f"""
for place in {places!r}:
    print(refused(open, place, "a"))
print(refused(os.mkdir, "/x"), refused(os.unlink, {str(mine)!r}), refused(os.chmod, {str(mine)!r}, 0o777))
"""
    assert set(printed(sandbox, REFUSED + attempt).split()) <= {"EROFS", "ENOENT", "EACCES"}
    assert mine.read_text() == "untouched"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_filling_the_file_system(sandbox: Sandbox) -> None:
    attempt = """
def fill(name, size):
    with open(name, "wb", buffering=0) as file:
        for _ in range(size >> 16):
            file.write(bytes(1 << 16))
print(refused(fill, "one", 4 << 20), refused(fill, "two", 4 << 20), sum(os.stat(n).st_size for n in os.listdir(".")))
"""
    first, second, size = printed(sandbox, REFUSED + attempt).split()
    assert {first, second} <= {"EFBIG", "ENOSPC"}
    assert int(size) <= LIMITS.files_mib * MIB


def test_number_of_files(sandbox: Sandbox) -> None:
    attempt = """
for i in range(1000):
    if refused(lambda: open(str(i), "w").close()) == "ENOSPC":
        break
print(i)
descriptors = 0
while refused(os.dup, 0) != "EMFILE":
    descriptors += 1
print(descriptors)
"""
    files, descriptors = map(int, printed(sandbox, REFUSED + attempt).split())
    assert 1 <= files <= LIMITS.files
    assert 1 <= descriptors <= LIMITS.files


def test_environment(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_TEST_SECRET", "hunter2")
    with Sandbox(sandbox.options) as started_now:
        found = printed(started_now, "import os; print(dict(os.environ))")
    # Python sets this one itself.
    assert found in ("{}\n", "{'LC_CTYPE': 'C.UTF-8'}\n")


def test_files_of_the_user(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o644)
    files = [str(secret), __file__, "/etc/passwd", "/etc/hostname", "/bin/sh"]
    directories = ["/sys", "/home", "/var", "/opt", str(tmp_path), str(Path(__file__).parent)]
    look = f"""
for file in {files!r}:
    print(refused(open, file))
for directory in {directories!r}:
    print(refused(os.listdir, directory))
print(os.listdir("/tmp"))
"""
    *errors, listing = printed(sandbox, REFUSED + look).splitlines()
    assert set(errors) == {"ENOENT"}
    assert listing == "[]"


def test_home_holds_nothing_but_python(sandbox: Sandbox) -> None:
    look = f"import os\nprint(*sorted(os.listdir('/')))\nhome = {str(Path.home())!r}\n"
    look += "print(*(os.listdir(home) if os.path.isdir(home) else []))"
    top, home = printed(sandbox, look).split("\n")[:2]
    allowed = {"dev", "etc", "lib", "lib64", "tmp", "usr", Path(os.__file__).parts[1]}
    assert set(top.split()) <= allowed
    assert set(home.split()) <= set(Path(os.__file__).parts)


def test_sockets(sandbox: Sandbox) -> None:
    with socket.socket() as inet, socket.socket(socket.AF_UNIX) as abstract:
        inet.bind(("127.0.0.1", 0))
        inet.listen()
        abstract.bind("\0megarl-test-sandbox")
        abstract.listen()
        attempt = """
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET):
    print(refused(socket.socket, family, socket.SOCK_RAW if family == socket.AF_PACKET else socket.SOCK_STREAM))
"""
        assert set(printed(sandbox, REFUSED + attempt).split()) == {"EPERM"}
        # Without the filter there would still be nobody to talk to.
        with sandbox.program("") as program:
            net = Path(f"/proc/{program.keeper}/net")
            assert [line.split(":")[0].strip() for line in (net / "dev").read_text().splitlines()[2:]] == ["lo"]
            assert "megarl-test-sandbox" in Path("/proc/self/net/unix").read_text()
            assert "megarl-test-sandbox" not in (net / "unix").read_text()


def test_namespaces(sandbox: Sandbox) -> None:
    with sandbox.program("") as program:
        for name in ("user", "mnt", "pid_for_children", "net", "ipc", "uts", "cgroup"):
            assert os.readlink(f"/proc/{program.keeper}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")


def test_killing_the_parent(sandbox: Sandbox) -> None:
    attempt = """
import os, signal
for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGSEGV):
    for target in (os.getppid(), 1, -1):
        try:
            os.kill(target, number)
        except (PermissionError, ProcessLookupError):
            pass
print(os.getppid())
"""
    outcomes = run_contained(sandbox, attempt, RunWithInput(text=""), RunWithInput(text=""))
    assert [outcome.stdout for outcome in outcomes] == [b"1\n", b"1\n"]


def test_ptrace(sandbox: Sandbox) -> None:
    attempt = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
attach, seize, trace_me = 16, 0x4206, 0
print(*(libc.ptrace(request, 1, 0, 0) for request in (attach, seize, trace_me)), errno.errorcode[ctypes.get_errno()])
print(*(refused(open, f"/proc/1/{name}", "rb") for name in ("mem", "maps", "environ", "stack")))
print(refused(os.listdir, "/proc/1/fd"), refused(os.listdir, "/proc/1/root"))
"""
    calls, *opened = printed(sandbox, REFUSED + attempt).splitlines()
    assert calls == "-1 -1 -1 EPERM"
    assert set(" ".join(opened).split()) <= {"EACCES", "EPERM", "ENOENT"}


def test_proc(sandbox: Sandbox) -> None:
    # Not even of its own processes: /proc/self/exe leads to the interpreter's file on the host.
    before = os.stat(os.path.realpath(sys.executable))
    attempt = """
print(refused(os.listdir, "/proc"), refused(os.chmod, "/proc/self/exe", 0o700), refused(os.utime, "/proc/self/exe"))
print(refused(os.execv, "/proc/self/exe", ["x"]), os.getpid() < 1000)
"""
    assert printed(sandbox, REFUSED + attempt).split() == ["ENOENT"] * 3 + ["EPERM", "True"]
    after = os.stat(os.path.realpath(sys.executable))
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_links_lead_nowhere(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    targets = [str(secret), f"/proc/1/root{secret}", f"/proc/self/root{secret}", f"../../../..{secret}", "/old"]
    attempt = f"""
for i, target in enumerate({targets!r}):
    os.symlink(target, str(i))
    print(refused(open, str(i)))
print(refused(os.link, os.__file__, "hard"), refused(os.chroot, "/tmp"))
"""
    *opened, others = printed(sandbox, REFUSED + attempt).splitlines()
    assert set(opened) <= {"ENOENT", "EACCES"}
    assert others == "EXDEV EPERM"


def test_no_descriptor_leaks_in(sandbox: Sandbox) -> None:
    look = """
import os, stat
def kind(fd):
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return None
    return "pipe" if stat.S_ISFIFO(mode) else "file" if stat.S_ISREG(mode) else "other"
print([(fd, kind(fd)) for fd in range(1024) if kind(fd)])
"""
    # Input, output, errors, and what answers go through.
    assert printed(sandbox, look) == "[(0, 'file'), (1, 'pipe'), (2, 'pipe'), (3, 'pipe')]\n"


def test_rights(sandbox: Sandbox) -> None:
    attempt = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
get_bounding, get_no_new_privs, get_seccomp = 23, 39, 21
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
print(*sets, {libc.prctl(get_bounding, number, 0, 0, 0) for number in range(38)})
print(libc.prctl(get_no_new_privs, 0, 0, 0, 0), libc.prctl(get_seccomp), os.getuid() == os.geteuid() != 0)
print(*(libc.unshare(flag) for flag in (0x10000000, 0x00020000)), libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))
print(refused(os.setuid, 0), refused(os.nice, -5))
"""
    capabilities, flags, namespaces, users = printed(sandbox, REFUSED + attempt).splitlines()
    assert capabilities == "0 0 0 0 0 0 {0}"
    assert flags == "1 2 True"
    assert namespaces == "-1 -1 -1" or os.uname().machine != "x86_64"
    # There may be no user 0 in there at all.
    assert set(users.split()) <= {"EPERM", "EACCES", "EINVAL"}


def test_ignoring_requests_to_end(brief_sandbox: Sandbox) -> None:
    deaf = """
import os, signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    time.sleep(60)
"""
    sleeping, busy = (run_contained(brief_sandbox, deaf + end)[0] for end in ("time.sleep(60)", "while True: pass"))
    assert sleeping.ending is Ending.WALL_TIME
    assert busy.ending in (Ending.WALL_TIME, Ending.CPU_TIME)


def test_ignoring_the_limit_of_cpu_time(sandbox: Sandbox) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    (outcome,) = run_contained(sandbox, deaf)
    assert outcome.ending is Ending.CPU_TIME
    assert LIMITS.cpu_s <= outcome.cpu_s < LIMITS.cpu_s + 2


def test_closing_the_output_and_going_on(brief_sandbox: Sandbox) -> None:
    (outcome,) = run_contained(
        brief_sandbox, "import os, time\nprint('x', flush=True)\nos.closerange(0, 64)\ntime.sleep(60)"
    )
    assert outcome.ending is Ending.WALL_TIME
    assert outcome.stdout == b"x\n"


def test_daemon(sandbox: Sandbox) -> None:
    daemon = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("/tmp/daemon", "w").close()
        while True:
            time.sleep(0.001)
            os.write(1, b".")
    os._exit(0)
os.wait()
while not os.path.exists("/tmp/daemon"):
    time.sleep(0.001)
print("parent", os.listdir("/tmp"))
"""
    outcomes = run_contained(sandbox, daemon, RunWithInput(text=""), RunWithInput(text=""))
    # The run ends with the program, though the daemon holds its output; nothing of it reaches the second run.
    assert all(outcome.succeeded and b"parent ['daemon']\n" in outcome.stdout for outcome in outcomes)


def test_a_program_that_ends_its_sandbox_only_harms_itself(sandbox: Sandbox) -> None:
    # It may lower the limits of the process that judges it where both are of one user.
    attempt = """
import resource
try:
    resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))
except OSError:
    pass
"""
    outcomes = run_contained(sandbox, attempt, RunWithInput(text=""), RunWithInput(text=""))
    assert {outcome.ending for outcome in outcomes} <= {Ending.EXITED, Ending.LOST}
    assert printed(sandbox, "print(2)") == "2\n"


def test_wall_time(brief_sandbox: Sandbox) -> None:
    (outcome,) = run_contained(brief_sandbox, "import time\ntime.sleep(60)")
    assert outcome.ending is Ending.WALL_TIME
    assert outcome.cpu_s < BRIEF.cpu_s
