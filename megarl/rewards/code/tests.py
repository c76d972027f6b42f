"""Tests of a problem, from the JSON that data sets keep them in.

| JSON | a test |
|---|---|
| `{"inputs": [...], "outputs": [...]}` | a script reads an input and prints the output |
| `{"inputs": [...], "outputs": [...], "fn_name": "f"}` | `f`, or `Solution().f`, returns the output |
| `{"assert_case": ["assert f(1) == 2", ...]}` | the statements raise nothing |

Programs never see the outputs. Of `assert expression == literal` they only get the expression; other assertions have
to run beside the program.
"""

import ast
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.errors import DataError
from megarl.rewards.code.compare import as_json, same_output, same_value
from megarl.sandbox import Call, Evaluate, Execute, Outcome, RunWithInput, Task
from megarl.sandbox.jail.answer import AnswerError, decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """What to ask of a program, and whether what came of it is right (only asked of runs that succeeded)."""

    # For pytest, which takes it for its own.
    __test__ = False

    task: Task
    accepts: Callable[[Outcome], bool]


def parse_tests(ground_truth: str | Mapping[str, Any], *, tolerance: float | None) -> list[Test]:
    """In the order of the data; DataError if it is not of one of the forms above or has no test."""
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else dict(ground_truth)
        tests = list(_tests(truth, tolerance))
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError) as error:
        raise _bad(ground_truth, str(error) or type(error).__name__) from error
    if not tests:
        raise _bad(ground_truth, "it has no tests")
    return tests


def _bad(ground_truth: object, why: str) -> DataError:
    return DataError(
        f"ground truth of a program is {str(ground_truth)[:200]!r}: {why}; expected JSON like "
        '{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}, with "fn_name" for functions, or {"assert_case": ["assert …"]}'
    )


def _tests(truth: Any, tolerance: float | None) -> Iterator[Test]:
    if not isinstance(truth, dict):
        raise TypeError(f"it is a {type(truth).__name__}, not an object")
    if cases := truth.get("assert_case"):
        yield from (_assertion(case, tolerance) for case in _list(cases, "assert_case"))
        return
    inputs, outputs = _list(truth["inputs"], "inputs"), _list(truth["outputs"], "outputs")
    if len(inputs) != len(outputs):
        raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    for given, expected in zip(inputs, outputs, strict=True):
        if name := truth.get("fn_name"):
            yield _call(name, given, expected, tolerance)
        else:
            yield _script(_text(given), _text(expected), tolerance)


def _list(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{name} is a {type(value).__name__}, not a list")
    return value


def _text(value: Any) -> str:
    """Some sets keep the lines of an input or output as a list."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise TypeError(f"an input or output is {value!r}, neither text nor lines of text")
    return value


def _script(given: str, expected: str, tolerance: float | None) -> Test:
    def accepts(outcome: Outcome) -> bool:
        return same_output(outcome.stdout.decode(errors="replace"), expected, tolerance)

    return Test(task=RunWithInput(text=given), accepts=accepts)


def _call(name: str, given: Any, expected: Any, tolerance: float | None) -> Test:
    """Arguments are a list, or JSON, one a line. A result may stand in a list of its own."""
    arguments = [json.loads(line) for line in given.splitlines() if line] if isinstance(given, str) else given
    wanted = as_json(_json_or_text(expected) if isinstance(expected, str) else expected)

    def accepts(value: Any) -> bool:
        value = as_json(value)
        is_wrapped = isinstance(wanted, list) and len(wanted) == 1
        return same_value(value, wanted, tolerance) or (is_wrapped and same_value(value, wanted[0], tolerance))

    return Test(task=Call(function=str(name), arguments=_list(arguments, "an input")), accepts=_of_answer(accepts))


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _assertion(case: Any, tolerance: float | None) -> Test:
    if not isinstance(case, str):
        raise TypeError(f"an assert_case is {case!r}, not text")
    match ast.parse(case).body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))] if _is_literal(right):
            wanted = ast.literal_eval(right)
            task: Task = Evaluate(expression=ast.unparse(left))
        case _:
            wanted = secrets.token_hex(16)
            task = Execute(statements=case, token=wanted)
    return Test(task=task, accepts=_of_answer(lambda value: same_value(value, wanted, tolerance)))


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):
        return False
    return True


def _of_answer(accepts: Callable[[Any], bool]) -> Callable[[Outcome], bool]:
    def decoded(outcome: Outcome) -> bool:
        try:
            return accepts(decode(outcome.answer))
        except (AnswerError, RecursionError):
            return False

    return decoded
