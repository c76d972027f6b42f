"""Describe the turns of a conversation, and which follow which, where they do not follow each other one by one.

Tokens say on which path a turn stands (`megarl.types.forks`). That is not the turn that led to it: a history that was
written anew shares few tokens with the turn that it goes on from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Names of the quantities that hold, on each token of a turn, its number, that of the turn which it follows (-1: none),
# and that of the first turn which was written beside it, from the same context (its own if there is none).
TURN, AFTER, FIRST_TRY = "turn", "after_turn", "first_try"

# Stands in texts where an image does.
IMAGE_MARK = "<image>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat: who speaks, and the text; if given, a speaker's or tool's name, and a result's call.

    images: what each `IMAGE_MARK` in its text stands for, if there are any: an image's bytes, its data URL, or the
    digest of one that the run has; else a mark is text.
    """

    role: str
    content: str
    name: str = ""
    tool_call_id: str = ""
    images: tuple[str | bytes, ...] = ()

    def as_dict(self) -> dict[str, str]:
        shown = {"role": self.role, "content": self.content}
        if self.name:
            shown["name"] = self.name
        if self.tool_call_id:
            shown["tool_call_id"] = self.tool_call_id
        return shown

    def parts(self, image: Callable[[str | bytes], Mapping[str, object]]) -> list[Mapping[str, object]]:
        """Return the text as a list of parts in OpenAI's form, with what `image` makes of each image.

        >>> Message(role="user", content="see <image>", images=("a",)).parts(lambda digest: {"image": digest})
        [{'type': 'text', 'text': 'see '}, {'image': 'a'}]
        """
        texts = self.content.split(IMAGE_MARK) if self.images else [self.content]
        parts: list[Mapping[str, object]] = []
        for i, text in enumerate(texts):
            parts += [image(self.images[i - 1])] if i else []
            parts += [{"type": "text", "text": text}] if text else []
        return parts


class Tries(NamedTuple):
    """The `num` turns from `first` on, which follow the turn `after` (-1: none), each by itself.

    Several were written side by side from the same context, before anything read them. cut: those that a limit ended.
    place: how many turns of other contexts were written at the same time, and stand before these.
    """

    first: int
    num: int
    after: int
    cut: tuple[int, ...] = ()
    place: int = 0

    @property
    def turns(self) -> range:
        """Return the numbers of the turns.

        >>> Tries(2, 3, 0).turns
        range(2, 5)
        """
        return range(self.first, self.first + self.num)


class TurnPlace(NamedTuple):
    """The place of a turn: the turn that it follows (-1: none), and the first of those that were written beside it."""

    after: int
    first_try: int


def turn_places(num_turns: int, tries: Sequence[Tries]) -> list[TurnPlace]:
    """Return the places of all turns; a turn that no entry of `tries` has follows the one before it.

    If the one before it is the last of several tries, nothing says which of them it goes on from. It may depend on all,
    so these tries then count as written one after the other.

    >>> turn_places(4, [Tries(1, 2, 0), Tries(3, 1, 1)])
    [TurnPlace(after=-1, first_try=0), TurnPlace(after=0, first_try=1), TurnPlace(after=0, first_try=1), \
TurnPlace(after=1, first_try=3)]
    >>> turn_places(4, [Tries(1, 2, 0)])[2:]
    [TurnPlace(after=1, first_try=2), TurnPlace(after=2, first_try=3)]
    """
    places = [TurnPlace(turn - 1, turn) for turn in range(num_turns)]
    named = {each.first for each in tries}
    for each in tries:
        follower = each.first + each.num
        if each.num == 1 or follower in named or follower >= num_turns:
            for turn in each.turns:
                places[turn] = TurnPlace(each.after, each.first)
        else:
            places[each.first] = TurnPlace(each.after, each.first)
    return places


def try_of(turn: int, tries: Sequence[Tries]) -> int:
    """Return the index of a turn among those that were written at the same time, 0 if there are none.

    >>> try_of(3, [Tries(1, 3, 0)])
    2
    >>> try_of(6, [Tries(4, 1, 0), Tries(5, 2, 3, place=1)])
    2
    """
    return next((each.place + turn - each.first for each in tries if turn in each.turns), 0)
