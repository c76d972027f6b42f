"""Score programs: extract the code of a response, and run it in a sandbox against the tests of its problem."""

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from megarl.config.programs import open_program
from megarl.rewards.code.formats import TEST_FORMATS, Test, parse_tests
from megarl.rewards.scorers import PARSE_FAILED, SCORERS
from megarl.types import Reward
from megarl_answers import after_thoughts
from megarl_sandbox import Ending, SandboxOptions

# The name of this scorer, which reads tests of any form; `code/FORM` reads those of one form.
CODE = "code"
# The fence that ends a block is not consumed, since it may open the next block.
_BLOCK = re.compile(
    r"^[ \t]*```(?:python3?|py)[ \t]*\n(.*?)(?=^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE
)


class Credit(StrEnum):
    """The score of a program that passes k of n tests: k/n, or all or nothing (1 if k = n, else 0)."""

    FRACTION = "fraction"
    ALL_OR_NOTHING = "all_or_nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOptions:
    """Settings of how programs are run and how their outputs are compared.

    float_tolerance: t; x equals a y that is written with a point or an exponent if |x−y| ≤ t·max(1, |y|). With None,
        the digits must be equal.
    max_tests: how many of the first tests are run; None runs all.
    max_timeouts: after this many time-outs the remaining tests count as timed out too.
    """

    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    credit: Credit = Credit.ALL_OR_NOTHING
    float_tolerance: float | None = None
    max_tests: int | None = None
    max_timeouts: int = 3


_DEFAULT = CodeOptions()


class TestVerdict(StrEnum):
    """The outcome of a program on one test; `Reward.details` counts each outcome."""

    PASSED = "passed"
    WRONG = "wrong"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    # A limit on memory or output was exceeded.
    OVER_LIMIT = "over_limit"
    # The program ended its own sandbox, or the machine stalled.
    LOST = "lost"
    # Not run, because an earlier failure had decided or there is no program.
    NOT_RUN = "not_run"


_VERDICTS: Mapping[Ending, TestVerdict] = {
    Ending.SIGNALLED: TestVerdict.CRASHED,
    Ending.CPU_TIME: TestVerdict.TIMED_OUT,
    Ending.WALL_TIME: TestVerdict.TIMED_OUT,
    Ending.MEMORY: TestVerdict.OVER_LIMIT,
    Ending.OUTPUT: TestVerdict.OVER_LIMIT,
    Ending.LOST: TestVerdict.LOST,
}


def score_code(
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, object],
    *,
    options: CodeOptions = _DEFAULT,
    form: str | None = None,
) -> Reward:
    """Run the last Python block of `response` against the tests in `ground_truth` (if empty, those in `extra_info`).

    `form` is a name in `TEST_FORMATS`; with None, the keys of the ground truth show the form.

    The score is 1 if all tests pass, else 0; with the credit `fraction`, it is passed / tests. `details` counts each
    outcome of a test. Raises DataError for malformed tests, and ConfigError if the sandbox cannot run.
    """
    truth = ground_truth or extra_info.get("ground_truth", "")
    tests = parse_tests(truth, tolerance=options.float_tolerance, form=form)
    tests = tests[: options.max_tests]
    code = extract_code(response)
    verdicts = [TestVerdict.NOT_RUN] * len(tests) if code is None else run_tests(code, tests, options)
    counts = Counter(verdicts)
    is_correct = counts[TestVerdict.PASSED] == len(tests)
    score = counts[TestVerdict.PASSED] / len(tests) if options.credit is Credit.FRACTION else float(is_correct)
    details = {verdict.value: float(counts[verdict]) for verdict in TestVerdict}
    details |= {PARSE_FAILED: float(code is None), "num_tests": float(len(tests))}
    return Reward(score=score, correct=is_correct, details=details)


SCORERS.register(CODE)(score_code)
for _form in TEST_FORMATS:
    SCORERS.register(f"{CODE}/{_form}")(partial(score_code, form=_form))


def run_tests(code: str, tests: Sequence[Test], options: CodeOptions) -> list[TestVerdict]:
    """Run a program on all tests in one sandbox, and return the outcome of each test."""
    verdicts: list[TestVerdict] = []
    with open_program(code, options.sandbox) as program:
        for test in tests:
            outcome = program.run(test.task)
            if outcome.ending is not Ending.EXITED:
                verdict = _VERDICTS[outcome.ending]
            elif not outcome.succeeded:
                verdict = TestVerdict.CRASHED
            else:
                verdict = TestVerdict.PASSED if test.accepts(outcome) else TestVerdict.WRONG
            verdicts.append(verdict)
            if options.credit is Credit.ALL_OR_NOTHING and verdict is not TestVerdict.PASSED:
                return verdicts + [TestVerdict.NOT_RUN] * (len(tests) - len(verdicts))
            if verdicts.count(TestVerdict.TIMED_OUT) == options.max_timeouts:
                return verdicts + [TestVerdict.TIMED_OUT] * (len(tests) - len(verdicts))
    return verdicts


def extract_code(response: str) -> str | None:
    """Return the last code block fenced as Python, after the last thought; None if there is no such block.

    A block without an end counts, because the response may have been cut after a complete program.
    """
    blocks = _BLOCK.findall(after_thoughts(response))
    return textwrap.dedent(blocks[-1]) if blocks else None
