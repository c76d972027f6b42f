"""Answers as models state them, decided by hand: `stated_answers.tsv` says which of them the scorers take.

Columns: form (see FORMS); truth; right answers; wrong ones; right ones that are refused, and wrong ones that are taken,
which are known faults. Answers of a column are separated by `¦`.
"""

from pathlib import Path

import pytest

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
    "short": ("short_answer", "<answer>%s</answer>"),
    "said": ("math", "The answer is %s"),
    "raw": ("math", "%s"),
}
ROWS = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()]


def accepted(form: str, truth: str, answers: str) -> dict[str, bool]:
    source, frame = FORMS[form]
    stated = [answer.strip() for answer in answers.split("¦") if answer.strip()]
    return {answer: bool(score(source, frame.replace("%s", answer), truth, {}).correct) for answer in stated}


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
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
