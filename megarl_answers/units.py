"""Parse numbers with units. An answer may leave out the gold answer's unit, but must not have a different unit."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from megarl_answers.numbers import Number, parse_number

PERCENT = "%"

_SPELLINGS: Mapping[str, str] = {
    spelling: unit
    for unit, spellings in {
        PERCENT: ("%", "percent", "per cent", "percentage", "pct", "percentage point"),
        "degree": ("degree", "deg", "度", "градус", "grad"),
        "$": ("$", "dollar", "usd", "us dollar"),
        "€": ("€", "euro", "eur"),
        "£": ("£", "pound sterling", "gbp"),
        "¥": ("¥", "yen", "jpy"),
        "₹": ("₹", "rupee", "inr"),
        "元": ("元", "yuan", "cny", "rmb"),
        "cent": ("cent", "¢"),
        "mm": ("mm", "millimeter", "millimetre", "毫米", "мм"),
        "cm": ("cm", "centimeter", "centimetre", "厘米", "см", "centímetro", "centimètre"),
        "m": ("m", "meter", "metre", "米", "м", "metro", "mètre"),
        "km": ("km", "kilometer", "kilometre", "千米", "公里", "км", "kilómetro", "kilomètre"),
        "inch": ("inch", "inche", "in"),
        "foot": ("foot", "feet", "ft"),
        "mile": ("mile", "mi"),
        "g": ("g", "gram", "gramme", "克", "г"),
        "kg": ("kg", "kilogram", "kilo", "千克", "公斤", "кг"),
        "s": ("s", "sec", "second", "秒", "секунда", "секунд", "segundo", "seconde", "sekunde"),
        "min": ("min", "minute", "分钟", "分", "минута", "минут", "minuto"),
        "h": ("h", "hr", "hour", "小时", "час", "часов", "hora", "heure", "stunde", "stunden"),
        "day": ("day", "天", "日", "день", "дней", "día", "jour", "tag", "tage"),
        "week": ("week", "wk", "周"),
        "year": ("year", "yr", "年", "год", "лет", "año", "an", "jahr"),
        "l": ("l", "liter", "litre", "升", "л"),
        "ml": ("ml", "milliliter", "millilitre", "毫升", "мл"),
        "cm^2": ("平方厘米",),
        "m^2": ("平方米",),
        "cm^3": ("cc", "立方厘米"),
        "m^3": ("立方米",),
        "km h^-1": ("kmh", "kph", "千米/时"),
        "mile h^-1": ("mph",),
        "m s^-1": ("米/秒",),
        "°C": ("degree c", "degree celsius", "celsius"),
        "°F": ("degree f", "degree fahrenheit", "fahrenheit"),
    }.items()
    for spelling in spellings
}
# Names of what is counted. Another name is read as a product of letters, so that no text after a number goes unread.
_COUNTED_WORDS = (
    "apple pear orange egg cookie candy pizza cake slice cup bottle box bag basket card coin stamp ticket "
    "book page pencil pen marble ball toy flower tree plant animal dog cat bird fish chicken cow horse car "
    "bus train boat house room table chair shirt boy girl student teacher friend worker player member team "
    "game point goal vote way unit piece item number integer solution root term digit triangle square circle "
    "side edge face vertex line segment angle step pound ounce gallon quart pint yard acre month decade hertz "
    "newton joule watt volt ampere ohm mole kelvin radian parsec"
)
_IRREGULAR = (
    "people-person person-person children-child child-child men-man man-man women-woman woman-woman geese-goose "
    "mice-mouse sheep-sheep lb-pound lbs-pound oz-ounce candies-candy vertices-vertex yd-yard rad-radian rads-radian"
)
_COUNTED: Mapping[str, str] = {
    plural: word for word in _COUNTED_WORDS.split() for plural in (word, f"{word}s", f"{word}es")
} | dict(re.findall(r"(\w+)-(\w+)", _IRREGULAR))
# Units of one letter, which are variables unless they stand upright, or after a space and a number.
_OF_LETTERS = "m meter s second g gram h hour l liter L liter N newton J joule W watt V volt A ampere K kelvin"
UNIT_OF_LETTER: Mapping[str, str] = dict(re.findall(r"(\w) (\w+)", _OF_LETTERS))
_PHYSICAL = re.compile("[numkMGT]?(?:m|g|s|eV|Hz|N|J|W|V|A|K|Pa|mol|pc|L|erg|dyn|cm|mm|km|min|h|hr|ohm|rad|Wh|Ah|Nm)")
# One factor of a compound unit: square feet, ft^2, m2, s^{-1}, / hour, per second squared.
_FACTOR = re.compile(
    r"\s*(?P<per>/|(?:per|an?)\b)?\s*(?:(?P<before>square|sq|cubic|cu)\b\.?\s*)?(?P<name>[^\W\d_]+|%)\.?"
    r"(?:\s*\^\s*(?:\{\s*(?P<braced>-?\d)\s*\}|(?P<power>-?\d))|(?P<digit>[23])(?!\d)|\s+(?P<after>squared|cubed)\b)?"
    r"(?:\s*\\cdot)?\s*"
)
_POWER_WORDS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
MAX_FACTORS = 6
SCALES: Mapping[str, int] = {"dozen": 12, "hundred": 100} | {
    word: 10**power for word, power in (("thousand", 3), ("million", 6), ("billion", 9), ("trillion", 12))
}
MEASURES = frozenset(_SPELLINGS.values())
_STANDARD = frozenset({*_SPELLINGS.values(), *_COUNTED.values()})
NOT_UNITS = frozenset({"in", "an"})
# The degrees of sin 60° belong to the angle.
_ANGLE_OF_FUNCTION = re.compile(
    r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])(?:\s*\^\s*(?:\{[^{}]*\}|\d))?\s*\(?-?[\d.]+$"
)
_CURRENCY = re.compile(r"^(-?)\s*(?:US\s*(?=\$))?([$€£¥₹]|(?:USD|EUR|GBP)(?=\s*\d))\s*")
_BEFORE_UNIT = re.compile(r"(?:[\d.})]|\\pi)(?=\s*(?:[%$€£¥₹¢]|[^\W\d_]))")
_UNIT_TEXT = re.compile(r"(?:[^\d=,;<>\\()|+{}^_]|\^\s*(?:\{\s*-?\d\s*\}|-?\d)|\\cdot|(?<=[a-z])[23](?!\d))+")
_UNIT_FRACTION = re.compile(
    r"\s*\\frac\s*\{( ?[a-zA-Z]{2,}|(?: [a-zA-Z] ))\s*\}\s*\{\s*([a-zA-Z][^{}]*(?:\{-?\d\}\s*)?)\}$"
)


class Quantity(NamedTuple):
    """An answer split into its body and its unit, the unit in a standard spelling; the unit is "" if there is none."""

    body: str
    unit: str


def split_unit(text: str) -> Quantity:
    r"""Split an answer into body and unit: `5 cm` → (`5`, `cm`), `$5` → (`5`, `$`), `2\pi` → (`2\pi`, ``).

    Letters directly after a number may be a variable: `5x` has no unit, `5 m` has one.
    """
    if (match := _CURRENCY.match(text)) and parse_number(text[match.end() :]):
        return Quantity(match[1] + text[match.end() :].strip(), _base(match[2]))
    text = _UNIT_FRACTION.sub(r" \1/\2", text)
    for match in list(_BEFORE_UNIT.finditer(text))[-MAX_FACTORS:]:
        body, words = text[: match.end()], text[match.end() :]
        if _UNIT_TEXT.fullmatch(words) and (unit := _trailing_unit(body, words)):
            return Quantity(body.strip(), unit)
    return Quantity(text, "")


def _trailing_unit(body: str, words: str) -> str:
    """Return the unit that words after a body are, in its standard spelling, "" if they are not a unit."""
    is_spaced, words = words[0].isspace(), words.strip()
    is_number = parse_number(body) is not None
    scale, _, rest = words.casefold().partition(" ")
    scale = scale if scale in SCALES else scale.removesuffix("s")
    if scale in SCALES and is_number:
        unit = unit_of(rest) if rest else ""
        return f"{scale} {unit}".strip() if unit or not rest else ""
    unit = unit_of(words)
    if unit == "degree" and _ANGLE_OF_FUNCTION.search(body):
        return ""
    if not words.isascii() or words in "%$":
        return unit
    # A single letter may be a variable, and symbols of physics products of variables.
    if words.casefold() in NOT_UNITS or (len(words) == 1 and not (is_spaced and is_number)):
        return ""
    return unit if is_spaced or is_known(unit) else ""


def unit_of(words: str) -> str:
    """Return the standard spelling of a unit or a product of units (`meters` → `m`, `miles per hour` → `mile h^-1`), ""
    for other words.

    Symbols of physics keep their case: mW is not MW.
    """
    words = " ".join(words.split()).strip(".")
    powers: dict[str, int] = {}
    sign, end = 1, 0
    if known := _base(words):
        return known
    for _ in range(MAX_FACTORS):
        match = _FACTOR.match(words, end)
        unit = _base(match["name"]) if match else ""
        if match is None or not unit or (match["per"] and end == 0):
            return ""
        # A word, unless something shows that it is an inch.
        if match["name"] == "in" and not (match["per"] or match["before"] or match["power"] or match["braced"]):
            return ""
        sign = -1 if match["per"] else sign
        power = int(match["braced"] or match["power"] or match["digit"] or 1)
        power *= _POWER_WORDS.get(match["before"], 1) * _POWER_WORDS.get(match["after"], 1)
        # The units of a spelling such as mph are multiplied in.
        for factor in unit.split():
            name, _, own = factor.partition("^")
            powers[name] = powers.get(name, 0) + sign * power * int(own or 1)
        end = match.end()
        if end == len(words):
            ordered = sorted(powers.items(), key=lambda item: (-item[1], item[0]))
            return " ".join(name if power == 1 else f"{name}^{power}" for name, power in ordered if power)
    return ""


def _base(word: str) -> str:
    word = UNIT_OF_LETTER.get(word, word)
    folded = word.casefold().replace("degrees ", "degree ")
    known = _SPELLINGS.get(folded) or _SPELLINGS.get(folded.removesuffix("s")) or _COUNTED.get(folded)
    return known or (word if _PHYSICAL.fullmatch(word) else "")


def is_known(unit: str) -> bool:
    """Return whether all factors of a unit are in the lists, so that none is a bare symbol of physics."""
    return all(factor.partition("^")[0] in _STANDARD or factor in _STANDARD for factor in unit.split())


def parse_quantity(text: str) -> tuple[Number, str] | None:
    """Parse a number and its unit, multiplied by words such as `million`; None if the body is not a number."""
    body, unit = split_unit(text)
    number = parse_number(body)
    if number is None:
        return None
    scale, _, rest = unit.partition(" ")
    if scale not in SCALES:
        return number, unit
    scaled = Number(value=number.value * SCALES[scale], rounded=number.rounded, scientific=number.scientific)
    return scaled, rest
