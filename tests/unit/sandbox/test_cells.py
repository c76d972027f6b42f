"""Cells: an interpreter keeps what they leave, until it ends or goes over a limit, and stands still between them."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from megarl_sandbox import Cell, Ending, Isolation, Limits, Outcome, Program, RunWithInput, Sandbox, SandboxOptions
from tests.helpers.sandboxes import BRIEF, LIMITS, run_contained
from tests.helpers.waiting import wait_until

TIERS = (Isolation.NAMESPACES, Isolation.LIMITS_ONLY)
# For a cell that is there to run out of time, while those before and after it must not, on a busy machine either.
IMPATIENT = replace(BRIEF, cpu_s=20, wall_s=3)


@pytest.fixture(scope="module", params=TIERS)
def any_sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    limits = replace(BRIEF, cpu_s=3, wall_s=30)
    with Sandbox(SandboxOptions(limits=limits, isolation=request.param)) as sandbox:
        yield sandbox


def said(outcome: Outcome) -> tuple[Ending, int | None, str]:
    return outcome.ending, outcome.exit_code, outcome.stdout.decode()


def run(program: Program, code: str) -> Outcome:
    return program.run(Cell(code=code))


def test_names_files_and_imports_last_from_cell_to_cell(any_sandbox: Sandbox) -> None:
    with any_sandbox.program("import math\nstart = 40") as program:
        first = run(program, "def f(x):\n    return x + start\nopen('note', 'w').write('kept')\nprint('é')")
        second = run(program, "print(open('note').read())\nf(math.floor(2.5))")
        third = run(program, "_ + 1; None")
    assert said(first) == (Ending.WAITS, 0, "é\n")
    assert said(second) == (Ending.WAITS, 0, "kept\n42\n")
    assert said(third) == (Ending.WAITS, 0, "")
    assert first.succeeded


@pytest.mark.parametrize(
    ("code", "exit_code", "stderr"),
    [
        (
            "x = 2\nx / 0",
            1,
            'Traceback (most recent call last):\n  File "cell 2", line 2, in <module>\n    x / 0\n',
        ),
        ("def f(:", 1, '  File "cell 2", line 1\n    def f(:\n'),
        ("exit(3)", 3, ""),
        ("input()", 1, "Traceback (most recent call last):\n"),
    ],
)
def test_a_cell_that_raises_or_exits_ends_only_itself(
    any_sandbox: Sandbox, code: str, exit_code: int, stderr: str
) -> None:
    with any_sandbox.program("") as program:
        run(program, "y = 5")
        outcome = run(program, code)
        assert (outcome.ending, outcome.exit_code, outcome.succeeded) == (Ending.WAITS, exit_code, False)
        # Nothing of the sandbox's own code is in it.
        assert outcome.stderr.decode().startswith(stderr)
        assert said(run(program, "y")) == (Ending.WAITS, 0, "5\n")


@pytest.mark.parametrize("isolation", TIERS)
@pytest.mark.parametrize(
    ("code", "ending", "limits"),
    [
        ("import time\ntime.sleep(60)", Ending.WALL_TIME, IMPATIENT),
        # It ends as the one above, and `test_cpu_time_is_that_of_all_cells` has a busy one.
        pytest.param("while True: pass", Ending.WALL_TIME, IMPATIENT, marks=pytest.mark.long),
        ("print('x' * 200_000)", Ending.OUTPUT, LIMITS),
        ("import os\nos.kill(os.getpid(), 11)", Ending.SIGNALLED, LIMITS),
        ("import os\nos._exit(0)", Ending.EXITED, LIMITS),
    ],
)
def test_an_interpreter_that_is_over_begins_anew(
    isolation: Isolation, code: str, ending: Ending, limits: Limits
) -> None:
    with (
        Sandbox(SandboxOptions(limits=limits, isolation=isolation)) as sandbox,
        sandbox.program("kept = 1") as program,
    ):
        run(program, "lost = 2\nopen('note', 'w').close()")
        assert run(program, code).ending is ending
        again = run(program, "import os\nprint(kept, 'lost' in globals(), os.listdir())")
        assert said(again) == (Ending.WAITS, 0, "1 False []\n")


def test_cpu_time_is_that_of_all_cells(any_sandbox: Sandbox) -> None:
    burn = "import time\nend = time.process_time() + 1.2\nwhile time.process_time() < end: pass"
    with any_sandbox.program("") as program:
        endings = [run(program, burn).ending for _ in range(3)]
    # A busy machine may take too long for a cell.
    assert endings[-1] is Ending.CPU_TIME or Ending.WALL_TIME in endings


def test_nothing_runs_between_cells(sandbox: Sandbox) -> None:
    code = """
import os, threading, time
def count():
    global n
    while True:
        n += 1
        time.sleep(0.001)
n = 0
threading.Thread(target=count, daemon=True).start()
child = os.fork()
if child == 0:
    while True: pass
"""
    with sandbox.program("") as program:
        assert run(program, code).ending is Ending.WAITS
        family = psutil.Process(program.keeper).children(recursive=True)[1:]
        assert len(family) == 2

        def statuses() -> set[str]:
            return {process.status() for process in family}

        wait_until(lambda: statuses() == {psutil.STATUS_STOPPED}, "two stopped processes", timeout_s=10, seen=statuses)
        used = [process.cpu_times().user for process in family]
        time.sleep(0.3)
        assert [process.cpu_times().user for process in family] == used
        assert int(run(program, "before = n\ntime.sleep(0.1)\nn - before").stdout) > 0


def test_output_is_limited_by_cell(sandbox: Sandbox) -> None:
    with sandbox.program("") as program:
        endings = {run(program, "print('x' * 100_000)").ending for _ in range(3)}
    assert endings == {Ending.WAITS}


def test_other_tasks_and_the_end_leave_nothing_of_cells(sandbox: Sandbox) -> None:
    source = "import os\nprint(os.listdir(), 'left' in globals())"
    cell = Cell(code="left = 1\nopen('left', 'w').close()")
    *_, script, again = run_contained(
        sandbox, source, cell, cell, RunWithInput(text=""), Cell(code="'left' in globals()")
    )
    assert script.stdout == b"[] False\n"
    assert again.stdout == b"[] False\nFalse\n"


def test_a_program_that_does_not_compile_has_no_cells(sandbox: Sandbox) -> None:
    with sandbox.program("def f(:") as program:
        outcome = run(program, "1")
    assert (outcome.ending, outcome.exit_code) == (Ending.EXITED, 1)
    assert outcome.stderr.endswith(b"SyntaxError: invalid syntax\n")


def test_a_cell_may_answer_for_itself_but_hides_nothing(sandbox: Sandbox) -> None:
    """It can only say early that it is over, which is its own loss."""
    with sandbox.program("") as program:
        outcome = run(program, "import os, time\nos.write(3, b'\\x07')\ntime.sleep(5)")
        assert (outcome.ending, outcome.exit_code) == (Ending.WAITS, 7)
        assert os.path.exists(f"/proc/{program.keeper}")
