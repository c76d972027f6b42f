"""Answers as models state them, decided by hand: `stated_answers.tsv` says which of them the scorers take.

Columns: form (see FORMS); truth; right answers; wrong ones; right ones that are refused, and wrong ones that are taken,
which are known faults. Answers of a column are separated by `¦`.
"""

from pathlib import Path

import pytest
from math_verify import verify

from megarl.errors import DataError
from megarl.rewards import score

TABLE = Path(__file__).with_name("stated_answers.tsv")
# Form → the data source, and how a response states the answer.
FORMS = {
    "last": ("math/last_number", "%s"),
    "mark": ("openai/gsm8k", "so\n#### %s"),
    "box": ("math", r"\boxed{%s}"),
    "strict": ("strict", r"\boxed{%s}"),
    "line": ("answer_line", "Answer: %s"),
    "letter": ("letters", "Answer: %s"),
    "choice": ("letters", "%s"),
    "boxed letter": ("letters", r"\boxed{%s}"),
    "short": ("short_answer", "<answer>%s</answer>"),
    "said": ("math", "The answer is %s"),
    "raw": ("math", "%s"),
}
ROWS = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()]


def accepted(form: str, truth: str, answers: str) -> dict[str, bool]:
    source, frame = FORMS[form]
    stated = [answer.strip() for answer in answers.split("¦") if answer.strip()]
    return {answer: bool(score(source, frame.replace("%s", answer), truth, {}).correct) for answer in stated}


@pytest.mark.parametrize(
    "row",
    [
        # Their hundreds of answers take long: of four rows, three are for `long`.
        pytest.param(row, marks=[pytest.mark.long] * bool(i % 4), id=f"{row[0]}-{row[1]}")
        for i, row in enumerate(ROWS)
    ],
)
def test_right_answers_are_taken_and_no_others(row: list[str]) -> None:
    form, truth, right, wrong, refused, taken = row
    assert [answer for answer, is_taken in accepted(form, truth, right).items() if not is_taken] == []
    assert [answer for answer, is_taken in accepted(form, truth, wrong).items() if is_taken] == []
    assert not any(accepted(form, truth, refused).values()), "mended: move it to the right answers"
    assert all(accepted(form, truth, taken).values()), "mended: move it to the wrong answers"


def test_the_table_is_what_it_should_be() -> None:
    counts = [sum(len([a for a in row[column].split("¦") if a.strip()]) for row in ROWS) for column in range(2, 6)]
    right, wrong, refused, taken = counts
    assert right > 1000
    assert wrong > 900
    assert refused / (right + refused) < 0.04
    assert taken / (wrong + taken) < 0.01


def test_a_number_at_the_start_of_a_line_is_not_part_of_the_line_before() -> None:
    assert score("math/last_number", "## Result\n**96 tiles**", "96", {}).correct
    assert not score("math/last_number", "## Result\n**12 or 96 tiles**", "96", {}).correct


def test_an_invisible_character_parts_the_numbers_of_an_answer() -> None:
    """As a ground truth it is refused."""
    assert not score("math", "\\boxed{7\u200b3}", "73", {}).correct
    with pytest.raises(DataError, match="no space within a number"):
        score("math", "\\boxed{73}", "7\u200b3", {})


def test_a_mixed_number_after_the_mark_has_its_value() -> None:
    for text in ("3½", "3 1/2", "3.5", "7/2"):
        assert score("openai/gsm8k", f"#### {text}", "3.5", {}).correct
        assert not score("openai/gsm8k", f"#### {text}", "3", {}).correct


@pytest.mark.parametrize(
    "source", ["math", "math500", "hiyouga/geometry3k", "numina_olympiads", "strict", "math/last_number"]
)
def test_no_scorer_adds_neighbours(source: str) -> None:
    cases = [("42", "20 22"), ("8", r"5 \quad 3"), ("9", r"4 \text{ } 5"), ("5/7", r"\frac{2 3}{7}"), ("32", "2^{2 3}")]
    assert [case for case in cases if score(source, rf"\boxed{{{case[1]}}}", case[0], {}).correct] == []
    for version in range(5):
        found = [score(f"luffy/{version}", rf"</think>\boxed{{{answer}}}", gold, {}).correct for gold, answer in cases]
        assert not any(found)


def test_math_verify_adds_no_neighbours_without_a_box() -> None:
    for text in ("It is $20 22$.", r"It is \(20 22\).", r"So \[40 \quad 2\]", r"the final answer is $\frac{20 22}{1}$"):
        assert not score("math_verify", text, "42", {}).correct
    assert score("math_verify", "It is $42$.", "42", {}).correct


def test_signs_of_numbers_are_no_punctuation_of_short_answers() -> None:
    for gold, answer, right in [
        ("-5", "5", False), ("-5", "-5", True), ("3.5", "35", False), ("3.5", "3.5.", True), ("42", "4,2", False),
        ("2,718", "2718", True), ("2718", "27.18", False), ("50", "50%", False), ("U.S.", "US", True),
    ]:  # fmt: skip
        assert score("short_answer", f"<answer>{answer}</answer>", gold, {}).correct is right


@pytest.mark.parametrize(
    ("gold", "answer", "asked", "correct"),
    [
        (r"\binom{n}{2}", r"{n \choose 2}", True, True),
        (r"\binom{n}{2}", r"{n \choose 3}", True, False),
        # Ours reads these, and has decided.
        ("2", "3", False, False),
        ("5", "x==5", False, False),
        # What asks for a computation is no answer, whatever math-verify says.
        ("3", r"\max(2,3)", False, False),
        ("2517", "2516_8+1", False, False),
    ],
)
def test_math_verify_is_asked_only_where_ours_cannot_read(
    gold: str, answer: str, asked: bool, correct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr("math_verify.verify", lambda *args, **options: calls.append(args) or verify(*args, **options))
    assert score("math", rf"\boxed{{{answer}}}", gold, {}).correct is correct
    assert bool(calls) is asked
