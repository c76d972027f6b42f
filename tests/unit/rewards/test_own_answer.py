"""Ground truths are judged as answers to themselves before a run starts."""

import pytest

from megarl.errors import DataError
from megarl.rewards import SCORERS, source_spec
from megarl.rewards.build import check_own_answers, is_empty, spread_rows
from megarl.rewards.scorers import SourceSpec
from megarl.types import Prompt

EMPTY = ["", " ", "None", "null", "nan", "$$", "$ $", r"\boxed{}", r"$\boxed{ }$", "[]", '{"target": []}']


def rows(source: str, truths: list[str]) -> list[tuple[str, Prompt, SourceSpec]]:
    return [
        (
            f"{source}/{i}",
            Prompt(
                uid=f"{source}:{i}",
                data_source=source,
                messages=(),
                token_ids=(1,),
                ground_truth=truth,
                extra_info={},
            ),
            source_spec(source),
        )
        for i, truth in enumerate(truths)
    ]


@pytest.mark.parametrize("truth", EMPTY)
@pytest.mark.parametrize("source", ["math", "strict", "countdown", "short_answer", "code/humaneval"])
def test_empty_ground_truths_are_found_for_every_scorer(source: str, truth: str) -> None:
    assert is_empty(truth)
    with pytest.raises(DataError, match=r"1 of 1 \(100.0%\) are empty or"):
        check_own_answers(rows(source, [truth]), 0.01)


@pytest.mark.parametrize("truth", ["0", r"\emptyset", r"\infty", "B", "[1]", "-", r"\{\}x", "no"])
def test_what_is_not_empty(truth: str) -> None:
    assert not is_empty(truth)


@pytest.mark.parametrize(
    ("source", "truth"),
    [
        ("math", r"so \boxed{2} and \boxed{3}"),
        ("strict", "073"),
        ("letters", "(b)"),
        ("math_verify", r"\frac12"),
        ("math/last_number", "x^2"),
        ("answer_line", "34"),
        ("short_answer", '{"target": ["a cat", "cats"]}'),
        ("openai/gsm8k", "1,234"),
        ("megarl/sums", "21"),
        ("luffy/1", "5"),
        ("luffy/4", "5"),
    ],
)
def test_every_scorer_accepts_its_ground_truth_as_an_answer(source: str, truth: str) -> None:
    assert check_own_answers(rows(source, [truth]), 0.0) == ""
    assert SCORERS.get(source).states is not None


def test_the_share_is_reported_and_limited() -> None:
    """`\\frac{1}{` is a formula that does not close, which no answer equals."""
    truths = ["1", "2", "3", r"\frac{1}{"]
    line = check_own_answers(rows("math", truths), 0.25)
    assert line == "warning: ground truths: 1 of 4 (25.00%) cannot be scored\n  math/3: '\\\\frac{1}{'"
    with pytest.raises(DataError, match=r"'math': 1 of 4 \(25.0%\).*math/3.*expected at most 20.0%"):
        check_own_answers(rows("math", truths), 0.2)


def test_rows_are_spread() -> None:
    assert sorted(spread_rows(10, 4)) == [0, 2, 5, 7]
    assert sorted(spread_rows(3, 10_000)) == [0, 1, 2]
    assert spread_rows(0, 5) == frozenset()
