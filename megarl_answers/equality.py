"""Compare answers by meaning: try a list of rules, from cheap to costly, until one of them can decide."""

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

from megarl_answers import bound, choices, notation, structure
from megarl_answers.grammar import is_supposed
from megarl_answers.guard import COMPUTATION, refusal
from megarl_answers.numbers import REL_TOLERANCE, Number, are_close, parse_number
from megarl_answers.numerals import ordinal
from megarl_answers.options import MAX_ANSWER_CHARS, AnswerOptions, Equality
from megarl_answers.spelling import canonical, compact, normalise
from megarl_answers.statement import AGAIN, plain_answer
from megarl_answers.units import PERCENT, parse_quantity, split_unit
from megarl_answers.words import DENYING, same_words

MAX_ITEMS = 64
MAX_NESTING = 8

Compare = Callable[[str, str], Equality]
# A rule returns its verdict on two texts, or None if it does not apply to them.
Rule = Callable[[str, str, Compare, AnswerOptions], Equality | None]

_NAME = re.compile(
    r"\s*(?:\\(?:overline|vec)\s*\{\s*\w{1,3}\s*\}|m?\s*\\(?:angle|triangle)\s*[A-Z]{1,3}|[|\[]\s*[A-Z]+\s*[|\]]|\\#\s*[A-Z])\s*|"
    r"\s*\\?[a-zA-Z]+\s*(?:_\s*\{?[\w,]+\}?)?'*\s*(?:\([\w\s,]*\))?\s*|\s*[^\W\d_][^\W\d_ ]*(?:\s+[^\W\d_]+)*\s*"
)
_ORDINAL = re.compile(r"^(\d+)th$")
_LETTER = re.compile(r"\\?[a-zA-Z]|\\[a-zA-Z]+")
_NUMBER_IS_MISSING = re.compile(r"(?<!\\)[a-zA-Z]")
_EQUALS = r"=|\\approx(?![a-zA-Z])|\\equiv(?![a-zA-Z])"
_OR = r"(?<![a-zA-Z\\])(?:or|或|или)(?![a-zA-Z])|\\lor(?![a-zA-Z])|,(?=[^,]*[<>])"
_NAME_OF_VALUE = re.compile(r"^\\?[a-zA-Z]{1,2}\s*=(?=[^=]+$)")
_IN_BRACKETS = re.compile(r"^\(\s*(-?[\d.,]+|[A-Z])\s*\)$")


def same_string(answer: str, gold: str) -> bool:
    """Return whether two answers are equal as strings or numbers, except for spaces, wrappers, `x=`, zeros and units.

    This suits answers with only one way to write them. `(073)`, `73.0` and `73` are equal.
    """
    plain = [_NAME_OF_VALUE.sub("", plain_answer(canonical(text))).strip() for text in (answer, gold)]
    plain = [_IN_BRACKETS.sub(r"\1", text) for text in plain]
    if plain[0] == plain[1] and plain[0][:1].isalnum():
        return True
    a, g = (split_unit(text) for text in plain)
    x, y = (parse_quantity(text) for text in plain)
    if x is not None and y is not None:
        # Here `hundred` is a factor.
        return x[0].value == y[0].value and len({unit for _, unit in (x, y) if unit}) < 2
    if a.unit and g.unit and a.unit != g.unit:
        return False
    return bool(a.body) and compact(a.body) == compact(g.body)


def compare_answers(answer: str, gold: str, options: AnswerOptions) -> Equality:
    """Compare the meaning of two answers, however they are spelled.

    Rules are tried in this order: texts, numbers (see `numbers.are_close`) and quantities; then lists, intervals, sets
    and matrices, element by element; equations, by the difference of their sides up to sign; last, expressions, by
    symbolic equality. In mode `fix` this is symmetric. An empty answer, or one over 512 characters, is `UNPARSED`.
    """
    if not answer.strip() or not gold.strip() or max(len(answer), len(gold)) > MAX_ANSWER_CHARS:
        return Equality.UNPARSED
    if options.textual:
        return _compare(normalise(answer), normalise(gold) if options.normalise_gold else gold, options, TEXTUAL_RULES)
    if len(forms := AGAIN.split(answer)) > 1:
        return Equality.of({compare_answers(form, gold, options) for form in forms} == {Equality.EQUAL})
    answer, gold = (plain_answer(canonical(text)) for text in (answer, gold))
    if None not in (places := [ordinal(text) for text in (answer, gold)]):
        return Equality.of(places[0] == places[1])
    answer, gold = (_ORDINAL.sub(r"\1", text) for text in (answer, gold))
    return _compare(answer, gold, options, RULES)


def _compare(answer: str, gold: str, options: AnswerOptions, rules: Sequence[Rule], depth: int = 0) -> Equality:
    """Return the result of the first rule that applies to two texts, or of symbolic comparison if none does."""
    # Here and below: it imports sympy, which only judging needs.
    from megarl_answers.symbolic import compare_symbolic

    if depth > MAX_NESTING:
        return Equality.UNPARSED
    compare = partial(_compare, options=options, rules=rules, depth=depth + 1)
    for rule in rules:
        if (verdict := rule(answer, gold, compare, options)) is not None:
            return verdict
    return compare_symbolic(answer, gold)


def same_text(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Compare texts letter by letter, ignoring spaces. Empty texts and unclosed brackets give `UNPARSED`."""
    if not answer or not gold:
        return Equality.UNPARSED
    if compact(answer) == compact(gold):
        return Equality.EQUAL
    return None if structure.is_balanced(answer) and structure.is_balanced(gold) else Equality.UNPARSED


def same_quantity(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Compare numbers with units: one side may lack a unit, but two different units make the answers unequal.

    A percentage also equals its value as a plain number: 50% = 0.5.
    """
    a, g = parse_quantity(answer), parse_quantity(gold)
    if a is None or g is None:
        return None
    (number_a, unit_a), (number_g, unit_g) = a, g
    if unit_a and unit_g:
        return Equality.of(unit_a == unit_g and are_close(number_a, number_g))
    if are_close(number_a, number_g):
        return Equality.EQUAL
    if PERCENT not in (unit_a, unit_g):
        return Equality.DIFFERENT
    percent, plain = (number_a, number_g) if unit_a == PERCENT else (number_g, number_a)
    return Equality.of(are_close(Number(value=percent.value * Fraction(1, 100), rounded=percent.rounded), plain))


def same_number(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Compare numbers: integers exactly, others within a relative tolerance of 1e-4.

    With `percent_factors`, numbers that differ by a factor of 100 are equal too.
    """
    a, g = parse_number(answer), parse_number(gold)
    if a is None or g is None:
        return None
    factors = (Fraction(1), Fraction(1, 100), Fraction(100)) if options.percent_factors else (Fraction(1),)
    values = [g.value * factor for factor in factors]
    if a.value.denominator == 1 and g.value.denominator == 1:
        return Equality.of(a.value in values)
    return Equality.of(any(math.isclose(a.value, value, rel_tol=REL_TOLERANCE) for value in values))


def without_units(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    r"""Compare expressions with units: `5\pi cm` equals `5\pi`, but not `5\pi m`."""
    a, g = split_unit(answer), split_unit(gold)
    if not a.unit and not g.unit:
        return None
    if a.unit and g.unit and a.unit != g.unit:
        return Equality.DIFFERENT
    return compare(a.body, g.body)


def same_matrix(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Compare matrices element by element; they must have the same shape. A column may be written as a tuple."""
    a, g = structure.parse_matrix(answer), structure.parse_matrix(gold)
    a, g = (each or structure.as_column(text) for each, text in ((a, answer), (g, gold))) if a or g else (a, g)
    if a is None or g is None:
        return None
    if [len(row) for row in a] != [len(row) for row in g]:
        return Equality.DIFFERENT
    return _all_equal([x for row in a for x in row], [x for row in g for x in row], compare)


def same_alternatives(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    r"""Expand `\pm`, which stands for two values, and compare in any order: `\pm 2` equals `2, -2`.

    So does each element of a list or set: `0, \pm 1` has three values.
    """
    sides: list[list[str]] = []
    for text in (answer, gold):
        group = structure.parse_group(text)
        items = group.items if group is not None and not group.ordered else (text,)
        sides.append([each for item in items for each in structure.expand_signs(item) or (item,)])
    if not any(r"\pm" in text or r"\mp" in text for text in (answer, gold)):
        return None
    return _same_multiset(sides[0], sides[1], compare)


def same_intervals(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    r"""Compare inequalities in one variable as intervals: `x > 3`, `x \in (3,\infty)` and `(3,\infty)` are equal.

    Inequalities may be joined by "or".
    """
    from megarl_answers.symbolic import solve_linear

    names, unions = set(), []
    for text in (answer, gold):
        found = [
            structure.as_interval(part)
            or (structure.as_interval(solve_linear(part) or "") if re.search(structure.RELATION, part) else None)
            for part in structure.split_top(text, _OR)
        ]
        pairs = [pair for pair in found if pair is not None]
        variables = {name for name, _ in pairs}
        if len(pairs) == len(found) and len(variables) == 1:
            names |= variables
            unions.append(r" \cup ".join(interval for _, interval in pairs))
        else:
            unions.append(text)
    if not names:
        return None
    groups = [structure.parse_group(union) for union in unions]
    # Bare numbers are not bounds.
    is_list = {group.opening for group in groups if group is not None} in ({"", "("}, {"", "["})
    return Equality.DIFFERENT if len(names) > 1 or is_list else compare(unions[0], unions[1])


def same_union(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Compare unions set by set, in any order; if that fails, compare them symbolically, as their sets may overlap."""
    from megarl_answers.symbolic import compare_symbolic

    a, g = (structure.split_top(text, r"\\cup(?![a-zA-Z])") for text in (answer, gold))
    is_union = [len(parts) > 1 and all(parts) for parts in (a, g)]
    if not any(is_union):
        return None
    same = all(is_union) and _same_multiset(a, g, compare) is Equality.EQUAL
    return Equality.EQUAL if same else compare_symbolic(answer, gold)


def same_group(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Compare tuples and intervals in order and with equal brackets, and sets and bare lists in any order.

    A single item in brackets equals the item alone. Several items never equal a single item.
    """
    a, g = structure.parse_group(answer), structure.parse_group(gold)
    if a is None or g is None:
        group, other = (a, gold) if a is not None else (g, answer)
        if group is None or r"\mathbb" in other:
            return None
        is_single = len(group.items) == 1 and group.items[0] != r"\emptyset"
        return compare(group.items[0], other) if is_single else Equality.DIFFERENT
    # A set of one tuple is the tuple.
    single = next((each for each in (a, g) if len(each.items) == 1 and each.items[0].startswith("(")), None)
    if single is not None and len(a.items) != len(g.items):
        return compare(single.items[0], gold if single is a else answer)
    if len(a.items) != len(g.items):
        return Equality.DIFFERENT
    if a.ordered and g.ordered:
        if not options.ignore_brackets and (a.opening, a.closing) != (g.opening, g.closing):
            return Equality.DIFFERENT
    elif r"\{" in (a.opening, g.opening) and (a.ordered or g.ordered) and not options.ignore_brackets:
        return Equality.DIFFERENT
    # Dots leave out terms that follow from the order.
    if a.ordered or g.ordered or r"\ldots" in (*a.items, *g.items):
        return _all_equal(a.items, g.items, compare)
    return _same_multiset(a.items, g.items, compare)


def same_equation(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Equality | None:
    """Compare equations by the difference of their sides, up to a factor. `name = value` also equals `value` alone.

    A solved equation such as `x=2` equals no equation that leaves the solving to the reader, such as `2x=4`. In a
    chain, every part must be a name or equal the last part.
    """
    from megarl_answers.symbolic import compare_symbolic, sign_of_factor

    a, g = structure.split_top(answer, _EQUALS), structure.split_top(gold, _EQUALS)
    if len(a) == len(g) == 2 and {a[0], g[0]} == {"y", "f(x)"}:
        a, g = ["y", a[1]], ["y", g[1]]
    groups = [structure.parse_group(text) for text in (answer, gold)]
    is_list = any(group is not None and not group.opening for group in groups)
    if (len(a) == 1 and len(g) == 1) or is_list:
        return None
    signs = [set(re.findall(_EQUALS, text)) for text in (answer, gold)]
    if len(a) > 1 and len(g) > 1:
        # Only a number may be about the value of a name.
        if signs[0] != signs[1] and _NUMBER_IS_MISSING.search(a[-1]) and _NUMBER_IS_MISSING.search(g[-1]):
            return Equality.DIFFERENT
        if len(a) > 2 or len(g) > 2:
            return _same_chain(a, g, compare)
        if _NAME.fullmatch(g[0]) and compare(a[0], g[0]) is Equality.EQUAL:
            return compare(a[-1], g[-1])
        left, right = (f"{side[0]}-({side[1]})" for side in (a, g))
        verdict = compare_symbolic(left, right)
        if verdict is Equality.DIFFERENT and any(
            _NAME.fullmatch(side[0]) and not _NUMBER_IS_MISSING.search(side[1]) for side in (a, g)
        ):
            return compare_symbolic(f"-({left})", right)
        return verdict if verdict is Equality.EQUAL or sign_of_factor(left, right) is None else Equality.EQUAL
    parts, value = (a, gold) if len(a) > 1 else (g, answer)
    if len(parts) == 2 and _LETTER.fullmatch(parts[1]) and not _NAME.fullmatch(parts[0]):
        parts = parts[::-1]
    if is_supposed(parts[0]) or any(DENYING & set(part.lower().split()) for part in parts):
        return Equality.DIFFERENT
    # The part before `\approx` is exact.
    if r"\approx" in (signs[0] | signs[1]) and not _NAME.fullmatch(parts[-2]):
        return Equality.EQUAL if parts[-1] == value else compare(parts[-2], value)
    # A question for a computation only names its value.
    named = [part for part in parts[:-1] if not _NAME.fullmatch(part) and refusal(part) != COMPUTATION]
    if not all(compare(part, parts[-1]) is Equality.EQUAL for part in named):
        return Equality.DIFFERENT
    return compare(parts[-1], value)


def _same_chain(a: Sequence[str], g: Sequence[str], compare: Compare) -> Equality:
    """Compare chains of equations: they must name the same, and be equal in their last and all other parts."""
    names = [{part for part in chain if _NAME.fullmatch(part)} for chain in (a, g)]
    others = [part for chain in (a, g) for part in chain if not _NAME.fullmatch(part)]
    if len(a) == len(g) and all(compare(x, y) is Equality.EQUAL for x, y in zip(a, g, strict=True)):
        return Equality.EQUAL
    if names[0] != names[1] or not all(compare(part, g[-1]) is Equality.EQUAL for part in others):
        return Equality.DIFFERENT
    return compare(a[-1], g[-1])


def _all_equal(a: Sequence[str], g: Sequence[str], compare: Compare) -> Equality:
    """Compare two lists of items pairwise, in order."""
    if len(a) > MAX_ITEMS:
        return Equality.UNPARSED
    verdicts = []
    for x, y in zip(a, g, strict=True):
        verdicts.append(compare(x, y))
        if verdicts[-1] is Equality.DIFFERENT:
            return Equality.DIFFERENT
    return Equality.UNPARSED if Equality.UNPARSED in verdicts else Equality.EQUAL


def _same_multiset(a: Sequence[str], g: Sequence[str], compare: Compare) -> Equality:
    """Compare two lists of items in any order."""
    if len(a) != len(g):
        return Equality.DIFFERENT
    if len(a) > MAX_ITEMS:
        return Equality.UNPARSED
    left = list(g)
    for item in a:
        verdicts = [compare(item, other) for other in left]
        if Equality.EQUAL not in verdicts:
            return Equality.UNPARSED if Equality.UNPARSED in verdicts else Equality.DIFFERENT
        del left[verdicts.index(Equality.EQUAL)]
    return Equality.EQUAL


RULES: Sequence[Rule] = (
    choices.same_choice,
    same_text,
    bound.same_renamed,
    notation.same_time,
    notation.same_date,
    same_words,
    notation.same_base,
    notation.same_compound,
    notation.same_ratio,
    notation.same_angle,
    same_quantity,
    notation.same_closing_words,
    same_matrix,
    same_alternatives,
    same_intervals,
    same_union,
    notation.same_inequality,
    notation.same_named_tuple,
    same_equation,
    same_group,
    without_units,
    notation.same_beside,
)
TEXTUAL_RULES: Sequence[Rule] = (same_text, same_number, same_matrix, same_equation, same_group)
