"""Programs against their tests, for real."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from megarl.errors import ConfigError, DataError
from megarl.rewards import score
from megarl.rewards.code import CodeOptions, Credit, score_code
from megarl.types import Reward
from megarl_sandbox import Limits, SandboxOptions

SUMS = json.dumps({"inputs": ["1 2", "3 4", "5 6", "7 8"], "outputs": ["3", "7", "11", "15"]})
SANDBOX = SandboxOptions(limits=Limits(cpu_s=1, output_mib=0.125))
FRACTION = CodeOptions(sandbox=SANDBOX, credit=Credit.FRACTION)
ALL = CodeOptions(sandbox=SANDBOX)


def judged(code: str, truth: str = SUMS, options: CodeOptions = FRACTION) -> Reward:
    return score_code(f"So:\n```python\n{code}\n```\n", truth, {}, options=options)


def counts(reward: Reward) -> Mapping[str, float]:
    """Of the verdicts that occurred."""
    shape = ("num_tests", "parse_failed")
    return {name: count for name, count in reward.details.items() if count and name not in shape}


@pytest.mark.parametrize("source", ["codecontests", "apps", "codeforces", "taco"])
def test_sources(source: str) -> None:
    right = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    reward = score(source, right, SUMS, {})
    assert (reward.score, reward.correct) == (1.0, True)
    assert reward.details["passed"] == reward.details["num_tests"] == 4
    nothing = score(source, "It is the sum.", SUMS, {})
    assert (nothing.score, nothing.correct) == (-1.0, False)
    assert (nothing.details["parse_failed"], nothing.details["not_run"]) == (1, 4)


@pytest.mark.parametrize(
    ("code", "passed", "others"),
    [
        ("print(sum(map(int, input().split())))", 4, {}),
        ("print(3)", 1, {"wrong": 3}),
        ("a, b = map(int, input().split())\nprint(a + b if a < 5 else 1 / 0)", 2, {"crashed": 2}),
        ("a, b = map(int, input().split())\nprint(a + b)\nwhile a == 7: pass", 3, {"timed_out": 1}),
        ("a, b = map(int, input().split())\nprint(a + b)\nwhile a == 7: print(a)", 3, {"over_limit": 1}),
        ("print(7); exit(1)", 0, {"crashed": 4}),
        ("def f(:", 0, {"crashed": 4}),
        ("import os; os.kill(os.getpid(), 9)", 0, {"crashed": 4}),
    ],
)
def test_fractions_and_verdicts(code: str, passed: int, others: dict[str, float]) -> None:
    reward = judged(code)
    assert reward.score == passed / 4
    assert reward.correct is (passed == 4)
    assert counts(reward) == ({"passed": passed} if passed else {}) | others


def test_a_program_that_sleeps_times_out() -> None:
    options = CodeOptions(sandbox=SandboxOptions(limits=Limits(wall_s=0.5)), max_tests=1)
    assert counts(judged("import time\nprint(3, flush=True)\ntime.sleep(60)", options=options)) == {"timed_out": 1}


def test_all_or_nothing_stops_at_the_first_failure() -> None:
    reward = judged("a, b = map(int, input().split())\nprint(a + b if a == 1 else 0)", options=ALL)
    assert (reward.score, reward.correct) == (0.0, False)
    assert counts(reward) == {"passed": 1, "wrong": 1, "not_run": 2}
    assert judged("print(sum(map(int, input().split())))", options=ALL).score == 1.0


def test_a_program_that_hangs_is_not_waited_for_at_every_test() -> None:
    options = CodeOptions(sandbox=SANDBOX, credit=Credit.FRACTION, max_timeouts=1)
    reward = judged("a, b = map(int, input().split())\nprint(a + b)\nwhile a == 3: pass", options=options)
    assert reward.score == 0.25
    assert counts(reward) == {"passed": 1, "timed_out": 3}


def test_the_first_tests_may_be_enough() -> None:
    options = CodeOptions(sandbox=SANDBOX, max_tests=1)
    reward = judged("print(3)", options=options)
    assert (reward.score, reward.details["num_tests"]) == (1.0, 1)


FUNCTION = json.dumps({"fn_name": "add", "inputs": [[1, 2], "3\n4"], "outputs": [[3], "7"]})
ASSERTIONS = json.dumps({"assert_case": ["assert add(1, 2) == 3", "assert add(3, 4) == 7", "assert not add(0, 0)"]})
ADD = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    ("code", "functions", "assertions"),
    [
        (ADD, 1.0, 1.0),
        (f"{ADD}\nif __name__ == '__main__':\n    print(add(*input()))", 1.0, 1.0),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", 1.0, 0.0),
        ("def add(a, b):\n    return 3", 0.5, 1 / 3),
        # What may not pass: leaving early, an object that equals everything, an assertion that is switched off.
        ("import sys\nsys.exit(0)", 0.0, 0.0),
        ("import os\nos._exit(0)", 0.0, 0.0),
        ("class Any:\n    __eq__ = lambda *_: True\nadd = lambda a, b: Any()", 0.0, 0.0),
        ("def add(a, b):\n    import os\n    os._exit(0)", 0.0, 0.0),
        ('import os\nos.write(3, b\'{"roots": [3], "nodes": []}\')\nos._exit(0)', 0.5, 0.0),
        ("import os\nos.write(3, b'true')\nos._exit(0)", 0.0, 0.0),
    ],
)
def test_functions_and_assertions(code: str, functions: float, assertions: float) -> None:
    assert judged(code, FUNCTION).score == functions
    assert judged(code, ASSERTIONS).score == pytest.approx(assertions)


def test_a_tolerance() -> None:
    truth = json.dumps({"inputs": ["1"], "outputs": ["0.3333"]})
    third = "print(int(input()) / 3)"
    assert judged(third, truth).score == 0
    assert judged(third, truth, CodeOptions(sandbox=SANDBOX, float_tolerance=1e-4)).score == 1


def test_tests_in_the_extra_information() -> None:
    response = "```python\nprint(sum(map(int, input().split())))\n```"
    extra: dict[str, Any] = {"ground_truth": json.loads(SUMS)}
    assert score_code(response, "", extra, options=ALL).score == 1.0


def test_bad_tests_are_an_error_even_without_a_program() -> None:
    with pytest.raises(DataError, match="it has no tests"):
        score("taco", "no program", '{"inputs": [], "outputs": []}', {})


def test_a_sandbox_that_cannot_be_is_an_error() -> None:
    options = CodeOptions(sandbox=SandboxOptions(limits=Limits(output_mib=1e-6)))
    with pytest.raises(ConfigError, match="the sandbox cannot run a program that does nothing here"):
        judged(ADD, FUNCTION, options)
