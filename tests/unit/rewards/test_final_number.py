"""Scorers of answers after `####`."""

import pytest

from megarl.errors import ConfigError
from megarl.rewards import score


@pytest.mark.parametrize(
    ("response", "ground_truth", "expected"),
    [
        # The reference cases: strict, so a number without the mark does not count.
        ("... #### 1,234", "1234", 1.0),
        ("#### 7", "8", 0.0),
        ("the answer is 8", "8", 0.0),
        ("#### -3", "-3", 1.0),
        ("#### 3", "-3", 0.0),
        ("#### $1,234.50", "1234.50", 1.0),
        ("#### 18.", "18", 1.0),
        ("#### 18.00", "18", 1.0),
        ("#### 18.50", "18.5", 1.0),
        ("#### **18**", "18", 1.0),
        ("#### 18.51", "18.5", 0.0),
        ("#### 18/2", "18", 0.0),
        ("#### 1.8.2", "1.8", 0.0),
        ("#### 18", "1,8", 1.0),
        ("#### 7 no #### 8", "8", 1.0),
        ("#### 8 no #### 7", "8", 0.0),
        ("#### 8 apples", "8", 1.0),
        ("####8", "8", 1.0),
        ("#### .", "8", 0.0),
        ("", "8", 0.0),
        # The answer must lie within the last 300 characters.
        ("#### 8\n" + "x" * 293, "8", 1.0),
        ("#### 8\n" + "x" * 294, "8", 0.0),
    ],
)
def test_gsm8k(response: str, ground_truth: str, expected: float) -> None:
    reward = score("openai/gsm8k", response, ground_truth, {})
    assert reward.score == expected
    assert reward.correct == (expected == 1.0)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("#### 21", 1.0),
        ("5+7=12\n12+9=21\n#### 21", 1.0),
        ("#### 20", 0.0),
        ("#### 21\n", 0.0),  # the end is the end
        ("#### 21 #### 21", 0.0),
        ("#### 5\n#### 21", 0.0),
        ("####\n#### 21", 0.0),
        ("####21", 0.0),
        ("#### 021", 0.0),
        ("#### 2", 0.0),
        ("#### ", 0.0),
        ("21", 0.0),
        ("", 0.0),
    ],
)
def test_sums(response: str, expected: float) -> None:
    reward = score("megarl/sums", response, "21", {})
    assert reward.score == expected
    assert reward.correct == (expected == 1.0)


def test_unknown_source_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown data source 'chess'; expected one of: .*megarl/countdown, megarl/squares, megarl/sums",
    ):
        score("chess", "e4", "e4", {})
