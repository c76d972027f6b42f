"""Who starts and ends what: nothing outlives the process that asked, and what is missing is said."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megarl.doctor.finding import Severity
from megarl.doctor.machine import check_sandbox
from megarl_sandbox import Ending, Isolation, Limits, OptionError, RunWithInput, Sandbox, SandboxOptions, process, wire
from megarl_sandbox.jail import kernel, namespaces
from megarl_sandbox.process import REMEDIES
from tests.helpers.sandboxes import BRIEF
from tests.helpers.waiting import wait_until

ROOT = str(Path(__file__).parents[3])
SLEEPER = "import time\ntime.sleep(600)"


def gone(processes: list[psutil.Process]) -> bool:
    return psutil.wait_procs(processes, timeout=20)[1] == []


def test_ending_the_sandbox_ends_a_program_that_runs() -> None:
    with Sandbox(SandboxOptions(limits=BRIEF)) as sandbox, sandbox.program(SLEEPER) as program:
        family = [psutil.Process(program.keeper), *psutil.Process(program.keeper).children()]
        sandbox.close()
        assert gone(family)
        assert program.run(RunWithInput(text="")).ending is Ending.LOST


def test_a_sandbox_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox(SandboxOptions(limits=BRIEF)) as sandbox:
        with sandbox.program("print(1)") as program:
            family = [psutil.Process(program.keeper), *psutil.Process(program.keeper).children()]
            family[1].suspend()
            monkeypatch.setattr(process, "MARGIN_S", 0.1)
            assert program.run(RunWithInput(text="")).ending is Ending.LOST
            monkeypatch.undo()
        assert gone(family)
        with sandbox.program("print(2)") as program:
            assert program.run(RunWithInput(text="")).stdout == b"2\n"


def test_a_sandbox_that_is_killed_while_it_closes_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a task that it has not read, its end of the connection is reset."""
    with Sandbox(SandboxOptions(limits=BRIEF)) as sandbox, sandbox.program("print(1)") as program:
        family = [psutil.Process(program.keeper), *psutil.Process(program.keeper).children()]
        psutil.Process(program.keeper).suspend()
        wire.send(program._connection, {"kind": "RunWithInput", "text": ""})
        monkeypatch.setattr(process, "MARGIN_S", 1.0)
    assert gone(family)


def test_a_launcher_that_died_is_started_again() -> None:
    with Sandbox(SandboxOptions(limits=BRIEF)) as sandbox:
        with sandbox.program("print(1)") as program:
            keeper = psutil.Process(program.keeper)
            launcher = keeper.parent()
            assert launcher is not None
            launcher.kill()
            # A keeper that has not noticed yet would still run the program.
            assert gone([launcher, keeper])
            assert program.run(RunWithInput(text="")).ending is Ending.LOST
        with sandbox.program("print(2)") as program:
            assert program.run(RunWithInput(text="")).stdout == b"2\n"


def test_a_caller_that_is_killed_leaves_nothing() -> None:
    caller_source = f"""
from megarl_sandbox import Limits, RunWithInput, Sandbox, SandboxOptions
with Sandbox(SandboxOptions(limits=Limits(wall_s=300))).program({SLEEPER!r}) as program:
    print(program.keeper, flush=True)
    program.run(RunWithInput(text=""))
"""
    with subprocess.Popen(
        [sys.executable, "-c", caller_source], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": ROOT}
    ) as caller:
        assert caller.stdout is not None
        keeper = psutil.Process(int(caller.stdout.readline()))
        children = wait_until(keeper.children, "the program's process")
        family = [keeper, keeper.parent(), *children]
        caller.kill()
    assert len(family) == 3
    assert gone([process for process in family if process is not None])


# Where a process of a new user namespace is, with the first argument as its user there, and may make no further one
# if the second argument is 0.
CONFINED = """
import os, sys
from megarl_sandbox import *
from megarl_sandbox.jail import kernel, namespaces
user, group = os.getuid(), os.getgid()
kernel.unshare(kernel.CLONE_NEWUSER)
def write(path, text):
    with open(path, "w") as file:
        file.write(text)
write("/proc/self/setgroups", "deny")
write("/proc/self/uid_map", f"{sys.argv[1]} {user} 1")
write("/proc/self/gid_map", f"{sys.argv[1]} {group} 1")
write("/proc/sys/user/max_user_namespaces", sys.argv[2])
"""


def run_confined(user: int, namespaces: int, source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CONFINED + source, str(user), str(namespaces)],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_an_ordinary_user_needs_no_privilege() -> None:
    run = """
assert os.geteuid() == 4321
source = '''
import os, time
print(os.getuid(), flush=True)
if input():
    if os.fork() == 0:
        os.fork()
    text = b"x" * (48 << 20)
    time.sleep(60)
'''
options = SandboxOptions(limits=Limits(memory_mib=128), isolation=Isolation.NAMESPACES)
with Sandbox(options) as sandbox, sandbox.program(source) as program:
    for text in ("\\n", "several processes hold more than one may"):
        outcome = program.run(RunWithInput(text=text))
        print(outcome.ending, outcome.stdout)
"""
    done = run_confined(4321, 10, run)
    assert done.stdout == "exited b'1000\\n'\nmemory b'1000\\n'\n", done.stderr


def test_where_namespaces_are_missing_it_refuses_and_says_so() -> None:
    refuse = """
try:
    Sandbox(SandboxOptions(isolation=Isolation.NAMESPACES)).program("")
except ValueError as error:
    print(type(error).__name__, error)
limits_only = SandboxOptions(isolation=Isolation.LIMITS_ONLY)
with Sandbox(limits_only) as sandbox, sandbox.program("print(5)") as program:
    print(program.run(RunWithInput(text="")).stdout)
"""
    refusal, otherwise = run_confined(4321, 0, refuse).stdout.splitlines()
    assert refusal.startswith(
        "OptionError isolation=namespaces: this machine isolates no programs: it refuses namespaces at "
        "the step 'user namespace' (unshare: No space left on device); allow user namespaces: sysctl user.max_user_n"
    )
    last = "or set isolation=limits_only, which protects neither files nor the network from programs"
    assert refusal.endswith(last)
    assert otherwise == "b'5\\n'"


def test_every_step_has_a_remedy() -> None:
    source = "".join(file.read_text() for file in Path(kernel.__file__).parent.glob("*.py"))
    named = set(re.findall(r'(?:step|StepError)\("([^"]+)"', source)) | set(namespaces.NAMESPACES)
    assert named == set(REMEDIES)


def test_what_an_interpreter_cannot_live_with_is_no_failure_of_programs() -> None:
    options = SandboxOptions(limits=Limits(output_mib=1e-6))
    with (
        Sandbox(options) as sandbox,
        pytest.raises(OptionError, match="the sandbox cannot run a program that does nothing here"),
    ):
        sandbox.program("print(1)")


def test_packages_are_importable_and_read_only() -> None:
    # Modules of a directory that is nobody's package otherwise, wherever this environment lies.
    packages = str(Path(json.__file__).parent)
    source = """
import scanner
try:
    open(scanner.__file__, "a")
except OSError as error:
    print(scanner.__file__, error.strerror, sep=": ")
"""
    with Sandbox(SandboxOptions(import_paths=(packages,))) as sandbox, sandbox.program(source) as program:
        outcome = program.run(RunWithInput(text=""))
    # Whether the file is the program's own or not decides which comes first.
    refusals = ("Permission denied", "Read-only file system")
    expected = {f"{os.path.realpath(packages)}/scanner.py: {refusal}" for refusal in refusals}
    assert outcome.stdout.decode().strip() in expected


def test_packages_in_the_place_of_scratch_files() -> None:
    options = SandboxOptions(import_paths=("/tmp/packages",))
    with (
        Sandbox(options) as sandbox,
        pytest.raises(OptionError, match="need /tmp/packages, but their own files take"),
    ):
        sandbox.program("")


@pytest.mark.parametrize("name", ["cpu_s", "wall_s", "memory_mib", "processes", "files_mib", "files", "output_mib"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(OptionError, match=f"limits.{name}: got 0, expected more than 0"):
        Limits(**{name: 0})


def test_the_doctor_tries_it() -> None:
    finding = check_sandbox()
    assert (finding.status, finding.subject) == (Severity.OK, "code sandbox")
    assert finding.found == "namespaces (the stronger of two kinds)"


class TestLimitsOnly:
    """Without isolation: what is left."""

    def test_it_runs_and_cleans_up(self) -> None:
        options = SandboxOptions(isolation=Isolation.LIMITS_ONLY, limits=BRIEF)
        source = """
import os, time
print(os.getcwd(), os.listdir("."), dict(os.environ).keys() - {"LC_CTYPE"}, flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        open("started", "w").close()
        time.sleep(600)
    os._exit(0)
while not os.path.exists("started"):
    time.sleep(0.001)
time.sleep(float(input()))
"""
        with Sandbox(options) as sandbox, sandbox.program(source) as program:
            place = f"{sandbox._scratch}/{program.keeper}"
            outcomes = [program.run(RunWithInput(text=text)) for text in ("0", "600")]
        assert [outcome.ending for outcome in outcomes] == [Ending.EXITED, Ending.WALL_TIME]
        for outcome in outcomes:
            first, daemon = outcome.stdout.decode().splitlines()
            assert first == f"{place} [] set()"
            assert not psutil.pid_exists(int(daemon))
        assert not Path(place).parent.exists()

    def test_limits_and_filter_hold(self) -> None:
        options = SandboxOptions(isolation=Isolation.LIMITS_ONLY, limits=BRIEF)
        programs = {
            "bytearray(1 << 30)": b"MemoryError",
            "import socket; socket.socket()": b"PermissionError",
            "open('x', 'wb').write(bytes(2 << 20))": b"File too large",
            "while True: print('x' * 1000)": b"",
        }
        with Sandbox(options) as sandbox:
            for source, error in programs.items():
                with sandbox.program(source) as program:
                    outcome = program.run(RunWithInput(text=""))
                assert not outcome.succeeded
                assert error in outcome.stderr

    def test_a_killed_keeper_leaves_no_directory(self) -> None:
        with Sandbox(SandboxOptions(isolation=Isolation.LIMITS_ONLY)) as sandbox:
            with sandbox.program("") as program:
                os.kill(program.keeper, signal.SIGKILL)
            assert not Path(sandbox._scratch, str(program.keeper)).exists()
