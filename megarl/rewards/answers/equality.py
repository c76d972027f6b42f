"""Whether two answers mean the same: rules from cheap to costly, the first that applies decides."""

import re
from collections.abc import Callable, Sequence

from megarl.rewards.answers import structure
from megarl.rewards.answers.canonical import canonical, compact
from megarl.rewards.answers.normalise import normalise
from megarl.rewards.answers.numbers import are_loosely_close, parse_number
from megarl.rewards.answers.options import MAX_ANSWER_CHARS, AnswerOptions
from megarl.rewards.answers.symbolic import compare_symbolic
from megarl.rewards.answers.units import equal_quantities, parse_quantity, split_unit
from megarl.rewards.answers.verdict import Verdict

MAX_ITEMS = 64
MAX_NESTING = 8

Compare = Callable[[str, str], Verdict]
# What a rule says of two texts; None: it is not about such texts.
Rule = Callable[[str, str, Compare, AnswerOptions], Verdict | None]

_NAME = re.compile(
    r"\s*\\?[a-zA-Z]+\s*(?:_\s*\{?\w+\}?)?'*\s*(?:\([\w\s,]*\))?\s*|\s*[^\W\d_][^\W\d_ ]*(?:\s+[^\W\d_]+)*\s*"
)
_EQUALS = r"=|\\approx(?![a-zA-Z])|\\equiv(?![a-zA-Z])"
_WORDS = re.compile(r"[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*")
_NAMED_SET = r"\mathbb"
_CHOICE = re.compile(r"\(?([A-Z])\)?[.:)]?")
_SAME_WORDS = {
    "no solution": r"\emptyset",
    "no solutions": r"\emptyset",
    "no real solution": r"\emptyset",
    "no real solutions": r"\emptyset",
    "empty set": r"\emptyset",
    "无解": r"\emptyset",
    "dne": "does not exist",
    "undefined": "does not exist",
}


def math_equal(answer: str, gold: str, options: AnswerOptions) -> bool:
    """Whether the answer equals gold; see `compare_answers`."""
    return compare_answers(answer, gold, options) is Verdict.EQUAL


def compare_answers(answer: str, gold: str, options: AnswerOptions) -> Verdict:
    """Compare two answers without regard to spelling.

    Texts, numbers (see `numbers.are_close`) and quantities; then lists, intervals, sets and matrices element by
    element; equations by the difference of their sides, up to sign; at last the symbolic equality of expressions.
    Symmetric in mode `fix`. No answer, and one longer than 512 characters, is `UNPARSED`.
    """
    if not answer.strip() or not gold.strip() or max(len(answer), len(gold)) > MAX_ANSWER_CHARS:
        return Verdict.UNPARSED
    if options.textual:
        return _compare(normalise(answer), normalise(gold) if options.normalise_gold else gold, options, TEXTUAL_RULES)
    return _compare(canonical(answer), canonical(gold), options, RULES)


def _compare(answer: str, gold: str, options: AnswerOptions, rules: Sequence[Rule], depth: int = 0) -> Verdict:
    if depth > MAX_NESTING:
        return Verdict.UNPARSED

    def compare(a: str, g: str) -> Verdict:
        return _compare(a, g, options, rules, depth + 1)

    for rule in rules:
        verdict = rule(answer, gold, compare, options)
        if verdict is not None:
            return verdict
    return compare_symbolic(answer, gold)


def same_text(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Verdict | None:
    """The same text is equal; an empty one, and one with open brackets, means nothing."""
    if not answer or not gold:
        return Verdict.UNPARSED
    if compact(answer) == compact(gold):
        return Verdict.EQUAL
    return None if structure.is_balanced(answer) and structure.is_balanced(gold) else Verdict.UNPARSED


def _words(text: str) -> str:
    words = " ".join(text.casefold().split())
    return _SAME_WORDS.get(words, words)


def same_words(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Verdict | None:
    """Words compare without case; a word is no product of its letters, and no number."""
    letters = [_CHOICE.fullmatch(text) for text in (answer, gold)]
    if letters[0] and letters[1]:
        return Verdict.of(letters[0][1] == letters[1][1])
    a, g = _words(answer), _words(gold)
    is_text = [_WORDS.fullmatch(text) is not None and (len(text) > 3 or not text.isascii()) for text in (a, g)]
    if a == g and (any(is_text) or len(a) > 2 or a == "no"):
        return Verdict.EQUAL
    return Verdict.DIFFERENT if any(is_text) and not any(re.search("[=<>,;]", text) for text in (a, g)) else None


def same_quantity(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Verdict | None:
    """Two numbers, with units or without."""
    a, g = parse_quantity(answer), parse_quantity(gold)
    if a is None or g is None:
        return None
    return Verdict.of(equal_quantities(a, g))


def same_number(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Verdict | None:
    """Two numbers, as loosely as the options say."""
    a, g = parse_number(answer), parse_number(gold)
    if a is None or g is None:
        return None
    return Verdict.of(are_loosely_close(a, g, percent_factors=options.percent_factors))


def without_units(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Verdict | None:
    """Expressions with units: `5\\pi cm` equals `5\\pi`, but not `5\\pi m`."""
    a, g = split_unit(answer), split_unit(gold)
    if not a.unit and not g.unit:
        return None
    if a.unit and g.unit and a.unit != g.unit:
        return Verdict.DIFFERENT
    return compare(a.body, g.body)


def same_matrix(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Verdict | None:
    """Matrices of one shape, element by element."""
    a, g = structure.parse_matrix(answer), structure.parse_matrix(gold)
    if a is None or g is None:
        return None
    if [len(row) for row in a] != [len(row) for row in g]:
        return Verdict.DIFFERENT
    return _all_equal([x for row in a for x in row], [x for row in g for x in row], compare)


def same_alternatives(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Verdict | None:
    r"""`\pm` stands for two values: `\pm 2` equals `2, -2`."""
    a, g = structure.expand_signs(answer), structure.expand_signs(gold)
    if a is None and g is None:
        return None
    sides = [pair or _items(text) for pair, text in ((a, answer), (g, gold))]
    return _same_multiset(list(sides[0]), list(sides[1]), compare)


def _items(text: str) -> Sequence[str]:
    group = structure.parse_group(text)
    return group.items if group is not None and not group.ordered else (text,)


def same_intervals(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Verdict | None:
    r"""Inequalities in one variable are intervals: `x > 3`, `x \in (3,\infty)` and `(3,\infty)` are equal."""
    a, g = _interval_union(answer), _interval_union(gold)
    if a is None and g is None:
        return None
    names = [side[0] for side in (a, g) if side is not None]
    if len(set(names)) > 1:
        return Verdict.DIFFERENT
    return compare(a[1] if a else answer, g[1] if g else gold)


def _interval_union(text: str) -> tuple[str, str] | None:
    """The only variable, and the union of the intervals, of inequalities joined by "or"."""
    parts = structure.split_top(text, r"(?<![a-zA-Z\\])(?:or|或|или)(?![a-zA-Z])|\\lor(?![a-zA-Z])|,(?=[^,]*[<>])")
    found = [structure.as_interval(part) for part in parts]
    pairs = [pair for pair in found if pair is not None]
    if len(pairs) < len(found) or len({name for name, _ in pairs}) != 1:
        return None
    return pairs[0][0], r" \cup ".join(interval for _, interval in pairs)


def same_union(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Verdict | None:
    """Unions part by part in any order; parts that overlap are left to set algebra."""
    a, g = structure.parse_union(answer), structure.parse_union(gold)
    if a is None and g is None:
        return None
    same = a is not None and g is not None and _same_multiset(list(a), list(g), compare) is Verdict.EQUAL
    return Verdict.EQUAL if same else compare_symbolic(answer, gold)


def same_group(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Verdict | None:
    """Tuples and intervals in order, with the same brackets; sets and bare lists in any order."""
    a, g = structure.parse_group(answer), structure.parse_group(gold)
    if a is None:
        return None if g is None or _NAMED_SET in answer else _same_single(g, answer, compare)
    if g is None:
        return None if _NAMED_SET in gold else _same_single(a, gold, compare)
    if len(a.items) != len(g.items):
        return Verdict.DIFFERENT
    if a.ordered and g.ordered:
        if not options.ignore_brackets and (a.opening, a.closing) != (g.opening, g.closing):
            return Verdict.DIFFERENT
        return _all_equal(a.items, g.items, compare)
    if r"\{" in (a.opening, g.opening) and (a.ordered or g.ordered) and not options.ignore_brackets:
        return Verdict.DIFFERENT
    if a.ordered or g.ordered:
        return _all_equal(a.items, g.items, compare)
    return _same_multiset(list(a.items), list(g.items), compare)


def _same_single(group: structure.Group, other: str, compare: Compare) -> Verdict:
    """One thing in brackets equals it without them; several things are not one."""
    return compare(group.items[0], other) if len(group.items) == 1 else Verdict.DIFFERENT


def same_equation(answer: str, gold: str, compare: Compare, options: AnswerOptions) -> Verdict | None:
    """Two equations by the difference of their sides up to sign; `name = value` equals the value."""
    a, g = structure.split_top(answer, _EQUALS), structure.split_top(gold, _EQUALS)
    if (len(a) == 1 and len(g) == 1) or _is_list(answer) or _is_list(gold):
        return None
    if len(a) > 1 and len(g) > 1:
        return _same_equations(a, g, compare)
    parts, value = (a, gold) if len(a) > 1 else (g, answer)
    if not all(_NAME.fullmatch(part) or compare(part, parts[-1]) is Verdict.EQUAL for part in parts[:-1]):
        return Verdict.DIFFERENT
    return compare(parts[-1], value)


def _is_list(text: str) -> bool:
    group = structure.parse_group(text)
    return group is not None and not group.opening


def _same_equations(a: list[str], g: list[str], compare: Compare) -> Verdict:
    if compare(a[0], g[0]) is Verdict.EQUAL and _NAME.fullmatch(g[0]):
        return compare(a[-1], g[-1])
    if len(a) > 2 or len(g) > 2:
        return Verdict.DIFFERENT
    left, right = (f"{side[0]}-({side[1]})" for side in (a, g))
    verdict = compare_symbolic(left, right)
    return verdict if verdict is Verdict.EQUAL else compare_symbolic(f"-({left})", right)


def _all_equal(a: Sequence[str], g: Sequence[str], compare: Compare) -> Verdict:
    if len(a) > MAX_ITEMS:
        return Verdict.UNPARSED
    verdicts = []
    for x, y in zip(a, g, strict=True):
        verdicts.append(compare(x, y))
        if verdicts[-1] is Verdict.DIFFERENT:
            return Verdict.DIFFERENT
    return Verdict.UNPARSED if Verdict.UNPARSED in verdicts else Verdict.EQUAL


def _same_multiset(a: list[str], g: list[str], compare: Compare) -> Verdict:
    if len(a) != len(g):
        return Verdict.DIFFERENT
    if len(a) > MAX_ITEMS:
        return Verdict.UNPARSED
    unparsed = False
    for item in a:
        verdicts = [compare(item, other) for other in g]
        if Verdict.EQUAL not in verdicts:
            unparsed = unparsed or Verdict.UNPARSED in verdicts
            return Verdict.UNPARSED if unparsed else Verdict.DIFFERENT
        g = [other for index, other in enumerate(g) if index != verdicts.index(Verdict.EQUAL)]
    return Verdict.EQUAL


RULES: Sequence[Rule] = (
    same_text,
    same_words,
    same_quantity,
    same_matrix,
    same_alternatives,
    same_intervals,
    same_union,
    same_equation,
    same_group,
    without_units,
)
TEXTUAL_RULES: Sequence[Rule] = (same_text, same_number, same_matrix, same_equation, same_group)
