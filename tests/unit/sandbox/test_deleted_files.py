"""Files that have no name any more count as long as a program holds them, however it holds them."""

import signal
from collections.abc import Iterator

import pytest

from megarl_sandbox import Cell, Ending, Isolation, Outcome, RunWithInput, Sandbox, SandboxOptions
from tests.helpers.sandboxes import LIMITS
from tests.unit.sandbox.test_tiers import USER, printed, run_there

# Of the limit of 1 MiB, each file takes 3/4.
PRELUDE = """
import ctypes, mmap, os, socket, sys, tempfile, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
SIZE = 3 << 18
def written(flags=os.O_RDWR | os.O_CREAT, name="x"):
    file = os.open(name, flags, 0o600)
    done = 0
    while done < SIZE:
        done += os.write(file, bytes(1 << 16))
    return file
"""
# Each holds eight files for a minute, unless something stops it.
ATTACKS = {
    "unlinked": """
for _ in range(8):
    written()
    os.unlink("x")
""",
    "never named": "held = [written(os.O_RDWR | os.O_TMPFILE, '.') for _ in range(8)]",
    "reserved": """
for _ in range(8):
    os.posix_fallocate(os.open('.', os.O_RDWR | os.O_TMPFILE), 0, SIZE)
""",
    "held by path alone": """
for _ in range(8):
    file = written()
    os.open("x", os.O_PATH)
    os.close(file)
    os.unlink("x")
""",
    "mapped alone": """
for _ in range(8):
    file = written()
    assert libc.mmap(None, SIZE, mmap.PROT_READ, mmap.MAP_PRIVATE, file, 0) != 2**64 - 1
    os.close(file)
    os.unlink("x")
""",
    "filled through a mapping": """
for _ in range(8):
    file = os.open('.', os.O_RDWR | os.O_TMPFILE)
    os.ftruncate(file, SIZE)
    view = mmap.mmap(file, SIZE)
    view.write(bytes(SIZE))
""",
    "in a directory that is gone": """
for _ in range(8):
    os.mkdir("d")
    os.chdir("d")
    written()
    os.unlink("x")
    os.chdir("..")
    os.rmdir("d")
""",
    "linked and unlinked": """
for i in range(8):
    written(name=f"x{i}")
    os.link(f"x{i}", f"y{i}")
    os.unlink(f"x{i}")
    os.unlink(f"y{i}")
""",
    "under way in a socket": """
ends = socket.socketpair()
for _ in range(8):
    file = written()
    socket.send_fds(ends[0], [b"x"], [file])
    os.close(file)
    os.unlink("x")
""",
    "by a process that hides": """
libc.prctl(4, 0, 0, 0, 0)
for _ in range(8):
    written()
    os.unlink("x")
""",
    "by a thread with descriptors of its own": """
def hold():
    if libc.close_range(1000, 1000, 2) != 0:
        raise OSError(ctypes.get_errno(), "close_range")
    for _ in range(8):
        written()
        os.unlink("x")
    time.sleep(60)
errors = []
threading.excepthook = errors.append
thread = threading.Thread(target=hold)
thread.start()
thread.join()
raise errors[0].exc_value
""",
    "by threads that are left": """
def hold():
    for _ in range(8):
        written()
        os.unlink("x")
    time.sleep(60)
threading.Thread(target=hold).start()
libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)
""",
}
# What is refused under Landlock, because files would get out of sight.
OUT_OF_SIGHT = ("under way in a socket", "by a thread with descriptors of its own")
HONEST = """
first = tempfile.TemporaryFile()
first.write(bytes(3 << 18))
first.flush()
view = mmap.mmap(first.fileno(), 0)
with tempfile.NamedTemporaryFile() as second, tempfile.SpooledTemporaryFile(max_size=9) as third:
    second.write(bytes(1 << 16))
    third.write(bytes(1 << 16))
    second.flush()
    third.flush()
    os.link(second.name, "again")
    threads = [threading.Thread(target=time.sleep, args=(0.2,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.unlink("again")
for _ in range(20):
    with tempfile.TemporaryFile() as file:
        file.write(bytes(1 << 17))
        file.flush()
        time.sleep(0.01)
print(len(view))
"""


@pytest.fixture(scope="module", params=[Isolation.NAMESPACES, Isolation.LANDLOCK])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(SandboxOptions(limits=LIMITS, isolation=request.param)) as sandbox:
        yield sandbox


def run(sandbox: Sandbox, source: str) -> Outcome:
    with sandbox.program(source) as program:
        return program.run(RunWithInput(text=""))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_program_that_holds_too_much_is_ended(sandbox: Sandbox, attack: str) -> None:
    outcome = run(sandbox, f"{PRELUDE}{ATTACKS[attack]}\ntime.sleep(60)")
    if sandbox.tier is Isolation.NAMESPACES:
        # The kernel refuses to write, or ends who writes through a mapping.
        assert b"No space left on device" in outcome.stderr or outcome.signal == signal.SIGBUS, outcome
    elif attack in OUT_OF_SIGHT:
        assert b"PermissionError: [Errno 1] " in outcome.stderr, outcome
    else:
        assert outcome.ending is Ending.OUTPUT, outcome


def test_honest_programs_use_temporary_files(sandbox: Sandbox) -> None:
    outcome = run(sandbox, PRELUDE + HONEST)
    assert (outcome.ending, outcome.stdout) == (Ending.EXITED, b"786432\n"), outcome


def test_cells_hold_their_files_from_one_to_the_next(sandbox: Sandbox) -> None:
    with sandbox.program(PRELUDE) as program:
        first = program.run(Cell(code="a = written()\nos.unlink('x')\nprint(os.fstat(a).st_size)"))
        second = program.run(Cell(code="b = written()\nos.unlink('x')\ntime.sleep(60)"))
    assert (first.ending, first.stdout) == (Ending.WAITS, b"786432\n")
    assert second.ending is Ending.OUTPUT or b"No space left on device" in second.stderr


def test_the_input_takes_no_bytes(sandbox: Sandbox) -> None:
    """It lies in memory that no limit counts."""
    source = """
import os, sys
for attempt in (lambda: os.write(0, b"x"), lambda: os.ftruncate(0, 1 << 20), lambda: os.posix_fallocate(0, 0, 1 << 20)):
    try:
        attempt()
    except OSError as error:
        print(error.strerror)
print(sys.stdin.read())
"""
    with sandbox.program(source) as program:
        outcome = program.run(RunWithInput(text="given"))
    assert outcome.stdout == b"Operation not permitted\n" * 3 + b"given\n"


# Root in a container, which may not look at the processes of others, and an ordinary user without namespaces.
CONTAINER = """
import os, sys
from megarl_sandbox import *
from megarl_sandbox.jail import kernel
if "again" not in sys.argv:
    kernel.prctl(kernel.PR_CAPBSET_DROP, 19)
    os.execv(sys.executable, [sys.executable, "-c", os.environ["MEGARL_TEST_SOURCE"], "again"])
"""


@pytest.mark.parametrize("host", [CONTAINER, USER], ids=["root in a container", "an ordinary user"])
def test_whoever_runs_it(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [PRELUDE + ATTACKS["unlinked"] + "time.sleep(60)", PRELUDE + HONEST]
    source = f"""{host}
options = SandboxOptions(limits=Limits(files_mib=1, files=16), isolation=Isolation.LANDLOCK)
with Sandbox(options) as sandbox:
    for source in {programs!r}:
        with sandbox.program(source) as program:
            print(program.run(RunWithInput(text="")).ending)
"""
    monkeypatch.setenv("MEGARL_TEST_SOURCE", source)
    assert run_there(source) == ["output", "exited"]


def test_no_thread_has_descriptors_of_its_own() -> None:
    """0x10900: CLONE_THREAD, CLONE_SIGHAND and CLONE_VM, but not CLONE_FILES; the number is that of clone."""
    source = PRELUDE + "print(libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10900, 0, 0, 0, 0))"
    with Sandbox(SandboxOptions(limits=LIMITS, isolation=Isolation.LANDLOCK)) as sandbox:
        assert printed(sandbox, source) == "-1\n"
