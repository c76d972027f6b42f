"""Programs that only want to run: they find what scripts expect, and every run starts afresh."""

import threading

import pytest

from megarl_sandbox import Call, Ending, Outcome, RunWithInput, Sandbox
from megarl_sandbox.jail.values import decode
from tests.helpers.sandboxes import printed, run_contained


def test_input_and_output(sandbox: Sandbox) -> None:
    # More than a pipe holds, and text beyond ASCII.
    text = "né\u2028" * 50_000 + "\n2\n"
    (outcome,) = run_contained(sandbox, "print(len(input()) + int(input()), 'é')", RunWithInput(text=text))
    assert outcome.stdout.decode() == "150002 é\n"
    assert (outcome.exit_code, outcome.signal, outcome.stderr) == (0, None, b"")


@pytest.mark.parametrize(
    ("source", "code", "stdout", "stderr"),
    [
        ("exit()", 0, b"", b""),
        ("print(1); exit(3)", 3, b"1\n", b""),
        ("import sys; sys.exit('no luck')", 1, b"", b"no luck\n"),
        ("import os; os._exit(0)", 0, b"", b""),
        ("print(1); 1 / 0", 1, b"1\n", b"ZeroDivisionError: division by zero\n"),
        ("def f(:", 1, b"", b"SyntaxError: invalid syntax\n"),
        ("import atexit; atexit.register(print, 'end'); print('start')", 0, b"start\nend\n", b""),
        ("import threading\nthreading.Thread(target=print, args=('late',)).start()", 0, b"late\n", b""),
        ("if __name__ == '__main__':\n    print(1)", 0, b"1\n", b""),
        (
            "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(20000))",
            0,
            b"20000\n",
            b"",
        ),
    ],
)
def test_endings_of_scripts(sandbox: Sandbox, source: str, code: int, stdout: bytes, stderr: bytes) -> None:
    with sandbox.program(source) as program:
        outcome = program.run(RunWithInput(text=""))
    assert (outcome.ending, outcome.exit_code, outcome.stdout) == (Ending.EXITED, code, stdout)
    assert outcome.stderr.endswith(stderr)


def test_a_signal(sandbox: Sandbox) -> None:
    with sandbox.program("import os; os.kill(os.getpid(), 11)") as program:
        outcome = program.run(RunWithInput(text=""))
    assert (outcome.ending, outcome.exit_code, outcome.signal) == (Ending.SIGNALLED, None, 11)


def test_the_standard_library_is_there(sandbox: Sandbox) -> None:
    modules = (
        "asyncio bisect bz2 collections ctypes decimal fractions heapq itertools json lzma math re sqlite3 ssl zlib"
    )
    run = "\nasync def f(): return 5\nprint(asyncio.run(f()), decimal.Decimal('0.1') * 3)"
    assert printed(sandbox, f"import {', '.join(modules.split())}{run}") == "5 0.3\n"


def test_every_run_starts_afresh(sandbox: Sandbox) -> None:
    source = """
import builtins, os, random
print(os.listdir("."), hasattr(builtins, "seen"), random.random())
builtins.seen = True
open("seen", "w").close()
"""
    outcomes = run_contained(sandbox, source, *[RunWithInput(text="")] * 3)
    seen = [outcome.stdout.decode().rsplit(" ", 1) for outcome in outcomes]
    assert [state for state, _ in seen] == ["[] False"] * 3
    assert len({number for _, number in seen}) == 3


def test_programs_draw_different_numbers(sandbox: Sandbox) -> None:
    assert printed(sandbox, "import random; print(random.random())") != printed(
        sandbox, "import random; print(random.random())"
    )


FUNCTIONS = """
import collections
def double(x):
    return 2 * x
def fail(x):
    raise ValueError(x)
class Solution:
    def triple(self, x):
        return 3 * x
class AlwaysEqual:
    def __eq__(self, other):
        return True
if __name__ == "__main__":
    fail("is not run")
"""


def test_calls(sandbox: Sandbox) -> None:
    tasks = [Call(function="double", arguments=[[1, None]]), Call(function="triple", arguments=["ab"])]
    assert [decode(outcome.answer, 100) for outcome in run_contained(sandbox, FUNCTIONS, *tasks)] == [
        [1, None, 1, None],
        "ababab",
    ]


def test_an_object_that_claims_to_equal_everything(sandbox: Sandbox) -> None:
    (outcome,) = run_contained(sandbox, FUNCTIONS + "f = AlwaysEqual", Call(function="f", arguments=[]))
    value = decode(outcome.answer, 100)
    assert value != 4
    assert [value].count(decode(outcome.answer, 100)) == 0


def test_leaving_before_the_test_gives_no_answer(sandbox: Sandbox) -> None:
    (outcome,) = run_contained(sandbox, "import os\ndef f(): return 1\nos._exit(0)", Call(function="f", arguments=[]))
    assert (outcome.exit_code, outcome.answer) == (0, b"")


def test_threads_of_this_process_share_a_sandbox(sandbox: Sandbox) -> None:
    found: dict[int, Outcome] = {}

    def run(number: int) -> None:
        with sandbox.program("import time; time.sleep(0.05); print(input())") as program:
            found[number] = program.run(RunWithInput(text=str(number)))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: outcome.stdout for number, outcome in found.items()} == {n: f"{n}\n".encode() for n in range(4)}
