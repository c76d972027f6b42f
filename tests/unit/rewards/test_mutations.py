"""Mutations: where a digit, sign, exponent, base, element, unit or constant changes, the answer is another one."""

import re

from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards import score

SMALL = st.integers(2, 99)

UNITS = ("cm", "km", "kg", "hours", "dollars", "square units")
CONSTANTS = (r"\pi", "e", r"\sqrt{2}", r"\sqrt{7}", "i", r"\ln(3)")


def numbers() -> st.SearchStrategy[str]:
    """Integers, decimals of few digits, whose digits all count, fractions, powers and factorials off by a little."""
    return st.one_of(
        st.integers(1, 10**12).map(str),
        st.tuples(st.integers(1, 9), SMALL).map(lambda pair: f"{pair[0]}.{pair[1]}"),
        st.tuples(SMALL, SMALL).map(lambda pair: rf"\frac{{{pair[0]}}}{{{pair[1]}}}"),
        st.tuples(SMALL, st.integers(2, 900), SMALL).map(lambda t: f"{t[0]}^{{{t[1]}}}+{t[2]}"),
        st.tuples(SMALL, st.integers(2, 900), SMALL).map(lambda t: rf"{t[0]}-\frac{{1}}{{{t[2]}^{{{t[1]}}}}}"),
        st.tuples(st.integers(10, 99), SMALL).map(lambda pair: f"{pair[0]}!+{pair[1]}"),
    )


def formulas() -> st.SearchStrategy[str]:
    constant = st.sampled_from(CONSTANTS)
    return st.one_of(
        st.tuples(SMALL, constant, SMALL).map(lambda t: f"{t[0]}{t[1]}+{t[2]}"),
        st.tuples(SMALL, st.integers(2, 9), SMALL).map(lambda t: f"{t[0]}x^{{{t[1]}}}-{t[2]}y"),
        st.tuples(SMALL, SMALL, SMALL).map(lambda t: f"y={t[0]}x^{{{t[1]}}}+{t[2]}"),
        st.tuples(SMALL, SMALL, SMALL).map(lambda t: f"x={t[0]}, y={t[1]}, z={t[2]}"),
        st.tuples(SMALL, SMALL).map(lambda t: f"({t[0]}, {t[0] + t[1]}]"),
        st.tuples(SMALL, SMALL).map(lambda t: rf"\{{{t[0]}, {t[0] + t[1]}\}}"),
        st.tuples(SMALL, SMALL).map(lambda t: rf"\begin{{pmatrix}}{t[0]}\\{t[1]}\end{{pmatrix}}"),
        st.tuples(st.from_regex("[1-6][0-6]{1,6}", fullmatch=True), st.integers(7, 9)).map(lambda t: f"{t[0]}_{t[1]}"),
    )


def is_right(answer: str, gold: str) -> bool:
    return score("math", rf"\boxed{{{answer}}}", gold, {}).correct


@given(st.one_of(numbers(), formulas()), st.data())
def test_another_digit_is_another_answer(gold: str, data: st.DataObject) -> None:
    """Digits of values, exponents, bases and elements alike."""
    assert is_right(gold.replace(", ", ","), gold)
    place = data.draw(st.sampled_from([match.start() for match in re.finditer(r"\d", gold)]))
    digit = data.draw(st.sampled_from([each for each in "123456789" if each != gold[place]]))
    answer = gold[:place] + digit + gold[place + 1 :]
    assert not is_right(answer, gold), (answer, gold)


@given(st.one_of(numbers(), formulas().filter(lambda text: text[0].isdigit())))
def test_another_sign_is_another_answer(gold: str) -> None:
    assert not is_right(f"-{gold}", gold)
    assert not is_right(gold, f"-{gold}")
    if "+" in gold:
        assert not is_right(gold.replace("+", "-"), gold)


@given(numbers(), st.permutations(UNITS))
def test_another_unit_is_another_answer(number: str, units: list[str]) -> None:
    gold, answer = (rf"{number} \text{{ {unit}}}" for unit in units[:2])
    assert not is_right(answer, gold)
    # One unit may be left out, but what is no unit counts.
    assert is_right(number, gold)
    assert not is_right(rf"{number} \text{{ nonsense}}", gold)
    assert not is_right(rf"{number} \text{{ nonsense}}", number)


@given(SMALL, st.permutations(CONSTANTS))
def test_another_constant_is_another_answer(factor: int, constants: list[str]) -> None:
    gold, answer = (f"{factor}{constant}" for constant in constants[:2])
    assert is_right(rf"{constants[0]} \cdot {factor}", gold)
    assert not is_right(answer, gold)


@given(st.lists(numbers(), min_size=2, max_size=4), st.data())
def test_elements_may_not_be_missing_more_or_others(elements: list[str], data: st.DataObject) -> None:
    gold = "; ".join(elements)
    assert is_right("; ".join(data.draw(st.permutations(elements))), gold)
    place = data.draw(st.integers(0, len(elements) - 1))
    for others in (elements[:place] + elements[place + 1 :], [*elements, "17"], [*elements, elements[place]]):
        assert not is_right("; ".join(others), gold)
