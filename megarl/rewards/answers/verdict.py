"""Outcomes of a comparison."""

from enum import StrEnum


class Verdict(StrEnum):
    """`UNPARSED`: the texts differ and what they mean was not found out; it scores as wrong, but is counted apart."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNPARSED = "unparsed"

    @classmethod
    def of(cls, equal: bool) -> "Verdict":
        return cls.EQUAL if equal else cls.DIFFERENT
