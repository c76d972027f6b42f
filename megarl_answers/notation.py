"""Compare answers in notations with rules of their own: number bases, named tuples, inequalities, angles, ratios, times
of day.
"""

import itertools
import re
import string
from collections.abc import Callable, Mapping

from megarl_answers import structure
from megarl_answers.guard import numbers_side_by_side
from megarl_answers.numbers import Number, are_close, parse_number
from megarl_answers.options import AnswerOptions, Equality
from megarl_answers.units import split_unit, unit_of
from megarl_answers.words import CHANGING

Compare = Callable[[str, str], Equality]

_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_BASE_OF_WORD: Mapping[str, int] = {word: base for base, word in enumerate(_BASES, 2)} | {"sixteen": 16}
_DIGITS = r"-?[\dA-F]*\d[\dA-F]*(?:\.[\dA-F]+)?"
_IN_BASE = re.compile(
    rf"(\()?\s*({_DIGITS})\s*(?(1)\))\s*_\s*\{{?\s*\(?({'|'.join(_BASE_OF_WORD)}|\d{{1,2}})\)?\s*\}}?"
)
_TUPLE_OF_NAMES = re.compile(r"(\((?:\s*\\?[a-zA-Z]\w*\s*,)+\s*\\?[a-zA-Z]\w*\s*\))\s*=\s*(\(.*\))")
_POINT = re.compile(r"[A-Z]\s*(\([^()]*,.*\))")
_ASSIGNMENT = re.compile(r"(\\?[a-zA-Z]\w*)\s*=\s*([^=]+)")
_CLOSING_WORDS = re.compile(r".*[\d)}\]]\s+([^\W\d_]+(?:[\s'-]+[^\W\d_]+)*)")
_RATIO = r":|(?<![a-zA-Z\\])to(?![a-zA-Z])"
_TIME = re.compile(r"(\d{1,2})(?::(\d\d))?(?::(\d\d))?(?:\s*([ap])\.?\s?m\.?)?", re.IGNORECASE)
_HALVES = re.compile(r"\s+(?:(in\s+the\s+morning)|in\s+the\s+(?:afternoon|evening)|at\s+night)$")
_OCLOCK = re.compile(r"(?<=\d)\s*o'clock", re.IGNORECASE)

_TIMES_OF_DAY = {"noon": "12 pm", "12 noon": "12 pm", "midnight": "12 am", "12 midnight": "12 am"}
_MONTH = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    "|nov(?:ember)?|dec(?:ember)?"
)
_DAY = r"(?:the\s+)?(\d{1,2})(?:st|nd|rd|th)?"
_DATE = re.compile(
    rf"(?:([a-z]+day),?\s+)?(?:({_MONTH})\.?\s+{_DAY}|{_DAY}\s+(?:of\s+)?({_MONTH})\.?)(?:,?\s+(\d{{3,4}}))?",
    re.IGNORECASE,
)
_AMOUNT = re.compile(r"\s*(?:,|and\b)?\s*(\d[\d.,]*(?<![.,]))\s*([^\W\d_]+(?<!and)|'{1,2}|\")\.?")
_PRIMES = {"'": "foot", "''": "inch", '"': "inch"}


def same_base(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Compare numbers in a base, as `2516_8`: digits and bases must be the same. One side may leave out its base."""
    digits, bases = [], set()
    for text in (answer, gold):
        match = _IN_BASE.fullmatch(re.sub(r"(?<=\w) ?([A-F]) ?(?=\w)", r"\1", text))
        digits.append((match[2] if match else text).replace(" ", "").lstrip("0"))
        if match:
            bases.add(_BASE_OF_WORD[match[3]] if match[3].isalpha() else int(match[3]))
    if not bases:
        return None
    return Equality.of(digits[0] == digits[1] and len(bases) == 1)


def same_named_tuple(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Compare `(p,q)=(3,2)` with another order of the same names, with `p=3, q=2`, or with `(3,2)`, and `P(3,2)` with
    `(3,2)`.

    `y=2, x=3` equals `(3,2)`, and not `(2,3)`: where names are neighbours in the alphabet, they are in its order.
    """
    points = [_POINT.fullmatch(text) for text in (answer, gold)]
    if any(points) and any(text[0] == "(" for text in (answer, gold)):
        return compare(*(match[1] if match else text for match, text in zip(points, (answer, gold), strict=True)))
    tuples = [_TUPLE_OF_NAMES.fullmatch(text) for text in (answer, gold)]
    values = [_values_by_name(text) for text in (answer, gold)]
    for named, text, other in ((values[0], answer, gold), (values[1], gold, answer)):
        # Values of different names are no alternatives.
        if (
            named
            and text[0] != "("
            and len({name.partition("_")[0] for name in named}) > 1
            and (" or " in text or other[:2] == r"\{")
        ):
            return Equality.DIFFERENT
    if not any(tuples):
        ordered = [_in_order(each, other) for each, other in zip(values, (gold, answer), strict=True)]
        if not any(ordered):
            return None
        return compare(ordered[0] or answer, ordered[1] or gold)
    if values[0] is None or values[1] is None:
        a, g = (match[2] if match else text for match, text in zip(tuples, (answer, gold), strict=True))
        return compare(a, g)
    if values[0].keys() != values[1].keys():
        return Equality.DIFFERENT
    verdicts = {compare(value, values[1][name]) for name, value in values[0].items()}
    return next((each for each in (Equality.DIFFERENT, Equality.UNPARSED) if each in verdicts), Equality.EQUAL)


def _values_by_name(text: str) -> dict[str, str] | None:
    """Return the values that `(p,q)=(3,2)` or `p=3, q=2` gives to names, None for other texts."""
    if match := _TUPLE_OF_NAMES.fullmatch(text):
        names, values = (structure.parse_group(side) for side in match.groups())
        if names is None or values is None or len(set(names.items)) != len(values.items):
            return None
        return dict(zip(names.items, values.items, strict=True))
    group = structure.parse_group(text)
    pairs = [_ASSIGNMENT.fullmatch(item) for item in group.items] if group is not None else []
    found = {match[1]: match[2].strip() for match in pairs if match}
    return found if pairs and len(found) == len(pairs) else None


def _in_order(values: Mapping[str, str] | None, other: str) -> str | None:
    """Return named values as a tuple in the order of the alphabet, None if `other` is not a tuple or names are not
    neighbours.
    """
    group = structure.parse_group(other) if values else None
    if not values or group is None or not group.ordered or "".join(sorted(values)) not in string.ascii_letters:
        return None
    return f"({', '.join(values[name] for name in sorted(values))})"


def same_inequality(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Compare inequalities in several variables: a number may multiply both sides, a negative one turns the sign."""
    # It imports sympy, which only judging needs.
    from megarl_answers.symbolic import sign_of_factor

    sides = [structure.split_top(text, structure.RELATION) for text in (answer, gold)]
    signs = [re.findall(structure.RELATION, text) for text in (answer, gold)]
    if any(len(parts) != 2 or not all(parts) or len(found) != 1 for parts, found in zip(sides, signs, strict=True)):
        return None
    factor = sign_of_factor(*(f"{left}-({right})" for left, right in sides))
    if factor is None:
        return Equality.DIFFERENT
    return Equality.of((signs[0][0] if factor > 0 else structure.TURNED[signs[0][0]]) == signs[1][0])


def same_angle(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    r"""Compare degrees with an angle written with π: `30^\circ` equals `\pi/6`."""
    a, g = (each._replace(unit="") if each.unit == "radian" else each for each in map(split_unit, (answer, gold)))
    is_list = any(structure.parse_group(text) is not None for text in (answer, gold))
    if is_list or {a.unit, g.unit} != {"degree", ""} or r"\pi" not in answer + gold:
        return None
    degrees, other = (a.body, g.body) if a.unit else (g.body, a.body)
    return compare(rf"\frac{{({degrees})\pi}}{{180}}", other) if r"\pi" in other else None


def same_closing_words(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Refuse words after an answer that are neither a unit nor in the other one: `0 is wrong` is not 0."""
    words = []
    for text in (answer, gold):
        match = None if split_unit(text).unit else _CLOSING_WORDS.fullmatch(text)
        # The degrees of an angle are part of it.
        words.append(match[1].casefold().split() if match and match[1] != "degree" else [])
    has_text = any(len(word) > 3 or word in CHANGING for each in words for word in each)
    return Equality.DIFFERENT if has_text and words[0] != words[1] else None


def same_time(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Compare times of day if one is with am or pm: `7 p.m.` equals `7:00 PM` and `19:00`, and not `7:00`."""
    if any(_OCLOCK.search(text) for text in (answer, gold)):
        hours = [_OCLOCK.sub("", text) for text in (answer, gold)]
        return compare(*(f"{text}:00" if text.isdigit() else text for text in hours))
    plain = [text.rpartition("=")[2].strip() for text in (answer, gold)]
    plain = [_HALVES.sub(lambda half: " am" if half[1] else " pm", text) for text in plain]
    times = [_TIME.fullmatch(_TIMES_OF_DAY.get(text.casefold(), text)) for text in plain]
    if not any(time is not None and time[4] for time in times):
        return None
    seconds = []
    for time in times:
        # Without am or pm, only the hours of 24 say which half of the day is meant.
        if time is None or not (time[4] or (time[2] and not 1 <= int(time[1]) <= 12)):
            return Equality.DIFFERENT
        hour = int(time[1]) % 12 + 12 * (time[4].lower() == "p") if time[4] else int(time[1])
        seconds.append(3600 * hour + 60 * int(time[2] or 0) + int(time[3] or 0))
    return Equality.of(seconds[0] == seconds[1])


def same_date(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Compare days of a year, `July 4, 1776` and `the 4th of July 1776`."""
    dates = [_DATE.fullmatch(text) for text in (answer, gold)]
    if dates[0] is None or dates[1] is None:
        return None
    a, g = (((d[2] or d[5])[:3].casefold(), int(d[3] or d[4]), d[6]) for d in dates if d)
    days = {date[1].casefold() for date in dates if date and date[1]}
    return Equality.of(a == g and len(days) < 2)


def same_compound(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Compare amounts in several units, `2 hours 30 minutes` and `2 h, 30 min`."""
    a, g = _amounts(answer), _amounts(gold)
    if a is None or g is None:
        return None
    return Equality.of(a.keys() == g.keys() and all(are_close(a[unit], g[unit]) for unit in a))


def _amounts(text: str) -> Mapping[str, Number] | None:
    """Return the numbers of an amount by their units, None unless it has several units."""
    found, end, amounts = dict[str, Number](), 0, 0
    while match := _AMOUNT.match(text, end):
        number, unit = parse_number(match[1]), _PRIMES.get(match[2]) or unit_of(match[2])
        if number is None or not unit:
            return None
        found[unit], end, amounts = number, match.end(), amounts + 1
    return found if end == len(text) and 1 < amounts == len(found) else None


def same_ratio(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Compare ratios: `2:4:6` equals `1:2:3`. Possible times of day, `2:15` and `4:30`, are compared as such."""
    ratios = [structure.split_top(text, _RATIO) for text in (answer, gold)]
    if any(len(terms) < 2 or not all(terms) for terms in ratios):
        return None
    if len(ratios[0]) != len(ratios[1]):
        return Equality.DIFFERENT
    times = [_TIME.fullmatch(text) for text in (answer, gold)]
    if times[0] and times[1]:
        return Equality.of(times[0].groups() == times[1].groups())
    # All products are compared, since a term may be 0; but not all terms may.
    zeros = [[compare(term, "0") for term in terms] for terms in ratios]
    pairs = itertools.combinations(zip(*ratios, strict=True), 2)
    verdicts = {compare(f"({a})({y})", f"({b})({x})") for (a, x), (b, y) in pairs}
    if Equality.UNPARSED in verdicts.union(*zeros):
        return Equality.UNPARSED
    return Equality.of(verdicts == {Equality.EQUAL} and all(Equality.DIFFERENT in each for each in zeros))


def same_beside(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Refuse numbers with nothing but spaces between: `20 22` equals the same text alone."""
    return Equality.DIFFERENT if any(map(numbers_side_by_side, (answer, gold))) else None
