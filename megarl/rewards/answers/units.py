"""Numbers with units: an answer may leave the unit out, but must not have another one."""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from megarl.rewards.answers.numbers import Number, are_close, parse_number

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
_SCALES: Mapping[str, int] = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NOT_UNITS = frozenset({"and", "or", "to", "mod", "in", "i", "e", "x", "y", "z", "n", "k", "if", "no"})
_CURRENCY = re.compile(r"^(-?)\s*([$€£¥])\s*")
_TRAILING = re.compile(
    r"^(?P<body>.*?(?:[\d.})]|\\pi))\s*(?P<unit>%|[$€£¥¢]|[^\W\d_][^\d=,;<>\\()|+]*(?:\^\s*\{?\s*-?\d\s*\}?)?|cm[23]|m[23])$"
)


class Quantity(NamedTuple):
    """`unit` is "" if there is none, else its one spelling, or the words as they are."""

    body: str
    unit: str


def split_unit(text: str) -> Quantity:
    r"""`5 cm` → (`5`, `cm`), `$5` → (`5`, `$`), `50%` → (`50`, `%`), `2\pi` → (`2\pi`, ``)."""
    if (match := _CURRENCY.match(text)) and parse_number(text[match.end() :]):
        return Quantity(match[1] + text[match.end() :].strip(), match[2])
    match = _TRAILING.match(text)
    if match is None:
        return Quantity(text, "")
    body, words = match["body"].strip(), match["unit"]
    unit = _unit(words)
    spaced = text[len(match["body"]) : match.start("unit")] != ""
    if not unit or not _may_be_unit(words.strip(), spaced=spaced, of_number=parse_number(body) is not None):
        return Quantity(text, "")
    return Quantity(body, unit)


def _may_be_unit(words: str, *, spaced: bool, of_number: bool) -> bool:
    """Letters after a number may be a variable: `5x` has no unit, `5 m` has one."""
    if not words.isascii() or words in "%$":
        return True
    parts = re.split(r"[\s/.^*{}-]+", words.lower())
    if parts[0] in _NOT_UNITS:
        return False
    known = _unit(words) in _SPELLINGS.values()
    if len(words) == 1:
        return known and spaced and of_number
    return known or (spaced and len(parts[0]) > 1)


def _unit(words: str) -> str:
    """The one spelling of a unit."""
    words = re.sub(r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", words.strip().strip(".").casefold())
    words = " ".join(words.split())
    return _SPELLINGS.get(words) or _SPELLINGS.get(words.removesuffix("s")) or words.removesuffix("s")


def parse_quantity(text: str) -> tuple[Number, str] | None:
    """A number and its unit; `5 million` is a number. None if the text without its unit is no number."""
    body, unit = split_unit(text)
    number = parse_number(body)
    if number is None:
        return None
    scale, _, rest = unit.partition(" ")
    if scale not in _SCALES:
        return number, unit
    scaled = Number(value=number.value * _SCALES[scale], rounded=number.rounded, scientific=number.scientific)
    return scaled, _unit(rest)


def equal_quantities(a: tuple[Number, str], b: tuple[Number, str]) -> bool:
    """Same number and no contradicting unit; a percentage also equals its value as a plain number, 50% = 0.5."""
    (number_a, unit_a), (number_b, unit_b) = a, b
    if unit_a and unit_b:
        return unit_a == unit_b and are_close(number_a, number_b)
    if are_close(number_a, number_b):
        return True
    if PERCENT in (unit_a, unit_b):
        percent, plain = (number_a, number_b) if unit_a == PERCENT else (number_b, number_a)
        return are_close(Number(value=percent.value * Fraction(1, 100), rounded=percent.rounded), plain)
    return False
