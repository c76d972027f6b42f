"""Parse numbers with units. An answer may leave out the gold answer's unit, but must not have a different unit."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from megarl.rewards.answers.numbers import Number, parse_number

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
        "cm^2": ("cm^2", "cm2", "sq cm", "square centimeter", "square centimetre", "平方厘米"),
        "m^2": ("m^2", "m2", "sq m", "square meter", "square metre", "平方米"),
        "cm^3": ("cm^3", "cm3", "cubic centimeter", "cubic centimetre", "cc", "立方厘米"),
        "m^3": ("m^3", "m3", "cubic meter", "cubic metre", "立方米"),
        "km/h": ("km/h", "kmh", "kph", "kilometers per hour", "千米/时"),
        "mph": ("mph", "miles per hour", "mile per hour", "miles/hour"),
        "m/s": ("m/s", "m s^-1", "meters per second", "metres per second", "米/秒"),
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
    "newton joule watt volt ampere ohm mole kelvin radian rad parsec"
)
_COUNTED: Mapping[str, str] = {
    plural: word for word in _COUNTED_WORDS.split() for plural in (word, f"{word}s", f"{word}es")
} | {
    "people": "person",
    "person": "person",
    "children": "child",
    "child": "child",
    "men": "man",
    "man": "man",
    "women": "woman",
    "woman": "woman",
    "geese": "goose",
    "mice": "mouse",
    "sheep": "sheep",
    "lb": "pound",
    "lbs": "pound",
    "oz": "ounce",
    "candies": "candy",
    "vertices": "vertex",
    "square unit": "square unit",
    "square units": "square unit",
    "sq unit": "square unit",
    "sq units": "square unit",
    "cubic unit": "cubic unit",
    "cubic units": "cubic unit",
    "square inches": "inch^2",
    "square feet": "foot^2",
    "square miles": "mile^2",
    "square yards": "yard^2",
    "cubic inches": "inch^3",
    "cubic feet": "foot^3",
    "cubic yards": "yard^3",
}
# Units of one letter, which are variables unless they stand upright, or after a space and a number.
UNIT_OF_LETTER: Mapping[str, str] = {
    "m": "meter",
    "s": "second",
    "g": "gram",
    "h": "hour",
    "l": "liter",
    "L": "liter",
    "N": "newton",
    "J": "joule",
    "W": "watt",
    "V": "volt",
    "A": "ampere",
    "K": "kelvin",
}
_PHYSICAL = re.compile(
    r"(?:[numkMGT]?(?:m|g|s|eV|Hz|N|J|W|V|A|K|Pa|mol|pc|L|erg|dyn|cm|mm|km|min|h|hr|ohm|rad|Wh|Ah|Nm)"
    r"(?:\s*\^\s*\{?\s*-?\d\s*\}?)?(?:[\s/]+|$))+"
)
_SCALES: Mapping[str, int] = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
MEASURES = frozenset(_SPELLINGS.values())
_STANDARD = frozenset({*_SPELLINGS.values(), *_COUNTED.values()})
_NOT_UNITS = frozenset({"and", "or", "to", "mod", "in", "i", "e", "x", "y", "z", "n", "k", "if", "no", "minus"})
# The degrees of sin 60° belong to the angle.
_ANGLE_OF_FUNCTION = re.compile(
    r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])(?:\s*\^\s*(?:\{[^{}]*\}|\d))?\s*\(?-?[\d.]+$"
)
_CURRENCY = re.compile(r"^(-?)\s*([$€£¥₹])\s*")
_TRAILING = re.compile(
    r"^(?P<body>.*?(?:[\d.})]|\\pi))\s*(?P<unit>%|[$€£¥₹¢]|[^\W\d_][^\d=,;<>\\()|+]*(?:\^\s*\{?\s*-?\d\s*\}?)?|cm[23]|m[23])$"
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
        return Quantity(match[1] + text[match.end() :].strip(), match[2])
    match = _TRAILING.match(text)
    if match is None:
        return Quantity(text, "")
    body, words = match["body"].strip(), match["unit"].strip()
    unit = _unit(words)
    if unit == "degree" and _ANGLE_OF_FUNCTION.search(body):
        return Quantity(text, "")
    is_spaced = text[len(match["body"]) : match.start("unit")] != ""
    first = re.split(r"[\s/.^*{}-]+", words.lower())[0]
    scale, _, rest = unit.partition(" ")
    is_number = parse_number(body) is not None
    if scale in _SCALES and is_number:
        is_unit = not rest or _is_known(_unit(rest))
    elif words.isascii() and words not in "%$":
        is_known = first not in _NOT_UNITS and (
            _is_known(unit) or (is_spaced and _PHYSICAL.fullmatch(words) is not None)
        )
        # A single letter may be a variable.
        is_unit = is_known and (len(words) > 1 or (is_spaced and is_number))
    else:
        is_unit = _is_known(unit)
    return Quantity(body, unit) if unit and is_unit else Quantity(text, "")


def _unit(words: str) -> str:
    """Return the standard spelling of a unit (`meters` → `m`); from an unknown word, only a plural s is removed.

    Symbols of physics keep their case: mW is not MW.
    """
    words = re.sub(r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", words.strip().strip("."))
    words = " ".join(words.split())
    words = UNIT_OF_LETTER.get(words, words)
    folded = words.casefold()
    known = _SPELLINGS.get(folded) or _SPELLINGS.get(folded.removesuffix("s")) or _COUNTED.get(folded)
    return known or (words if _PHYSICAL.fullmatch(words) else folded.removesuffix("s"))


def _is_known(unit: str) -> bool:
    """Return whether a unit or its parts, as in `mile per hour`, are in the lists."""
    parts = re.split(r"\s*(?:/|\bper\b|\ba\b)\s*", re.sub(r"\^-?\d", "", unit))
    return unit in _STANDARD or all(_unit(part) in _STANDARD for part in parts)


def parse_quantity(text: str) -> tuple[Number, str] | None:
    """Parse a number and its unit, multiplied by words such as `million`; None if the body is not a number."""
    body, unit = split_unit(text)
    number = parse_number(body)
    if number is None:
        return None
    scale, _, rest = unit.partition(" ")
    if scale not in _SCALES:
        return number, unit
    scaled = Number(value=number.value * _SCALES[scale], rounded=number.rounded, scientific=number.scientific)
    return scaled, _unit(rest)
