"""How answers are found and compared: what the modes `fix`, `doc` and `ref` mean."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Mode: TypeAlias = Literal["fix", "doc", "ref"]

MAX_ANSWER_CHARS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """The defaults are the mode `fix`; see `MODES` for the others.

    boxes: commands whose argument is an answer, and whether a backslash must precede them (`bare_box`: need not).
    accept_unclosed: text after an unbalanced brace counts up to the end.
    join_lines: a boxed answer may span lines; otherwise its first line counts.
    last_math, last_number: what counts if there is neither a box nor "the answer is".
    skip_thinking: only text after the last `</think>` counts.
    textual: drop units, percent signs and the like from the text, as `normalise.normalise` lists, and take any two
        numbers but integers for equal within the tolerance, also fractions.
    normalise_gold: gold is normalised as answers are.
    percent_factors: numbers that differ by a factor of 100 are equal, with a percent sign or without.
    ignore_brackets: `[1,2]` equals `(1,2)`.
    none_equals_none: no answer equals no gold.
    """

    boxes: tuple[str, ...] = ("boxed", "fbox", "framebox")
    bare_box: bool = False
    accept_unclosed: bool = False
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
