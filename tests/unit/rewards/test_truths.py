"""Ground truths of every type: a right answer is right by every scorer of answers, or the row is refused."""

from dataclasses import replace
from decimal import Decimal

import pytest

from megarl.errors import DataError
from megarl.rewards import score
from megarl.rewards.custom.signatures import TRL
from megarl.rewards.own_answer import STATED
from megarl.rewards.question import Question
from megarl.types import Message

SCORERS = ("math", "math/last_number", "strict", "math_verify", "answer_line", "openai/gsm8k", "megarl/sums", "luffy/1")
TRUTHS = {
    '["72"]': "72",
    '["5", "72"]': "72",
    "[72]": "72",
    '{"value": "72"}': "72",
    '{"value": 72}': "72",
    "72.0": "72",
}
DECIMALS = {"0.10000000149011612": "0.1", "1e-05": "0.00001", "2.700000047683716": "2.7", "[0.5]": "0.5"}


@pytest.mark.parametrize(
    ("scorer", "truth", "answer"),
    # Sums have whole numbers.
    [(s, *each) for s in SCORERS for each in (TRUTHS | (DECIMALS if s != "megarl/sums" else {})).items()],
)
def test_a_right_answer_is_right_whatever_type_the_truth_has(scorer: str, truth: str, answer: str) -> None:
    assert score(scorer, STATED[scorer](answer), truth, {}).correct
    assert not score(scorer, STATED[scorer]("73"), truth, {}).correct


@pytest.mark.parametrize("scorer", [*SCORERS, "letters"])
@pytest.mark.parametrize("truth", ["72\x00", '{"a": 1, "b": 2}', "[null]", '{"value": null}'])
def test_a_truth_that_is_no_answer_is_refused(scorer: str, truth: str) -> None:
    with pytest.raises(DataError, match="ground truth"):
        score(scorer, "", truth, {})


@pytest.mark.parametrize("scorer", [scorer for scorer in SCORERS if scorer != "megarl/sums"])
@pytest.mark.parametrize("power", range(8, 20))
def test_an_exact_decimal_is_right_as_it_stands(scorer: str, power: int) -> None:
    """2⁻ⁿ, which numbers of 16 and 32 bits hold too."""
    truth = format(Decimal(2) ** -power, "f")
    assert score(scorer, STATED[scorer](truth), truth, {}).correct


@pytest.mark.parametrize("truth", ["['0.1']", "{'answer': '0.1'}"])
def test_pythons_notation(truth: str) -> None:
    assert score("math", r"\boxed{0.1}", truth, {}).correct
    assert not score("math", r"\boxed{0.2}", truth, {}).correct


def test_a_set_of_texts_in_quotes_is_a_text() -> None:
    assert score("strict", r"\boxed{{'x','y'}}", "{'x','y'}", {}).correct


def test_an_interval_is_no_list_of_accepted_answers() -> None:
    assert score("math", r"\boxed{[1, 2]}", "[1, 2]", {}).correct
    assert not score("math", r"\boxed{1}", "[1, 2]", {}).correct


@pytest.mark.parametrize(
    ("answer", "truth", "correct"),
    [
        ("Cafe\u0301", "Caf\u00e9", True),
        ("\uff12\uff14", "24", True),
        ("\u0662\u0664", "24", True),
        ("10\u00b2", "102", False),
        *((a, t, a == t) for a in ("C++", "C#", "C") for t in ("C++", "C#", "C")),
        ("A", "A", True),
        ("the", "A", False),
        ("", "A", False),
        ("C.", "C", True),
        ("$", "-", False),
        ("-", "-", True),
        ("The Who", "The Who", True),
        ("beatles", "The Beatles", True),
    ],
)
def test_short_answers_keep_what_distinguishes_them(answer: str, truth: str, correct: bool) -> None:
    assert score("short_answer", f"<answer>{answer}</answer>", truth, {}).correct == correct


def test_functions_for_trl_get_texts_and_typed_columns() -> None:
    message = Message(role="user", content="1+1?")
    row = Question(data_source="", prompt="<user>1+1?", response="2", ground_truth="2", messages=(message,))
    typed = TRL.arguments([replace(row, label=2, is_text=True)])
    assert (typed["prompts"], typed["completions"], typed["answer"]) == (["1+1?"], ["2"], [2])
    chat = TRL.arguments([row])
    assert (chat["completions"], chat["answer"]) == ([[{"role": "assistant", "content": "2"}]], ["2"])
