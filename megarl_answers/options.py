"""Define how answers are found and compared: the modes `fix`, `doc` and `ref`, and the results of a comparison."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, TypeAlias

Mode: TypeAlias = Literal["fix", "doc", "ref"]

MAX_ANSWER_CHARS = 512


class Equality(StrEnum):
    """The result of comparing two answers.

    `UNPARSED`: the texts differ and their meaning could not be parsed; this scores as wrong but is counted separately.
    """

    EQUAL = "equal"
    DIFFERENT = "different"
    UNPARSED = "unparsed"

    @classmethod
    def of(cls, equal: bool) -> "Equality":
        return cls.EQUAL if equal else cls.DIFFERENT


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Settings of how answers are found and compared. The defaults are the mode `fix`; `MODES` has the other modes.

    boxes: names of LaTeX commands whose argument is an answer.
    bare_box: `boxes` also count without a backslash before them.
    accept_unclosed: a box whose brace is not closed extends to the end of its line.
    join_boxes: boxes with nothing but commas and the like between them are one answer, a list.
    join_lines: a boxed answer may span lines; otherwise only its first line is used.
    last_math, last_number: use the last formula, or number, if there is neither a box nor "the answer is".
    skip_thinking: only text after the last thought counts.
    textual: drop units, percent signs and the like from the text (see `spelling.normalise`), and compare all numbers
        except integers, fractions included, within the tolerance.
    normalise_gold: the gold answer is normalised like other answers.
    percent_factors: numbers that differ by a factor of 100 are equal, with a percent sign or without.
    ignore_brackets: `[1,2]` equals `(1,2)`.
    none_equals_none: a missing answer equals a missing gold answer.
    """

    boxes: tuple[str, ...] = ("boxed", "fbox", "framebox")
    bare_box: bool = False
    accept_unclosed: bool = False
    join_boxes: bool = True
    join_lines: bool = True
    last_math: bool = False
    last_number: bool = False
    skip_thinking: bool = True
    textual: bool = False
    normalise_gold: bool = True
    percent_factors: bool = False
    ignore_brackets: bool = False
    none_equals_none: bool = False


_REF = AnswerOptions(
    boxes=("boxed",),
    bare_box=True,
    accept_unclosed=True,
    join_boxes=False,
    join_lines=False,
    last_number=True,
    skip_thinking=False,
    textual=True,
    normalise_gold=False,
    percent_factors=True,
    ignore_brackets=True,
    none_equals_none=True,
)
_DOC = replace(_REF, boxes=("boxed", "fbox"), last_math=True)

MODES: Mapping[Mode, AnswerOptions] = {"fix": AnswerOptions(), "doc": _DOC, "ref": _REF}
