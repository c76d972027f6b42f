"""Scorer of programs."""

import atexit
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from megarl.rewards.code.extract import extract_code
from megarl.rewards.code.options import CodeOptions, Credit
from megarl.rewards.code.tests import Test, parse_tests
from megarl.rewards.registry import PARSE_FAILED, SCORERS
from megarl.sandbox import Ending, Outcome, Sandbox, SandboxOptions
from megarl.types import Reward

# The name of this scorer.
CODE = "code"
_DEFAULT = CodeOptions()


class Verdict(StrEnum):
    """Of one test; each has a count in `Reward.details`."""

    PASSED = "passed"
    WRONG = "wrong"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    # Memory or output.
    OVER_LIMIT = "over_limit"
    # The program ended its own sandbox, or this machine stood still.
    LOST = "lost"
    # After a failure that decided, or because there is no program.
    NOT_RUN = "not_run"


_VERDICTS: Mapping[Ending, Verdict] = {
    Ending.SIGNALLED: Verdict.CRASHED,
    Ending.CPU_TIME: Verdict.TIMED_OUT,
    Ending.WALL_TIME: Verdict.TIMED_OUT,
    Ending.MEMORY: Verdict.OVER_LIMIT,
    Ending.OUTPUT: Verdict.OVER_LIMIT,
    Ending.LOST: Verdict.LOST,
}


@SCORERS.register(CODE)
def score_code(
    response: str, ground_truth: str, extra_info: Mapping[str, Any], *, options: CodeOptions = _DEFAULT
) -> Reward:
    """Run the last Python block of `response` against the tests in `ground_truth`, or in `extra_info` if that is empty.

    All or nothing: 1 if it passes all, else 0. Fraction: passed / tests. `details` counts each verdict.
    DataError for malformed tests, ConfigError where programs cannot be shut in.
    """
    tests = parse_tests(ground_truth or extra_info.get("ground_truth", ""), tolerance=options.float_tolerance)
    tests = tests[: options.max_tests]
    code = extract_code(response)
    verdicts = [Verdict.NOT_RUN] * len(tests) if code is None else judge(code, tests, options)
    counts = Counter(verdicts)
    is_correct = counts[Verdict.PASSED] == len(tests)
    score = counts[Verdict.PASSED] / len(tests) if options.credit is Credit.FRACTION else float(is_correct)
    details = {verdict.value: float(counts[verdict]) for verdict in Verdict}
    details |= {PARSE_FAILED: float(code is None), "num_tests": float(len(tests))}
    return Reward(score=score, correct=is_correct, details=details)


def judge(code: str, tests: Sequence[Test], options: CodeOptions) -> list[Verdict]:
    """A verdict per test, all of them in one sandbox."""
    verdicts: list[Verdict] = []
    with _sandbox_of(options.sandbox).program(code) as program:
        for test in tests:
            verdicts.append(_verdict(test, program.run(test.task)))
            if options.credit is Credit.ALL_OR_NOTHING and verdicts[-1] is not Verdict.PASSED:
                return verdicts + [Verdict.NOT_RUN] * (len(tests) - len(verdicts))
            if verdicts.count(Verdict.TIMED_OUT) == options.max_timeouts:
                return verdicts + [Verdict.TIMED_OUT] * (len(tests) - len(verdicts))
    return verdicts


def _verdict(test: Test, outcome: Outcome) -> Verdict:
    if outcome.ending is not Ending.EXITED:
        return _VERDICTS[outcome.ending]
    if not outcome.succeeded:
        return Verdict.CRASHED
    return Verdict.PASSED if test.accepts(outcome) else Verdict.WRONG


_LOCK = threading.Lock()
_SANDBOXES: dict[tuple[int, SandboxOptions], Sandbox] = {}


def _sandbox_of(options: SandboxOptions) -> Sandbox:
    """One for each process and its options: starting it takes longer than running a program."""
    key = os.getpid(), options
    with _LOCK:
        if key not in _SANDBOXES:
            _SANDBOXES[key] = Sandbox(options)
        return _SANDBOXES[key]


@atexit.register
def _close_sandboxes() -> None:
    for (pid, _), sandbox in _SANDBOXES.items():
        if pid == os.getpid():
            sandbox.close()
