"""Runs programs in sandboxes whose limits are low, and checks that nothing of them is left when they have ended."""

import os
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from megarl_sandbox import Limits, Outcome, ProgramTask, RunWithInput, Sandbox

LIMITS = Limits(cpu_s=1, wall_s=120, memory_mib=128, processes=8, files_mib=1, files=16, output_mib=0.125)
# For programs that are there to run out of time.
BRIEF = Limits(cpu_s=1, wall_s=2, memory_mib=128, processes=8, files_mib=1, files=16, output_mib=0.125)


def processes_in(namespace: str) -> list[int]:
    """Processes of this machine whose pid namespace it is, as far as this user may know."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):
            if os.readlink(f"/proc/{process.pid}/ns/pid") == namespace:
                found.append(process.pid)
    return found


def run_contained(sandbox: Sandbox, source: str, *tasks: ProgramTask) -> list[Outcome]:
    """Run the tasks, and fail if the program outlives its context or changes what is mounted here."""
    mounts = Path("/proc/self/mounts").read_text()
    with ExitStack() as held:
        with sandbox.program(source) as program:
            path = f"/proc/{program.keeper}/ns/pid_for_children"
            namespace = os.readlink(path)
            # The kernel gives the number of a namespace that is gone to the next one, which may be another test's.
            held.enter_context(open(path))
            (first,) = psutil.Process(program.keeper).children()
            outcomes = [program.run(task) for task in tasks or [RunWithInput(text="")]]
        # The kernel lets the first process of a pid namespace go when all others are gone.
        assert not first.is_running()
        assert processes_in(namespace) == []
    assert Path("/proc/self/mounts").read_text() == mounts
    return outcomes


def printed(sandbox: Sandbox, source: str) -> str:
    """What a program printed that has to succeed."""
    (outcome,) = run_contained(sandbox, source)
    assert outcome.succeeded, outcome
    return outcome.stdout.decode()
