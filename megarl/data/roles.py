"""Check that the chat template writes the text of every turn of a data set."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from megarl.data.chat import TemplateRefusal, render_chats
from megarl.data.thoughts import marks_in, opens_twice
from megarl.errors import DataError
from megarl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROLES = ("system", "user", "assistant", "tool")
_BLANK = " "  # Precedes the role of a turn without text.
_NAMED = ":"  # Follows the role of a turn whose speaker has a name.


def require_question(messages: Sequence[Message], name: str, where: str) -> None:
    """Raise DataError for a prompt, from the column `name`, that ends with the assistant's turn, often its solution."""
    if messages and messages[-1].role == "assistant":
        raise DataError(
            f"{where}: {name} ends with the assistant's turn {messages[-1].content!r:.60}, expected a turn that the "
            "assistant answers; leave the turn out, or let train and eval continue it with data.prefill=true"
        )


def require_words(messages: Sequence[Message], where: str) -> None:
    """Raise DataError for a chat with nothing but blank turns before the first answer, besides those of the system."""
    asked = [
        turn.content for turn in takewhile(lambda turn: turn.role != "assistant", messages) if turn.role != "system"
    ]
    if asked and not any(map(str.strip, asked)):
        raise DataError(
            f"{where}: the turns before the answer are blank, expected a question; write it, or remove the row"
        )


class RoleCheck:
    """The check of the sequences of roles of a data set. One is rendered, with texts that no template changes, if a
    turn of it stands where no turn of the sequences rendered before stood (`_places`).
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._known, self._places = set[object](), set[object]()

    def require(self, messages: Sequence[Message], where: str, *, whole: bool) -> None:
        """Raise DataError if the chat template leaves out a turn's text, or opens an answer's thought a second time.

        whole: the last answer, too, is written by the template, and not encoded after its prompt.
        """
        spoken = messages if whole or messages[-1].role != "assistant" else messages[:-1]
        if not spoken:
            return
        # Blank texts cannot be lost. A template may treat thoughts apart, and adds them to answers alone.
        kinds = tuple([m.role if m.content and not m.content.isspace() else _BLANK + m.role for m in spoken])
        # Names of tools, and numbers of calls, are the template's affair: results follow their calls.
        if named := [i for i, turn in enumerate(spoken) if turn.name and turn.role != "tool"]:
            kinds = tuple(kind + _NAMED if i in named else kind for i, kind in enumerate(kinds))
        ending = (whole, marks_in(spoken[-1].content) if whole else ())
        if (kinds, ending) in self._known:
            return
        places = {(*place, ending) for place in _places(kinds)}
        if places <= self._places:
            self._known.add((kinds, ending))
            return
        # No template changes these texts; a blank one stays blank.
        probes = [
            replace(
                turn,
                content=f"Zq{i} turn" if turn.content.strip() else turn.content,
                name=f"Zq{i}speaker" if i in named else turn.name,
            )
            for i, turn in enumerate(spoken)
        ]
        opened = spoken[-1].role != "assistant"
        chats = [probes]
        if ending[1]:
            thoughts = [f"{mark}\nZq{i} thought\n" for i, mark in enumerate(ending[1])]
            chats.append([*probes[:-1], replace(probes[-1], content="\n".join([*thoughts, probes[-1].content]))])
        try:
            texts = render_chats(self._tokenizer, chats, add_generation_prompt=opened)
        except TemplateRefusal:  # Its message about the chat itself names the row.
            return
        self._require_written(messages, probes, texts[0], named, where)
        if any(f"zq{i} thought" not in texts[-1].lower() for i in range(len(ending[1]))):
            raise DataError(
                f"{where}: turn {len(spoken) - 1}: the chat template leaves out the last answer's thought, so that the "
                "model would never read it; remove it from the answer, or give the model a template that writes it"
            )
        if opens_twice(texts[-1]):
            raise DataError(
                f"{where}: turn {len(spoken) - 1}: the chat template opens a thought before the answer, which opens "
                "one, too; remove the thought's opening from the answer, or give the model another template"
            )
        self._known.add((kinds, ending))
        self._places |= places

    def _require_written(
        self, messages: Sequence[Message], probes: Sequence[Message], text: str, named: Sequence[int], where: str
    ) -> None:
        """Raise DataError if a text lacks the words of a probe, or the name of one that is `named`."""
        for i, message in enumerate(probes):
            if i in named and message.name.lower() not in text.lower():
                raise DataError(
                    f"{where}: turn {i}: the chat template leaves out name, {messages[i].name!r:.60}, so that the "
                    "model would never know who speaks; write it into the turn's text, or remove it"
                )
            # Some templates write everything in small or capital letters.
            if message.content.lower() not in text.lower():
                written = [role for role in _ROLES if role != message.role and self._writes(probes, i, role)]
                raise DataError(
                    f"{where}: turn {i}: the chat template leaves out the text of the role {message.role!r} in "
                    f"{[m.role for m in messages]!s:.200}, so that the model would never read it; rename the role, "
                    f"such as to {' or '.join(map(repr, written)) or 'one that the template writes'}, or give the "
                    "model a template that writes it"
                )

    def _writes(self, chat: Sequence[Message], turn: int, role: str) -> bool:
        """Return whether the template would write a turn of a chat under another role."""
        renamed = [*chat[:turn], replace(chat[turn], role=role), *chat[turn + 1 :]]
        try:
            (text,) = render_chats(self._tokenizer, [renamed], add_generation_prompt=chat[-1].role != "assistant")
        except TemplateRefusal:
            return False
        return chat[turn].content.lower() in text.lower()


def _places(kinds: Sequence[str]) -> Iterator[tuple[object, ...]]:
    """Yield the facts by which a template may decide to write a turn: its role, those next to it and of the last turn,
    and whether it is the first or the last turn of its role, for templates that take one system turn.
    """
    first, last = {kind: i for i, kind in reversed([*enumerate(kinds)])}, {kind: i for i, kind in enumerate(kinds)}
    around = zip(("", *kinds), kinds, (*kinds[1:], ""), strict=False)
    for i, (before, kind, after) in enumerate(around):
        yield before, kind, after, kinds[-1], first[kind] == i, last[kind] == i
