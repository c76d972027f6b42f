"""Score the countdown task: an expression that uses each given number exactly once must have a target value."""

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from megarl.errors import DataError
from megarl.rewards.scorers import LAST_ANSWER, PARSE_FAILED, SCORERS
from megarl.types import Reward

TOLERANCE = 1e-5
MAX_EXPRESSION_CHARS = 256  # bounds parsing; far beyond what a few numbers need

_CHARACTERS = re.compile(r"[0-9+\-*/() ]+")
_ASCII = str.maketrans({"×": "*", "÷": "/", "−": "-"})
_BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def score_countdown(
    response: str, ground_truth: str, extra_info: Mapping[str, object], *, format_score: float = 0.0
) -> Reward:
    """Score 1 if the last `<answer>…</answer>` uses each number exactly once and |value − target| < 1e-5.

    Otherwise the score is `format_score` if there is an answer, and 0 if not. `ground_truth` is JSON such as
    {"numbers": [...], "target": n}. DataError is raised for any other ground truth.
    """
    try:
        truth = json.loads(ground_truth)
        numbers, target = sorted(map(Fraction, truth["numbers"])), Fraction(truth["target"])
        if any(number.denominator > 1 for number in numbers):
            raise ValueError
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise DataError(
            f'countdown ground truth is {ground_truth!r}, expected JSON like {{"numbers": [4, 5, 9], "target": 8}}'
        ) from error
    answers = LAST_ANSWER.findall(response)
    correct = bool(answers) and _reaches(answers[-1], numbers, target)
    score = 1.0 if correct else format_score if answers else 0.0
    return Reward(score=score, correct=correct, details={PARSE_FAILED: float(not answers)})


SCORERS.register("megarl/countdown", after_thoughts=True)(score_countdown)


def _reaches(text: str, numbers: list[Fraction], target: Fraction) -> bool:
    text = text.strip().translate(_ASCII)
    if len(text) > MAX_EXPRESSION_CHARS or not _CHARACTERS.fullmatch(text):
        return False
    try:
        tree = ast.parse(text, mode="eval").body
        constants: list[Any] = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        # The numbers are checked first, because they bound the size of all values in the computation.
        return sorted(constants) == numbers and abs(_value(tree) - target) < TOLERANCE
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
    raise ValueError(f"{ast.dump(node)[:80]} is not one of + - * / and whole numbers")
