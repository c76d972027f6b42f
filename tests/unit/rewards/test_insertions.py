"""Insertions: a space, a number or a word put into a right answer never keeps it right unless a rule here says so."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from megarl.rewards import score

SEED = 39
SPACES = (" ", r"\,", r" \quad ", "\u00a0", "\u200b")
NUMBERS = (" 1 ", " 7 ", " 0 ", " 0.5 ", "½")
WORDS = (" not ", " wrong ", " or ", " and a half ", " maybe ", " hundred ", " is ", " blue ", r" \text{ no } ")


@dataclass(frozen=True)
class Rule:
    """What may be inserted and keep an answer right: the text inserted, and what must stand before and after it."""

    name: str
    inserted: str
    before: str
    after: str


# An answer means the same after these, by the habits of mathematics; nothing here asks the scorers.
SPACE = r"[\s\u200b]+|\\,|\s*\\quad\s*"
RULES = (
    Rule(
        "a space beside a sign of an operation, a relation, a bracket or a comma",
        SPACE,
        r".*[-+=<>(),;|:^_{}&/$\[\]*]",
        r".*",
    ),
    Rule("a space before such a sign", SPACE, r".*", r"[-+=<>(),;|:^_{}&/$!%\\°.\[\]*].*"),
    Rule("a space at an end", SPACE, "", ".*"),
    Rule("a space at an end", SPACE, ".*", ""),
    Rule("a space beside another space", SPACE, r".*\s", ".*"),
    Rule("a space beside another space", SPACE, ".*", r"\s.*"),
    Rule("a space between factors", SPACE, r".*(?:\d|(?<![a-z])[a-zA-Z])", r"[a-zA-Z](?![a-z]{2}).*"),
    Rule("a space between a command and its argument", SPACE, r".*\\[a-z]+", r"[^a-z].*"),
    Rule("a space between a number and a unit", SPACE, r".*\d", r"[a-zA-Z°].*"),
    Rule(
        "thousands in groups of three, split by one mark",
        r" |\\,|\u00a0|\u200b",
        r"(?:.*\D)?[1-9]\d{0,2}",
        r"\d{3}(?:\D.*)?",
    ),
    Rule("one times a factor", r"\s*1\s*", r"(?:.*[-+=(,\[<>{&:]|.*\\[a-z]+)?\s*", r"\s*(?:[a-zA-Z(\\|]).*"),
    Rule("0 before a sign", r"\s*0\s*", r"\s*", r"\s*(?:-|\\pm).*"),
    Rule("a word for the comma of a list that stands beside it", r"\s*or\s*", r".*,\s*", ".+"),
    Rule("a word for the comma of a list that stands beside it", r"\s*or\s*", ".+", r"\s*,.*"),
    Rule("an adjective before a noun", r"\s*blue\s*", r".*\d\s*", r"\s*[a-z]{3,}.*"),
    Rule("the text of a choice after its letter", r".*", r"\W*(?:text\{)?[A-D][}*\s]*[.:)].*", ".*"),
    Rule("the text of a choice after its letter", r"\s*blue\s*", r".*\b[A-D]\b.*", ".*"),
)


def allowed(before: str, inserted: str, after: str) -> bool:
    return any(
        re.fullmatch(rule.inserted, inserted) and re.fullmatch(rule.before, before) and re.fullmatch(rule.after, after)
        for rule in RULES
    )


def numbers(rng: random.Random) -> list[str]:
    a, b, c = (rng.randint(2, 9) for _ in range(3))
    return [str(rng.randint(10, 99)), str(rng.randint(1000, 99999)), f"-{rng.randint(10, 99)}", f"{a}.{b}{c}", f"0.{a}"]


def formulas(rng: random.Random) -> list[str]:
    """One answer of each kind."""
    a, b, c, d = rng.sample(range(2, 10), 4)
    return [
        *numbers(rng),
        rf"\frac{{{a}}}{{{b}}}",
        f"{a}/{b}",
        rf"{a}\frac{{1}}{{{b}}}",
        rf"{a}\sqrt{{{b}}}",
        rf"\sqrt{{{a}{b}}}",
        rf"\frac{{{a}\pi}}{{{b}}}",
        f"{a}^{{{b}{c}}}",
        rf"\{{{a}, {b}, {c}{d}\}}",
        f"({a}, {b}{c})",
        f"[{a}, {a + b})",
        f"{a}, {b}{c}",
        rf"\begin{{pmatrix}} {a} & {b} \\ {c} & {d} \end{{pmatrix}}",
        f"{a}x^2-{b}y+{c}",
        f"y={a}x+{b}",
        f"x>{a}{b}",
        f"x={a}{b}",
        f"{a}+{b}i",
        rf"{a}{b} \text{{ cm}}",
        rf"{a}\pi \text{{ m}}",
        rf"{a}{b}\%",
        f"{a}:{b}:{c}",
        f"{a}:{b}0 PM",
        rf"\pm {a}{b}",
        rf"\sin {a}{b}^\circ",
        rf"\sum_{{k=1}}^{{n}} k^{{{a}}}",
        f"{a}{b}!",
        rf"\binom{{{a + b}}}{{{a}}}",
        rf"0.\overline{{{a}{b}}}",
        rf"\log_{a} {b}{c}",
        f"{a}0{b}_{{8}}" if max(a, b) < 8 else "101_2",
        r"\text{Monday}",
        "yes",
    ]


def choices(rng: random.Random) -> list[str]:
    letter = rng.choice("BCD")
    return [letter, f"({letter})", f"{letter}.", rf"\text{{{letter}}}", f"**{letter}**"]


# Scorer, its answers, how a response states one.
STATED: list[tuple[str, Callable[[random.Random], list[str]], str]] = [
    *((name, formulas, r"\boxed{%s}") for name in ("math", "math500", "hiyouga/geometry3k", "numina_olympiads")),
    *((name, formulas, r"</think>\boxed{%s}") for name in ("luffy/0", "luffy/2", "math/last_number")),
    *((name, numbers, r"\boxed{%s}") for name in ("strict", "aime2024", "lighteval/MATH")),
    ("math_dapo", numbers, "Answer: %s"),
    ("openai/gsm8k", numbers, "so\n#### %s"),
    ("openai/gsm8k", lambda rng: [f"{rng.randint(10, 99)} apples", f"${rng.randint(10, 99)}"], "so\n#### %s"),
    ("short_answer", numbers, "<answer>%s</answer>"),
    ("gpqa", choices, r"\boxed{%s}"),
    ("gpqa", choices, "Answer: %s"),
    ("letters", choices, "The answer is %s"),
]


def insertions(answer: str, rng: random.Random, num: int) -> list[tuple[str, str, str]]:
    """Insertions at places between the tokens of an answer: digits, words and commands."""
    places = [match.start() for match in re.finditer(r"\\[a-zA-Z]+|\\.|(?<!\\)[a-zA-Z]{2,}|.", answer)] + [len(answer)]
    cases = [(answer[:at], text, answer[at:]) for at in places for text in (*SPACES, *NUMBERS, *WORDS)]
    return rng.sample(cases, min(len(cases), num))


@pytest.mark.parametrize(("source", "answers", "form"), STATED)
def test_what_is_inserted_never_keeps_an_answer_right_unless_a_rule_says_so(
    source: str, answers: Callable[[random.Random], list[str]], form: str
) -> None:
    rng, accepted = random.Random(SEED), []
    for answer in answers(rng):
        gold = re.sub(r"[^A-D]", "", answer.replace("text", "")) if answers is choices else answer
        gold = re.sub(r"[^\d.-]", "", gold) if source == "openai/gsm8k" else gold
        assert score(source, form.replace("%s", answer), gold, {}).correct, (source, answer)
        # The other sources of formulas share the code that the first one tries most.
        for before, inserted, after in insertions(answer, rng, 1 if answers is formulas and source != "math" else 6):
            response = form.replace("%s", before + inserted + after)
            if score(source, response, gold, {}).correct and not allowed(before, inserted, after):
                accepted.append((gold, before + inserted + after))
    assert accepted == []
