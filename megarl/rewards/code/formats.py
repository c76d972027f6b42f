"""Define tests of programs, and read them as public data sets write them; `TEST_FORMATS` lists the forms by name.

A ground truth is the JSON of a data set's row, or of those of its columns that hold the tests.
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from megarl.errors import DataError
from megarl.registry import Registry
from megarl_sandbox import Call, Check, Outcome, ProgramTask, RunWithInput
from megarl_sandbox.jail.same import is_close, same_value
from megarl_sandbox.jail.tested import entry_point_of
from megarl_sandbox.jail.values import decode

# Integers are compared exactly, because a tolerance would accept 1000001 for 1000000.
_INEXACT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """A test: the task for a program, and the output or value that is expected of it. A `Check` decides by itself."""

    # Keeps pytest from collecting this class as a test.
    __test__ = False

    task: ProgramTask
    expected: Any = None
    tolerance: float | None = None

    def accepts(self, outcome: Outcome) -> bool:
        """Return whether a run succeeded with the expected result. A function's result may also be the only item of a
        list.
        """
        if isinstance(self.task, RunWithInput):
            return same_output(outcome.stdout.decode(errors="replace"), self.expected, self.tolerance)
        if isinstance(self.task, Check):
            return json.loads(outcome.answer)["passed"] is True
        try:
            # An equal answer is no larger; a list of one item may be left out.
            value = as_json(decode(outcome.answer, _size(self.expected)))
            is_wrapped = isinstance(self.expected, list) and len(self.expected) == 1
            return same_value(value, self.expected, self.tolerance) or (
                is_wrapped and same_value(value, self.expected[0], self.tolerance)
            )
        # Python refuses to write a key of very many digits.
        except (ValueError, RecursionError):
            return False


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
            if not is_close(float(word), float(wanted), tolerance):
                return False
        except ValueError:
            return False
    return True


def _size(value: object) -> int:
    """Count the values of JSON, keys included."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_size, value.values()))
    return 1 + sum(map(_size, value)) if isinstance(value, list) else 1


def as_json(value: Any) -> object:
    """Convert a value as a round trip through JSON would: tuples and arrays to lists, keys of dicts to strings."""
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): as_json(entry) for key, entry in value.items()}
    return value


Row: TypeAlias = Mapping[str, Any]
# Reads the tests of a row, given the tolerance of floats.
Reader: TypeAlias = Callable[[Row, float | None], Iterable[Test]]
# A signature without a body lacks one of these.
_BODIES = ("", "    pass", "        pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class TestFormat:
    """A form of tests: the keys that show it, and the function that reads them."""

    # Keeps pytest from collecting this class as a test.
    __test__ = False

    keys: tuple[str, ...]
    read: Reader


TEST_FORMATS: Registry[TestFormat] = Registry("format of tests", key="rewards.sources.NAME.scorer")


def parse_tests(truth: object, *, tolerance: float | None, form: str | None = None) -> list[Test]:
    """Parse the tests of a problem, in the order of the data.

    `tolerance` applies to numbers written with a point or an exponent, see `CodeOptions.float_tolerance`. `form` is a
    name in `TEST_FORMATS`; with None, the keys show it. Raises DataError if the data has no such form, or has no test.
    """
    try:
        row = json.loads(truth) if isinstance(truth, str) else truth
        # LiveCodeBench and the sets made from it have a list of tests in place of a row.
        row = {"cases": row} if isinstance(row, list) else row
        if not isinstance(row, Mapping):
            raise TypeError(f"it is a {type(row).__name__}, not an object")
        forms = [TEST_FORMATS.get(name) for name in ([form] if form else TEST_FORMATS)]
        found = next((each for each in forms if all(row.get(key) is not None for key in each.keys)), None)
        if found is None:
            raise ValueError(f"it has the keys {sorted(row)}")
        tests = list(found.read(row, tolerance))
        if not tests:
            raise ValueError("it has no tests")
    except (ValueError, TypeError, KeyError, SyntaxError, AttributeError, RecursionError) as error:
        known = "; ".join(f"{name}: {', '.join(TEST_FORMATS.get(name).keys)}" for name in TEST_FORMATS)
        raise DataError(
            f"ground truth of a program is {str(truth)[:200]!r}: {str(error) or type(error).__name__}; expected JSON "
            f'like {{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}}, or with the keys of another form ({known})'
        ) from error
    return tests


def _register(name: str, *keys: str) -> Callable[[Reader], Reader]:
    def add(read: Reader) -> Reader:
        TEST_FORMATS.register(name)(TestFormat(keys=keys, read=read))
        return read

    return add


@_register("stdin", "inputs", "outputs")
def _read_pairs(row: Row, tolerance: float | None) -> Iterable[Test]:
    """Read APPS, TACO and PRIME: inputs and outputs of a script, or of the function `fn_name`."""
    inputs, outputs = _list(row["inputs"], "inputs"), _list(row["outputs"], "outputs")
    if len(inputs) != len(outputs):
        raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    for given, expected in zip(inputs, outputs, strict=True):
        yield _pair(row.get("fn_name"), given, expected, tolerance)


@_register("apps", "input_output")
def _read_column(row: Row, tolerance: float | None) -> Iterable[Test]:
    """Read the column of APPS and TACO that holds inputs and outputs as JSON."""
    content = row["input_output"]
    return _read_pairs(json.loads(content) if isinstance(content, str) else content, tolerance)


@_register("code_contests", "private_tests")
def _read_contests(row: Row, tolerance: float | None) -> Iterable[Test]:
    """Read CodeContests: three columns, each with inputs and outputs of a script."""
    for column in ("public_tests", "private_tests", "generated_tests"):
        tests = row.get(column) or {"input": [], "output": []}
        yield from _read_pairs({"inputs": tests["input"], "outputs": tests["output"]}, tolerance)


@_register("livecodebench", "cases")
def _read_cases(row: Row, tolerance: float | None) -> Iterable[Test]:
    """Read LiveCodeBench and DeepCoder: a list of {input, output, testtype}; functions have a `func_name`."""
    cases = json.loads(row["cases"]) if isinstance(row["cases"], str) else _list(row["cases"], "cases")
    for case in cases:
        if not isinstance(case, dict):
            raise TypeError(f"a test is {case!r}, not an object")
        name = None
        if case.get("testtype") == "functional":
            about = {**row, **case, **(case.get("metadata") or row.get("metadata") or {})}
            name = about.get("func_name") or about["fn_name"]
        yield _pair(name, case["input"], case["output"], tolerance)


@_register("assertions", "assert_case")
def _read_assertions(row: Row, tolerance: float | None) -> Iterable[Test]:
    """Read statements that raise nothing if the program is right, such as `assert f(1) == 2`."""
    return _statements(_list(row["assert_case"], "assert_case"), "", row, tolerance)


@_register("mbpp", "test_list")
def _read_mbpp(row: Row, tolerance: float | None) -> Iterable[Test]:
    """Read MBPP: assertions, with code (or, in its sanitized part, imports) that runs before each."""
    before = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    cases = [*_list(row["test_list"], "test_list"), *(row.get("challenge_test_list") or ())]
    return _statements(cases, before, row, tolerance)


@_register("humaneval", "test", "entry_point")
def _read_suite(row: Row, tolerance: float | None) -> Iterable[Test]:
    """Yield the test in a row of HumanEval or LeetCodeDataset.

    The test defines a function `check(candidate)`, which may use imports and helpers from the code in the prompt.
    """
    prompt = row.get("prompt") or ""
    for body in _BODIES:
        with suppress(SyntaxError):
            ast.parse(prompt + body)
            yield _check(row["test"], prompt + body, str(row["entry_point"]), tolerance)
            return
    raise ValueError("its prompt is no Python")


@_register("kodcode", "test")
def _read_pytest(row: Row, tolerance: float | None) -> Iterable[Test]:
    """Read KodCode: functions in the style of pytest, or cases of unittest, that import from `solution`."""
    test = row["test"]
    yield _check(test, row.get("setup") or "", entry_point_of([str(test)]), tolerance)


def _list(value: object, name: str) -> Sequence[object]:
    if not isinstance(value, list):
        raise TypeError(f"{name} is a {type(value).__name__}, not a list")
    return value


def _pair(name: object, given: object, expected: object, tolerance: float | None) -> Test:
    """Make a test that runs a script, or calls a function if it has a name."""
    if name:
        # The arguments are a list, or a text with one JSON value per line.
        arguments = [json.loads(line) for line in given.splitlines() if line] if isinstance(given, str) else given
        if isinstance(expected, str):
            # Anything that is not JSON is text.
            with suppress(ValueError):
                expected = json.loads(expected)
        task = Call(function=str(name), arguments=_list(arguments, "an input"))
        return Test(task=task, expected=as_json(expected), tolerance=tolerance)
    texts = []
    for value in (given, expected):
        # In some data sets they are lists of lines.
        text = "\n".join(value) if isinstance(value, list) and all(isinstance(x, str) for x in value) else value
        if not isinstance(text, str):
            raise TypeError(f"an input or output is {value!r}, neither text nor lines of text")
        texts.append(text)
    return Test(task=RunWithInput(text=texts[0]), expected=texts[1], tolerance=tolerance)


def _statements(cases: Sequence[object], before: str, row: Row, tolerance: float | None) -> Iterable[Test]:
    entry = row.get("entry_point") or entry_point_of([before, *map(str, cases)])
    for case in cases:
        if not isinstance(case, str):
            raise TypeError(f"a test is {case!r}, not text")
        yield _check(f"{before}\n{case}" if before else case, row.get("setup") or "", entry, tolerance)


def _check(code: object, setup: str, entry: str | None, tolerance: float | None) -> Test:
    """Make a test of test code. ValueError if nothing in it could fail."""
    if not isinstance(code, str):
        raise TypeError(f"a test is {code!r}, not text")
    nodes = list(ast.walk(ast.parse(code)))
    calls = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    if not any(isinstance(node, ast.Assert | ast.Raise) for node in nodes) and not any(
        name.startswith("assert") or name in ("raises", "fail") for name in calls
    ):
        raise ValueError(f"the test {code[:80]!r} asserts nothing")
    ast.parse(setup)
    return Test(task=Check(test=code, setup=setup, entry_point=entry, tolerance=tolerance))
