"""Text that only running a script would tell: characters of Unicode's private use stand for it within known text."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_FIRST = 0x100000
HOLE = re.compile("[\U00100000-\U0010fffd]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """A text that is not known.

    text: how the script writes it. why: why it is not known. assumed: what it is if nothing of the script's own is set
    in the environment and no arguments are given; None if that does not tell either.
    """

    text: str
    why: str
    assumed: str | None = None


@dataclass(slots=True)
class Holes:
    """All holes of a script; each is a character, and equal holes are the same character."""

    known: list[Hole] = field(default_factory=list)
    codes: dict[Hole, str] = field(default_factory=dict)

    def new(self, hole: Hole) -> str:
        """Return the character that stands for a hole."""
        if hole not in self.codes:
            self.codes[hole] = chr(_FIRST + len(self.known))
            self.known.append(hole)
        return self.codes[hole]

    def within(self, text: str) -> list[Hole]:
        """Return the holes of a text, in order."""
        return [self.known[ord(code) - _FIRST] for code in HOLE.findall(text)]

    def show(self, text: str) -> str:
        """Return a text with its holes as the script writes them."""
        return HOLE.sub(lambda match: self.known[ord(match[0]) - _FIRST].text, text)

    def assume(self, text: str) -> str | None:
        """Return a text as it is under the assumption of `Hole.assumed`, or None if that leaves it open."""
        found = self.within(text)
        if any(hole.assumed is None for hole in found):
            return None
        return HOLE.sub(lambda match: self.known[ord(match[0]) - _FIRST].assumed or "", text) if found else text

    def derive(self, written: str, inputs: Sequence[str], compute: Callable[..., str]) -> str:
        """Return `compute(*inputs)`, as a hole if one of the inputs has one.

        written: how the script writes the computation.
        """
        holes = [hole for each in inputs for hole in self.within(each)]
        if not holes:
            return compute(*inputs)
        assumed = [self.assume(each) for each in inputs]
        values = [each for each in assumed if each is not None]
        result = compute(*values) if len(values) == len(inputs) else None
        why = next((hole.why for hole in holes if result is not None or hole.assumed is None), holes[0].why)
        return self.new(Hole(text=written, why=why, assumed=None if result is None else self.assume(result)))

    def may_equal(self, one: str, other: str) -> bool | None:
        """Return whether two texts are equal, or None if their holes leave that open."""
        if one == other:
            return True
        first, second = self.assume(one), self.assume(other)
        if first is not None and second is not None:
            return first == second
        for text, fixed in ((one, second), (other, first)):
            if fixed is not None:
                # The known beginning and end of a text can rule the other out.
                parts = HOLE.split(text)
                if len(fixed) < len(parts[0]) + len(parts[-1]):
                    return False
                return None if fixed.startswith(parts[0]) and fixed.endswith(parts[-1]) else False
        return None
