"""Extraction, comparison and the forms of tests; nothing is run here."""

import json
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from megarl.config.load import with_overrides
from megarl.config.schema import Config
from megarl.config.setting import check_values
from megarl.errors import ConfigError, DataError
from megarl.rewards.code.formats import as_json, parse_tests, same_output
from megarl.rewards.code.scorer import extract_code
from megarl_sandbox import Call, Check, Ending, Outcome, RunWithInput
from megarl_sandbox.jail.same import same_value
from megarl_sandbox.jail.values import encode


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("First\n```python\n1\n```\nbetter:\n```python\n2\n```\nDone.", "2\n"),
        ("```py\n1\n```", "1\n"),
        ("```Python3 \n1\n```", "1\n"),
        # The last fence was never closed, nor was the first.
        ("```python\n1\n```python\n2", "2"),
        ("1. Code:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("<think>\n```python\n1\n```\n</think>\nIt is 1.", None),
        ("<think>\n```python\n1\n```\n</think>\n```python\n2\n```", "2\n"),
        ("```\n1\n```", None),
        ("```cpp\n1\n```", None),
        ("print(1)", None),
        ("```python", None),
        ("```python\n```", ""),
        ("", None),
    ],
)
def test_extraction(response: str, code: str | None) -> None:
    assert extract_code(response) == code


@pytest.mark.parametrize(
    ("actual", "expected", "tolerance", "same"),
    [
        ("1 2\n", "1 2", None, True),
        ("1  2 \r\n\n3\n", "1 2\n3", None, True),
        ("1\n2\n", "1 2", None, False),
        ("1 2 3", "1 2", None, False),
        ("", "\n", None, True),
        ("", "0", None, False),
        ("Yes", "YES", None, False),
        ("0.5", "0.50", None, False),
        ("0.5", "0.50", 0.0, True),
        ("0.3333333", "0.333333", 1e-6, True),
        ("0.3334", "0.333333", 1e-6, False),
        ("2000001", "2000000.0", 1e-6, True),
        ("2000003", "2000000.0", 1e-6, False),
        # Whole numbers are exact, and words are words.
        ("1000001", "1000000", 1e-3, False),
        ("1e3", "1E3", 1e-6, True),
        ("nan", "1.0", 1e-6, False),
        ("inf", "1.0", 1e-6, False),
        ("x", "1.0", 1e-6, False),
        ("1.0", "v1.0", 1e-6, False),
    ],
)
def test_outputs(actual: str, expected: str, tolerance: float | None, same: bool) -> None:
    assert same_output(actual, expected, tolerance) is same


@pytest.mark.parametrize(
    ("actual", "expected", "tolerance", "same"),
    [
        ([1, 2], [1, 2], None, True),
        ((1, 2), [1, 2], None, False),
        (0.1 + 0.2, 0.3, None, False),
        (0.1 + 0.2, 0.3, 1e-9, True),
        ([{"a": (0.1 + 0.2,)}], [{"a": (0.3,)}], 1e-9, True),
        ([0.3, 1], [0.3], 1e-9, False),
        ({"a": 0.3}, {"b": 0.3}, 1e-9, False),
        (3, 3.0000000001, 1e-9, True),
        (3, 4, 0.9, False),
        (10**400, 1.0, 1e-9, False),
        ("0.30", "0.3", 1e-9, False),
        (None, 0.3, 1e-9, False),
        (Decimal("sNaN"), 9, None, False),
        ([Decimal("sNaN")], [0.3], 1e-9, False),
    ],
)
def test_values(actual: object, expected: object, tolerance: float | None, same: bool) -> None:
    assert same_value(actual, expected, tolerance) is same


def test_values_too_deep_to_compare_are_not_the_same() -> None:
    one: list[Any] = []
    other: list[Any] = []
    for _ in range(10**5):
        one, other = [one], [other]
    assert same_value(one, other, None) is False


def test_as_json() -> None:
    assert as_json({1: ({"a": (2,)},)}) == {"1": [{"a": [2]}]}
    assert same_value(as_json([np.array([[1, 2]]), np.float64(3)]), [[[1, 2]], 3.0], None)


def answered(value: object) -> Outcome:
    return Outcome(ending=Ending.EXITED, exit_code=0, answer=encode(value))


def test_scripts() -> None:
    truth = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3", ["7", "8"]]}
    first, second = parse_tests(json.dumps(truth), tolerance=None)
    assert (first.task, second.task) == (RunWithInput(text="1 2\n"), RunWithInput(text="3\n4"))
    assert first.accepts(Outcome(ending=Ending.EXITED, stdout=b" 3 \n"))
    assert not first.accepts(Outcome(ending=Ending.EXITED, stdout=b"\xff"))
    assert second.accepts(Outcome(ending=Ending.EXITED, stdout=b"7\n8\n"))


def test_functions() -> None:
    truth = {
        "fn_name": "f",
        "inputs": [[1, [2]], '"a"\n{"b": 2}\n', [[]]],
        "outputs": [[5], "[1, 2]", {"1": 2}],
    }
    wrapped, text, mapping = parse_tests(json.dumps(truth), tolerance=None)
    assert [test.task for test in (wrapped, text, mapping)] == [
        Call(function="f", arguments=[1, [2]]),
        Call(function="f", arguments=["a", {"b": 2}]),
        Call(function="f", arguments=[[]]),
    ]
    assert wrapped.accepts(answered(5))
    assert wrapped.accepts(answered([5]))
    assert not wrapped.accepts(answered([[5]]))
    assert text.accepts(answered((1, 2)))
    assert not text.accepts(answered("[1, 2]"))
    assert mapping.accepts(answered({1: 2}))
    assert not mapping.accepts(Outcome(ending=Ending.EXITED, exit_code=0))


def test_an_expected_output_that_is_no_json_is_text() -> None:
    (test,) = parse_tests('{"fn_name": "f", "inputs": [[1]], "outputs": ["yes"]}', tolerance=None)
    assert test.accepts(answered("yes"))


def test_assertions() -> None:
    cases = ["assert f(1) == (2, -3)", "import math\nassert math.isclose(f(2), 1)"]
    tests = parse_tests({"assert_case": cases}, tolerance=0.1)
    assert [test.task for test in tests] == [Check(test=case, tolerance=0.1) for case in cases]
    verdicts = [b'{"passed": true}', b'{"passed": false}', b'{"passed": 1}']
    outcomes = [Outcome(ending=Ending.EXITED, exit_code=0, answer=verdict) for verdict in verdicts]
    assert [tests[0].accepts(outcome) for outcome in outcomes] == [True, False, False]


@pytest.mark.parametrize(
    ("cases", "entry"),
    [
        (["assert sum(10, 15) == 6", "assert sum(100, 150) == 93"], "sum"),
        (["assert abs(sum(10, 15) - 6) < 1e-6"], "sum"),
        (["assert abs(f(10) - 6) < 1e-6"], None),
        (["assert set(f([1])) == set((1,))"], None),
    ],
)
def test_a_function_under_test_may_be_called_as_a_builtin(cases: list[str], entry: str | None) -> None:
    first, *_ = parse_tests({"test_list": cases, "test_setup_code": ""}, tolerance=None)
    assert first.task == Check(test=cases[0], entry_point=entry)


ADDS = "assert add(1, 2) == 3"
CHECK = f"def check(candidate):\n    {ADDS}"


@pytest.mark.parametrize(
    ("form", "row", "tasks"),
    [
        ("humaneval", {"prompt": "def add(a, b):\n    'Adds.'\n", "test": CHECK, "entry_point": "add"},
         [Check(test=CHECK, setup="def add(a, b):\n    'Adds.'\n", entry_point="add")]),
        ("humaneval", {"prompt": "class Solution:\n    def add(self, a, b):\n", "test": CHECK,
                       "entry_point": "Solution().add"},
         [Check(test=CHECK, setup="class Solution:\n    def add(self, a, b):\n        pass",
                entry_point="Solution().add")]),
        ("mbpp", {"test_list": [ADDS], "test_setup_code": "x = 1", "challenge_test_list": ["assert add(0, 0) == 0"]},
         [Check(test=f"x = 1\n{ADDS}"), Check(test="x = 1\nassert add(0, 0) == 0")]),
        ("mbpp", {"test_list": [ADDS], "test_imports": ["import math"]}, [Check(test=f"import math\n{ADDS}")]),
        ("kodcode", {"test": f"from solution import add\ndef test_add():\n    {ADDS}"},
         [Check(test=f"from solution import add\ndef test_add():\n    {ADDS}")]),
        ("apps", {"input_output": '{"inputs": ["1 2"], "outputs": ["3"]}'}, [RunWithInput(text="1 2")]),
        ("apps", {"input_output": '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}'},
         [Call(function="add", arguments=[1, 2])]),
        ("code_contests", {"public_tests": {"input": ["1"], "output": ["2"]}, "generated_tests": None,
                           "private_tests": {"input": ["3"], "output": ["4"]}},
         [RunWithInput(text="1"), RunWithInput(text="3")]),
        ("livecodebench", [{"input": "1 2", "output": "3", "testtype": "stdin"}], [RunWithInput(text="1 2")]),
        ("livecodebench", [{"input": "1\n[2]", "output": "3", "testtype": "functional",
                            "metadata": {"func_name": "f"}}],
         [Call(function="f", arguments=[1, [2]])]),
    ],
)  # fmt: skip
def test_rows_of_public_data_sets(form: str, row: Any, tasks: list[Any]) -> None:
    for named in (form, None):
        assert [test.task for test in parse_tests(json.dumps(row), tolerance=None, form=named)] == tasks


@pytest.mark.parametrize(
    ("truth", "why"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[1]", "a test is 1, not an object"),
        ("1", "it is a int, not an object"),
        ('{"inputs": ["1"]}', "it has the keys ['inputs']"),
        ('{"assert_case": ["f()"]}', "the test 'f()' asserts nothing"),
        ('{"test": "def check(c): assert c()", "entry_point": "f", "prompt": "def f("}', "its prompt is no Python"),
        ('{"inputs": ["1"], "outputs": []}', "it has 1 inputs and 0 outputs"),
        ('{"inputs": [], "outputs": []}', "it has no tests"),
        ('{"inputs": "1", "outputs": ["1"]}', "inputs is a str, not a list"),
        ('{"inputs": [1], "outputs": ["1"]}', "an input or output is 1, neither text nor lines of text"),
        ('{"inputs": ["x"], "outputs": [1], "fn_name": "f"}', "Expecting value"),
        ('{"inputs": [1], "outputs": [1], "fn_name": "f"}', "an input is a int, not a list"),
        ('{"assert_case": "assert f()"}', "assert_case is a str, not a list"),
        ('{"assert_case": [1]}', "a test is 1, not text"),
        ('{"assert_case": ["assert f("]}', "'(' was never closed"),
        ("[" * 10**5, "recursion"),
    ],
)
def test_bad_ground_truth_is_named(truth: str, why: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_tests(truth, tolerance=None)
    message = str(caught.value)
    assert message.startswith(f"ground truth of a program is {truth[:200]!r}: ")
    assert why in message
    assert 'expected JSON like {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}' in message


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("max_timeouts", 0, ">= 1"),
        ("max_tests", 0, ">= 1"),
        ("float_tolerance", 1.0, r"in \[0, 1\)"),
    ],
)
def test_options_out_of_range(option: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"rewards.code.{option}.*got {value}, expected.* {expected}"):
        check_values(with_overrides(Config(), [f"rewards.code.{option}={value}"]), ())
