"""Parse tests of programs from the JSON of data sets, and compare outputs with the expected ones.

| JSON | a test |
|---|---|
| `{"inputs": [...], "outputs": [...]}` | a script reads an input and prints the output |
| `{"inputs": [...], "outputs": [...], "fn_name": "f"}` | `f`, or `Solution().f`, returns the output |
| `{"assert_case": ["assert f(1) == 2", ...]}` | the statements raise nothing |

Programs never see the expected outputs. Of `assert expression == literal` they only get the expression; other
assertions have to run in the program's process.
"""

import ast
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megarl.errors import DataError
from megarl.sandbox import Call, Evaluate, Execute, Outcome, ProgramTask, RunWithInput
from megarl.sandbox.jail.answer import AnswerError, decode

# Integers are compared exactly, because a tolerance would accept 1000001 for 1000000.
_INEXACT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """A test: the task for a program, and the output, value or token that is expected of it."""

    # Keeps pytest from collecting this class as a test.
    __test__ = False

    task: ProgramTask
    expected: Any
    tolerance: float | None

    def accepts(self, outcome: Outcome) -> bool:
        """Return whether a run succeeded with the expected result. A function's result may also be the only item of a
        list.
        """
        if isinstance(self.task, RunWithInput):
            return same_output(outcome.stdout.decode(errors="replace"), self.expected, self.tolerance)
        try:
            value = decode(outcome.answer)
            if not isinstance(self.task, Call):
                return same_value(value, self.expected, self.tolerance)
            value = as_json(value)
            is_wrapped = isinstance(self.expected, list) and len(self.expected) == 1
            return same_value(value, self.expected, self.tolerance) or (
                is_wrapped and same_value(value, self.expected[0], self.tolerance)
            )
        except (AnswerError, RecursionError):
            return False


def parse_tests(ground_truth: str | Mapping[str, Any], *, tolerance: float | None) -> list[Test]:
    """Parse the tests of a problem, in the order of the data.

    `tolerance` applies to numbers written with a point or an exponent, see `CodeOptions.float_tolerance`. Raises
    DataError if the data has no form of the module's table, or has no test.
    """
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else dict(ground_truth)
        if not isinstance(truth, dict):
            raise TypeError(f"it is a {type(truth).__name__}, not an object")
        if cases := truth.get("assert_case"):
            tests = [_assertion(case, tolerance) for case in _list(cases, "assert_case")]
        else:
            inputs, outputs = _list(truth["inputs"], "inputs"), _list(truth["outputs"], "outputs")
            if len(inputs) != len(outputs):
                raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
            read = _call if truth.get("fn_name") else _script
            rows = zip(inputs, outputs, strict=True)
            tests = [read(truth.get("fn_name"), given, expected, tolerance) for given, expected in rows]
        if not tests:
            raise ValueError("it has no tests")
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError) as error:
        raise DataError(
            f"ground truth of a program is {str(ground_truth)[:200]!r}: {str(error) or type(error).__name__}; expected "
            'JSON like {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}, with "fn_name" for functions, or '
            '{"assert_case": ["assert …"]}'
        ) from error
    return tests


def _list(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{name} is a {type(value).__name__}, not a list")
    return value


def _script(_: Any, given: Any, expected: Any, tolerance: float | None) -> Test:
    """Make a test that runs a script. In some data sets, its input and its output are lists of lines."""
    texts = []
    for value in (given, expected):
        text = "\n".join(value) if isinstance(value, list) and all(isinstance(x, str) for x in value) else value
        if not isinstance(text, str):
            raise TypeError(f"an input or output is {value!r}, neither text nor lines of text")
        texts.append(text)
    return Test(task=RunWithInput(text=texts[0]), expected=texts[1], tolerance=tolerance)


def _call(name: Any, given: Any, expected: Any, tolerance: float | None) -> Test:
    """Make a test that calls a function. Its arguments are a list, or a text with one JSON value per line."""
    arguments = [json.loads(line) for line in given.splitlines() if line] if isinstance(given, str) else given
    if isinstance(expected, str):
        # What is not JSON is text.
        with suppress(ValueError):
            expected = json.loads(expected)
    task = Call(function=str(name), arguments=_list(arguments, "an input"))
    return Test(task=task, expected=as_json(expected), tolerance=tolerance)


def _assertion(case: Any, tolerance: float | None) -> Test:
    """Make a test of an assertion. If it compares with a literal, the program never sees that literal."""
    if not isinstance(case, str):
        raise TypeError(f"an assert_case is {case!r}, not text")
    match ast.parse(case).body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            # If the right side is not a literal, the assertion has to run unchanged.
            with suppress(ValueError, TypeError):
                expected = ast.literal_eval(right)
                return Test(task=Evaluate(expression=ast.unparse(left)), expected=expected, tolerance=tolerance)
    token = secrets.token_hex(16)
    return Test(task=Execute(statements=case, token=token), expected=token, tolerance=tolerance)


def same_output(actual: str, expected: str, tolerance: float | None) -> bool:
    """Compare outputs line by line and word by word, ignoring the amount of space and empty lines."""
    a, e = ([words for line in text.splitlines() if (words := line.split())] for text in (actual, expected))
    if [len(words) for words in a] != [len(words) for words in e]:
        return False
    for word, wanted in zip((w for words in a for w in words), (w for words in e for w in words), strict=True):
        if word == wanted:
            continue
        if tolerance is None or not _INEXACT.fullmatch(wanted):
            return False
        try:
            if not _is_close(float(word), float(wanted), tolerance):
                return False
        except ValueError:
            return False
    return True


def same_value(actual: Any, expected: Any, tolerance: float | None) -> bool:
    """Compare Python values; floats, also inside lists, tuples and dicts, may differ by `tolerance` if it is set."""
    try:
        if tolerance is None or actual == expected:
            return bool(actual == expected)
        if isinstance(expected, float) and isinstance(actual, int | float):
            return _is_close(actual, expected, tolerance)
        if type(actual) is not type(expected):
            return False
        if isinstance(expected, list | tuple):
            pairs = zip(actual, expected, strict=False)
            return len(actual) == len(expected) and all(same_value(a, e, tolerance) for a, e in pairs)
        if isinstance(expected, dict):
            keys = expected.keys()
            return actual.keys() == keys and all(same_value(actual[k], expected[k], tolerance) for k in keys)
        return False
    except RecursionError:
        return False


def as_json(value: Any) -> Any:
    """Convert a value as a round trip through JSON would: tuples to lists, keys of dicts to strings."""
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): as_json(entry) for key, entry in value.items()}
    return value


def _is_close(actual: float, expected: float, tolerance: float) -> bool:
    try:
        return math.isfinite(actual) and abs(actual - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:
        # An integer may be too large for a float.
        return False
