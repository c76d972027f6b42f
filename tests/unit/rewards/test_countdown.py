"""The Countdown scorer."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import DataError
from megarl.rewards.countdown import MAX_EXPRESSION_CHARS, score_countdown


def truth(numbers: list[int], target: float) -> str:
    return json.dumps({"numbers": numbers, "target": target})


REFERENCE = truth([25, 5, 4], 80)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        # The reference cases of the task.
        ("<answer>(25-5)*4</answer>", 1.0),
        ("<answer>25*4-5</answer>", 0.0),  # 95
        ("<answer>80</answer>", 0.0),
        ("<answer>(25-5)*2*2</answer>", 0.0),
        ("no tag", 0.0),
        # The last answer counts, and only that.
        ("<answer>1</answer> no: <answer>4*(25-5)</answer>", 1.0),
        ("<answer>4*(25-5)</answer> or <answer>1</answer>", 0.0),
        ("<answer>1 <answer>4*(25-5)</answer></answer>", 1.0),
        ("<answer>4*(25-5)", 0.0),
        ("text <answer>\n 4 * ( 25 - 5 )\n</answer> more text", 1.0),
        ("<answer>4 × (25 − 5)</answer>", 1.0),
        ("<answer>-4*(5-25)</answer>", 1.0),
        ("<answer>+4*(25-5)</answer>", 1.0),
        ("<answer></answer>", 0.0),
        ("<answer>4*(25-5)=80</answer>", 0.0),
        ("<answer>4*(25-5</answer>", 0.0),
        ("<answer>4(25-5)</answer>", 0.0),
        ("<answer>4*(25-5)*(1)</answer>", 0.0),
        ("<answer>04*(25-5)</answer>", 0.0),
        ("<answer>__import__('os').abort()</answer>", 0.0),
    ],
)
def test_scores(response: str, expected: float) -> None:
    reward = score_countdown(response, REFERENCE, {})
    assert reward.score == expected
    assert reward.correct == (expected == 1.0)


@pytest.mark.parametrize(
    ("expression", "numbers", "target", "correct"),
    [
        ("7/3*3", [3, 3, 7], 7, True),
        ("8÷(3-8÷3)", [3, 3, 8, 8], 24, True),
        ("6/(1-3/4)", [1, 3, 4, 6], 24, True),
        ("1/3", [1, 3], 0.33333, True),  # off by 3.3e-6, below 1e-5
        ("1/3", [1, 3], 0.3333, False),  # off by 3.3e-5
        ("7//2", [2, 7], 3, False),
        ("9**9", [9, 9], 387420489, False),
        ("1/(2-2)", [1, 2, 2], 1, False),
        ("3+3", [3], 6, False),
        ("3", [3, 3], 3, False),
        ("1.5+1.5", [1, 5, 1, 5], 3, False),
    ],
)
def test_arithmetic(expression: str, numbers: list[int], target: float, correct: bool) -> None:
    assert score_countdown(f"<answer>{expression}</answer>", truth(numbers, target), {}).correct is correct


def test_format_score_is_for_wrong_answers_only() -> None:
    for response, expected in [
        ("<answer>(25-5)*4</answer>", 1.0),
        ("<answer>80</answer>", 0.1),
        ("80", 0.0),
    ]:
        reward = score_countdown(response, REFERENCE, {}, format_score=0.1)
        assert reward.score == expected
        assert reward.correct == (expected == 1.0)
        assert reward.details == {"parse_failed": float(expected == 0)}


def test_long_or_deep_expressions_are_wrong() -> None:
    fits = "+".join(["1"] * (MAX_EXPRESSION_CHARS // 2))
    assert score_countdown(f"<answer>{fits}</answer>", truth([1] * 128, 128), {}).correct
    assert not score_countdown(f"<answer>{fits}+1</answer>", truth([1] * 129, 129), {}).correct
    for expression in ("(" * 256, "(" * 250 + "3", "9" * 250, "3*" * 100):
        assert not score_countdown(f"<answer>{expression}</answer>", truth([3], 3), {}).correct
    assert score_countdown(f"<answer>{'(' * 100}3{')' * 100}</answer>", truth([3], 3), {}).correct


@pytest.mark.parametrize(
    "text", ["", "8", "{}", *(f'{{"numbers": {n}, "target": 4}}' for n in ("3", "[4.5]", '["x"]')), '{"numbers": [1]}']
)
def test_bad_ground_truth(text: str) -> None:
    with pytest.raises(DataError, match=r"countdown ground truth is .*, expected JSON like"):
        score_countdown("<answer>1</answer>", text, {})


@given(st.lists(st.integers(1, 99), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_any_expression_over_the_numbers_scores(numbers: list[int], rng: random.Random) -> None:
    # Build a value and its text side by side; plus, minus and times keep it whole.
    pool = [(n, str(n)) for n in numbers]
    while len(pool) > 1:
        (a, left), (b, right) = pool.pop(rng.randrange(len(pool))), pool.pop(rng.randrange(len(pool)))
        value, sign = rng.choice([(a + b, "+"), (a - b, "-"), (a * b, "*")])
        pool.append((value, f"({left}{sign}{right})"))
    value, expression = pool[0]
    response = f"<answer>{expression}</answer>"
    assert score_countdown(response, truth(numbers, value), {}).correct
    assert not score_countdown(response, truth(numbers, value + 1), {}).correct
    assert not score_countdown(response, truth([*numbers, 1], value), {}).correct


@given(st.text(alphabet="0123456789+-*/() <>answer.", max_size=60))
def test_no_text_makes_the_scorer_fail(text: str) -> None:
    assert score_countdown(f"<answer>{text}</answer>", truth([101, 103], 7), {}).score in (0.0, 1.0)


def test_golden(golden: Any) -> None:
    case = golden("C.countdown")
    scores = [
        score_countdown(
            given["response"], truth(given["numbers"], given["target"]), {}, format_score=case["params"]["format_score"]
        ).score
        for given in case["inputs"]
    ]
    assert scores == case["expected"]
