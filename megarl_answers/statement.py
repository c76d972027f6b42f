"""Tell what a sentence says of its number: that it is the answer or not, a bound, a part of another
number or the argument of a function.
"""

import re

from megarl_answers.grammar import CONTEXT_CHARS, DENIED, at_end, clause_of, follows_equals, is_stated
from megarl_answers.numbers import join_digits, parse_number
from megarl_answers.numerals import spelled_number
from megarl_answers.spelling import canonical
from megarl_answers.units import unit_of
from megarl_answers.words import CHANGED, DENYING, counted_unit

_FRACTION = (
    r"(?:\d+\s*)?\\[dt]?frac(?:\s*\{\s*\d+\s*\}){2}|(?:\b\d+ )?\d+\s*/\s*\d+(?![\d/])|\b[1-9]\d{0,2}(?: \d{3})+\b"
)
_LAST_NUMBER = re.compile(rf"{_FRACTION}|(?:(?<!\d)\.)?\d(?:[\d.,']*\d)?")
# Up to the last digit, and up to the last character that no number has.
_TO_DIGIT, _TO_NUMBER = re.compile(r"(?s:.*)\d"), re.compile(r"(?s:.*)[^\s\d.,'/{}\\acdfrt]")
_GROUPED_NUMBER = re.compile(rf"{_FRACTION}|(?:[1-9]\d{{0,2}}(?:,\d{{3}})+|\d*)(?:\.\d+)?")
_SIGN = re.compile(r"(?<![\d)}\]])(?<![\d)}\]]\s)(?<!\b[a-zA-Z])(?<!\b[a-zA-Z]\s)[-−]\s?\$?$")
# Before or after a number, these make it a part of another one, or one of two answers: 2^42, 41 or 42, 42½, 42nd.
_PART_OF_NUMBER = re.compile(
    r"[\w.,'^_/*·×÷√)}]\Z|[\^_/*·×÷√]\s*$|\d\s*(?:[-–−+,]|\\[a-z]+\b)?\s*$|\d:$|\d\D{0,9}\b(?:or|to|through|and)\s*$"
    r"|\}\s*\{\s*$|\\(?:times|cdot|sqrt|frac|pm|neq|not)\b\W*$|[±≠~<≤≥⩽⩾≦≧]\s*$|(?<!=)>\s*$"
    r"|[\^_]\s*\{\s*$|\\(?!text|math|bold|boxed|fbox|frame|sim|approx|equiv|\w*[Rr]ightarrow|implies|to\b|l?eq?\b|geq?\b)[a-zA-Z]+\s*(?:\[[^\]]*\])?\{[^{}]*$|[a-zA-Z]\(\s*$|\|-?$",
    re.IGNORECASE,
)
_NUMBER_GOES_ON = re.compile(
    r"\s*(?:[½⅓⅔¼-¾⅐-⅞²³⁰-⁹!^_·×÷√π?]|/(?!\s*[a-zA-Z]{2})|\*(?!\*)|\+|%\s*\d|(?:and\s+a\s+)?(?:half|third|quarter)\b"
    r"|(?:hundred|thousand|dozen|[mbtr]+illion)(?:s|ths?)?\b|halves|(?:ten|hundred|thousand)ths?\b"
    r"|(?:plus|minus|times(?=\s*(?:[-\d$(\\]|the\b|itself\b|[a-z]\b(?<!a)))|squared|cubed|or|factorial|choose)\b"
    r"|\\(?:times|cdot|frac|sqrt|pi)\b)"
    r"|[a-zA-Z](?![a-zA-Z])|[eE][-+]?\d"
)
_ORDINAL = re.compile(r"\s?-?\s?\^?\s?\{?(?:\\text\s*\{\s*)?(?:st|nd|rd|th|fold|ish)\b")
# This may stand between a number and the words that it belongs to.
_BESIDE = r"(?:\s|[$€£({\[\\*:]|\b(?:the|an?|exactly|value|number|even|about)\b)*$"
_ENDS_BOUND = (
    r"(?:less|more|greater|fewer|larger|smaller|bigger|higher|lower|other|different)\s+(?:than|from)(?:\s+or\s+equal\s+to)?"
    r"|or\s+equal\s+to|at\s+(?:most|least)|no\s+(?:more|less|fewer)\s+than"
    r"|(?<!add )(?<!adds )(?<!come )(?<!comes )(?<!sum )(?<!sums )(?<!round )(?<!rounds )(?<!rounded )up\s+to"
    r"|below|above|under|over|beyond|past|exceed(?:s|ing)?|within|between|anything\s+but|all\s+but"
    r"|(?:\b(?:not|never|nor|or|no|minus|negative|plus|times|than|without|except|excluding|unlike|instead\s+of))"
    r"|n't|\b(?:could|may|might)\s+(?:also\s+)?(?:be|equal|have)|almost|nearly|not\s+equal\s+to"
)
_ENDS_FUNCTION = (
    r"(?:(?:root|half|third|quarter|fifth|tenth|percent|per\s?cent|%|square|cube|multiple|factor|divisor|power|logarithm"
    r"|log|ln|sine|cosine|tangent|reciprocal|inverse|opposite|out|one|some|each|\d)\s+of|(?:to\s+the\s+power\s+of)"
    r"|\b(?:twice|double|triple|thrice|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|mod|modulo)(?:[_^]\S+)?"
    r"|\b(?:divisible|divided|multiplied)\s+by)"
)
_ENDS_LABEL = (
    r"\b(?:step|problem|question|equation|eq|figure|fig|table|page|section|chapter|example|theorem|lemma|line|exercise"
    r"|option|choice)s?\.?"
)
_BEFORE = re.compile(rf"(?:\b(?:{_ENDS_BOUND})|{_ENDS_FUNCTION}|(?P<label>{_ENDS_LABEL})){_BESIDE}", re.IGNORECASE)
_LABELLED = re.compile(r":[\s*$]*$")
_ROUNDED = re.compile(r"\b(?:about|around|approx(?:imately|\.)?|roughly|some|circa|ca\.)\s+\W*$", re.IGNORECASE)
_FALSE = r"(?:wrong|incorrect|false|mistaken|invalid|impossible|untrue|unlikely)"
_VERDICT = (
    rf"\b(?:(?:is|are|was|were|be|seems?|looks?)\s+(?:\w+\s+){{0,2}}{_FALSE}|(?<!/){_FALSE}(?!\s*\w)"
    r"|(?:not|n't)\s+(?:be\s+)?(?:quite\s+)?(?:right|correct|true|possible|it|exact|the\s+(?:answer|solution|result|value|case)|work|enough)"
    r"|(?:is|are|was|were|be|seems?)\s+too\s+(?:small|large|big|many|few|much|little|high|low|short|long)|an?\s+(?:under|over)estimate)\b"
)
# After a number: a verb in the singular that is denied right behind it (`15 do not have pets` counts), a verdict in its
# sentence or in the next one about it.
_AFTER = re.compile(
    r"[\s)$\\*}\]]*(?:(?:is|was|would|will|can|could|does|should|must|may|might|seems)\b\s*(?:be\s+)?)?"
    r"(?:\w+ly\s+)?(?:not\b|never\b|cannot\b|(?:is|was|does|ca|could|wo|would|should)n't\b|fails\b)"
    rf"|(?:[^.!?\n]|\.\d)*{_VERDICT}"
    rf"|[^.!?\n]*[.!?]\s+(?:no|wait|but|however|actually|that|this|which|it)\b[^.!?\n]*{_VERDICT}"
    r"|[^.!?\n]{0,20}\bat\s+(?:most|least)\b|\s+and\s+(?:up|over|above)\b",
    re.IGNORECASE,
)
_NOT_ANOTHER = re.compile(
    r"(?:(?:,\s+|\s+\()(?:and\s+|but\s+)?not|\s+(?:instead\s+of|rather\s+than))\s+(?:[^\s\d]{1,3}\s*)?[\d.,/]+(?:\D*\))?(?:\s+as\s[^.!?;\d]*)?\W*$"
)


# After a number, a remark with others, or how many have a share: `15 (5 times 3)`, `15 for the 3 of them`.
_ASIDE = re.compile(
    r"\d[^.!?\n()]*(\s+\((?!\W*[\d.,]+\W*\))[^()]*\d[^()]*\)"
    r"|\s+out\s+of\s+\d+(?:\s+[a-z]+){0,3}|\s+(?:for|in|of|among|over|on)\s+(?:the|all|these|those|his|her|their)\s+\d+(?:\s+[a-z]+){1,3})\W*$"
)


def last_number(text: str) -> str | None:
    """Return the last number of a text with its sign, None unless the text states it as a value of its own."""
    if another := at_end(_NOT_ANOTHER, text, CONTEXT_CHARS):
        text = text[: another.start()]
    if (aside := at_end(_ASIDE, text, CONTEXT_CHARS)) and not _words_of(aside[1]) & CHANGED:
        text = text[: aside.start(1)]
    if (last := _TO_DIGIT.match(text)) is None:
        return None
    begin = _TO_NUMBER.match(text, 0, last.end())
    numbers = list(_LAST_NUMBER.finditer(text, begin.end() if begin else 0))
    if not _GROUPED_NUMBER.fullmatch(numbers[-1][0]):
        return None
    start, end = numbers[-1].span()
    number, before, after = numbers[-1][0], text[max(0, start - 4 * CONTEXT_CHARS) : start], text[end:]
    sign = at_end(_SIGN, before, 10)
    before = before[: sign.start()] if sign else before
    plain = re.sub(r"\\?[$€£]\s*$", "", before)[-40:]
    # It numbers an item.
    if after[:1] == ")" and before.count("(") <= before.count(")"):
        return None
    # A computed one, as in `7 - 1 = 6th place`, is a value.
    if _ORDINAL.match(after) and not plain.rstrip().endswith("="):
        return None
    if _PART_OF_NUMBER.search(plain) or _NUMBER_GOES_ON.match(after.removeprefix("**")):
        return None
    is_rounded = "." in number or "/" in number
    if changes_before(before, is_rounded=is_rounded) or _AFTER.match(after[:CONTEXT_CHARS].replace("’", "'")):
        return None
    if not is_stated(before, number, after[:CONTEXT_CHARS]):
        return None
    return f"{'-' if sign else ''}{number}"


def changes_before(text: str, *, is_rounded: bool = False, labels: bool = True) -> bool:
    """Return whether words before a number deny it, doubt it, or make it a bound, an argument or a mere label.

    is_rounded: the number may be about the value. labels: `line 5` labels a line.
    """
    if follows_equals(text):
        return False
    text = text[-CONTEXT_CHARS:].replace("’", "'")
    if not is_rounded and at_end(_ROUNDED, text, 30):
        return True
    match = at_end(_BEFORE, text, 80)
    is_label = match is not None and match["label"] is not None
    return (match is not None and not (is_label and (not labels or _LABELLED.search(text)))) or bool(
        DENIED.search(clause_of(text))
    )


# Words and signs that announce an answer, in an answer of its own.
_ANNOUNCED = re.compile(
    r"(?:(?:so|thus|hence|therefore|then|and|finally)\b,?\s*)*(?:(?:it|that|this|ans|(?:the|my|our)?\s*"
    r"(?:(?:final|correct|right|only)\s+)?(?:answer|result|solutions?|value))\s*(?:(?:is|are|was|be|equals)\b\s*:?|[:=])\s*)",
    re.IGNORECASE,
)
_HEAD = re.compile(
    r"(?:(?:[A-Za-z][a-z']+|[IaA]|(?<=of )[a-zA-Z]+|[a-zA-Z](?=\s+(?:is|are|equals|has)\b))[,:]?\s+)*"
    r"[A-Za-z][a-z']+[,:]?\s+"
    r"(?=[-+$€£\d\\\[{]|\((?=[-\d\\]|\w\s*[,)])|[a-zA-Z](?![a-zA-Z]))"
)
_ANNOUNCING_WORDS = (
    "is are was were equals has have had get gets takes took costs earns pays needs makes made answer total "
    "sum result therefore thus hence so there he she it they we i you both the all approximately about ans "
    "exactly precisely"
)
_ANNOUNCING = frozenset(_ANNOUNCING_WORDS.split())
# An amount, not the argument of a sum.
_AMOUNT_OF = re.compile(r"\ba\s+(?:[a-z]+\s+)+of\s*$|\btotal\s+of\s*$|(?<!\bof)\s+$", re.IGNORECASE)
_ONLY = re.compile(r"^(?:only|just|exactly)\s+(?!.*\s(?:and|or)\s)|,?\s+only$", re.IGNORECASE)
# A remark without numbers but those of steps, after an answer.
_REMARK = re.compile(
    r"(?<=[\d}])\s*[(\[]((?:[^\W\d_]{2,}[\s,.'-]*|(?:step|eq|line|part|case)\w*\.?\s*\(?\d+\)?)+)[)\]]$"
)
AGAIN = re.compile(r",?\s+(?:i\.\s?e\.|that is(?: to say)?,|in other words|(?:or )?equivalently|namely)[,:]?\s+")
_STATES = frozenset(["is", "are", "was", "were"])
_ARROW = re.compile(r"^(?:.*[=<>].*)?\\(?:to|therefore)(?![a-zA-Z])\s*(?=\S)")
_ABOUT = re.compile(r"^\\approx\s*(?=-?\d*\.\d)")
_AND_PART = re.compile(r"(-?\d+) and ([a-z].*)")
# A letter that stands for any integer.
_FOR_INTEGERS = re.compile(
    r"(?<=[^\s,(])[\s,(]*(?:(?:where|with|and|for)\s+)?(?:(?:all|any|every|some|each)\s+)?(?:integers?\s+([a-zA-Z])"
    r"|([a-zA-Z])\s+(?:is\s+)?(?:an|any)\s+integer|([a-zA-Z])\s*\\in\s*(?:\\mathbb\s*\{?\s*Z\s*\}?|Z))\s*\)?$"
)
_VALUE_AND_WORDS = re.compile(
    r"(?P<value>(?:(?:[a-zA-Z]+|\\[a-z]+)\s*=)?\s*-?[$€£]?\s*(?:\d[\d.,/ ]*)?"
    r"(?:\\frac\s*\{\d+\}\s*\{\d+\})?(?<=[\d}.])\s?%?)"
    r"(?:\s*(?P<words>(?!(?:st|nd|rd|th)\b)[a-zA-Z][a-zA-Z\s'.-]*(?:(?<=the )\d+ [a-zA-Z\s'.-]*|\d+ [a-z]+)?))?"
    r"(?P<repeat>\s*\((?:i\.e\.,?\s|that is,?\s)?(?P<said>[^()]*)\))?"
    r"(?P<clause>,?\s+(?:since|because)\b[^,;]*|,\s*(?:(?:as|which\s+is\s+(?:less|more|[a-z]+er)\s+than)\b[^,;=]*"
    r"|(?:which|so|for)\b[^\d]*))?[.\s]*"
)


def plain_answer(text: str) -> str:
    """Return an answer in canonical spelling without the words around it: `The answer is 12 (twelve)` → `12`.

    Numbers in words become digits. Words stay that say more than which number it is, and units do.
    """
    if "\\" in text:
        text = _FOR_INTEGERS.sub(_for_integers, _ARROW.sub("", _ABOUT.sub("", text)))
    if not re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{2}", text):
        return text
    text = _NOT_ANOTHER.sub("", _ONLY.sub("", text))
    if (remark := _REMARK.search(text)) and not _words_of(remark[1]) & CHANGED:
        text = text[: remark.start()]
    if match := _ANNOUNCED.match(text):
        text = text[match.end() :].lstrip()
    if (head := _HEAD.match(text)) and _announces(head[0], text[head.end() :]):
        text = text[head.end() :]
    if (whole := _AND_PART.match(text)) and (part := spelled_number(whole[2])) and part[0].startswith("\\frac"):
        return join_digits(f"{whole[1]} {part[0]}{part[1]}")
    number = spelled_number(text)
    if number and number[0].startswith("\\frac"):
        number = number[0], re.sub(r"^\s+an?(?=\s)", "", number[1])
    return (_without_words("".join(number)) if number else None) or _without_words(text) or text


# A number or letter that not every reader knows may have this: `seventy-two`, `“72”`, `1 234`.
_SPELLED = re.compile(r"[^\x00-\x7f]|[~*_'\"`]|\d(?:[xX ]|\\[, \\]|\{\})|(?<![\\a-zA-Z])[a-zA-Z]{2}")


def plain_spelling(text: str) -> str | None:
    """Return the plain spelling of a number or letter, None for other texts and for one that is spelled so."""
    if len(text) > 40 or not _SPELLED.search(text):
        return None
    plain = plain_answer(canonical(text))
    number = parse_number(plain)
    plain = str(number.value.numerator) if number and number.value.denominator == 1 else plain
    return plain if plain != text and (number or re.fullmatch("[A-Z]", plain)) else None


def _words_of(text: str) -> set[str]:
    return {*re.findall("[a-z']+", text.casefold())}


def _for_integers(words: re.Match[str]) -> str:
    return rf", {words[1] or words[2] or words[3]} \in \mathbb{{Z}}"


def _announces(head: str, rest: str) -> bool:
    words = _words_of(head)
    announcing = words & _ANNOUNCING and not words <= _STATES
    if not ((announcing and _AMOUNT_OF.search(head)) or head.rstrip().endswith(":")) or DENYING - {"both"} & words:
        return False
    is_rounded = "." in rest or "/" in rest or "frac" in rest
    return not changes_before(head, is_rounded=is_rounded, labels=rest[0].isdigit())


def _without_words(text: str) -> str | None:
    """Return a number with its unit and without other words, None if there are none, or they change it."""
    match = _VALUE_AND_WORDS.fullmatch(text)
    if match is None or not re.search(r"\d", match["value"]):
        return None
    value, words = match["value"].strip(), match["words"]
    if match["repeat"] and counted_unit(match["said"]) is None:
        digits, rest = spelled_number(match["said"].strip()) or (match["said"].strip(), "")
        if rest.strip() or digits != re.sub("^.*=|[$€£, ]", "", value):
            return None
    if match["clause"] and DENYING & set(match["clause"].split()):
        return None
    # The spelling of a unit, and the space before it, have a meaning.
    if not words or unit_of(words):
        return text[: match.end("words") if words else match.end("value")].strip()
    unit = counted_unit(words)
    return None if unit is None else f"{value} {unit}".strip()
