"""Answers written by hand: `answer_pairs.tsv` says which are equal to a gold, and where math-verify says otherwise.

Columns: category; expected `=` equal, `!` different, `?` cannot be read (scores as wrong); what math-verify says if it
is not the same (`?` counts as `!` there), `-` if it is not asked; gold; answer; why, where that is not evident.
"""

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.rewards import score
from megarl_answers import MODES, Equality, compare_answers

TABLE = Path(__file__).with_name("answer_pairs.tsv")
VERDICTS = {"=": Equality.EQUAL, "!": Equality.DIFFERENT, "?": Equality.UNPARSED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    category: str
    expected: str
    math_verify: str
    gold: str
    answer: str
    reason: str


def read_pairs() -> list[Pair]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [Pair(**row) for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]


PAIRS = read_pairs()


def test_the_table_is_what_it_should_be() -> None:
    assert len(PAIRS) >= 300
    assert len({(pair.gold, pair.answer) for pair in PAIRS}) == len(PAIRS)
    assert {pair.expected for pair in PAIRS} == set(VERDICTS)
    categories = Counter(pair.category for pair in PAIRS)
    assert categories.keys() >= {"unit", "interval", "matrix", "percent", "multilingual", "malformed", "exploit"}
    # Whoever differs from math-verify says why.
    assert [pair for pair in PAIRS if pair.math_verify and not pair.reason] == []


@pytest.mark.parametrize("category", sorted({pair.category for pair in PAIRS}))
def test_pairs_compare_as_written_in_both_orders(category: str) -> None:
    wrong = []
    for pair in (pair for pair in PAIRS if pair.category == category):
        for answer, gold in ((pair.answer, pair.gold), (pair.gold, pair.answer)):
            verdict = compare_answers(answer, gold, MODES["fix"])
            if verdict is not VERDICTS[pair.expected]:
                wrong.append((answer, gold, verdict))
    assert wrong == []


def test_every_answer_that_can_be_read_equals_itself() -> None:
    texts = {pair.gold for pair in PAIRS} | {pair.answer for pair in PAIRS if pair.expected != "?"}
    assert [text for text in texts if compare_answers(text, text, MODES["fix"]) is not Equality.EQUAL] == []


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 9])
def test_math_verify_differs_only_where_the_table_says_so(every: int) -> None:
    wrong = []
    for pair in [pair for pair in PAIRS if pair.math_verify != "-"][::every]:
        says = score("math_verify", rf"\boxed{{{pair.answer}}}", pair.gold, {}).correct
        if says is not ((pair.math_verify or pair.expected) == "="):
            wrong.append((pair.gold, pair.answer, says))
    assert wrong == []
