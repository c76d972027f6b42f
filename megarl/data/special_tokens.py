"""Find text that spells a special token, or another token with which a chat template ends or begins turns.

Tokenizers take such a text for the token, whoever has written it.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.data.harmony import is_harmony
from megarl.data.roles import RoleCheck
from megarl.data.stop_tokens import answer_form
from megarl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Warnings by the kind of the mark: the key of the files, the number of rows and the first of them.
_SAID = {
    "special": "{}: {} rows spell special tokens, which the model reads as such, and not as text, the first {}; if "
    "they are only mentioned there, write them otherwise, such as with a space in them",
    "media": "{}: {} rows have marks that stand for pictures, films or sounds elsewhere, the first {}; models are "
    "trained on texts alone: leave such rows out, unless they speak of the mark itself",
}


def special_tokens_of(tokenizer: "PreTrainedTokenizerBase", written: str) -> re.Pattern[str]:
    """Return a pattern of a tokenizer's marks. `written`: what its chat template writes between turns."""
    added = tokenizer.added_tokens_decoder.values()
    # Some tokenizers do not call all marks of their template special. Words and spaces are not marks.
    own = {t.content for t in added if t.special or (t.content in written and re.search(r"[^\w\s]", t.content))}
    # The longer one of two marks that begin alike counts.
    found = sorted({*tokenizer.all_special_tokens, *own}, key=len, reverse=True)
    return re.compile("|".join(re.escape(mark) for mark in found if len(mark) > 1) or r"(?!)")


class SpelledSpecialTokens:
    """The rows of a data set whose texts spell marks, by kind. Data may mean that, so it is said, and not changed."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        form = answer_form(tokenizer)
        special = special_tokens_of(tokenizer, form.before + form.tail + form.rest + form.next_tail).pattern
        self._marks = re.compile(rf"(?P<special>{special})|(?P<media><\|?(?:image|video|audio)\|?>)")
        self._roles, self._has_channels = RoleCheck(tokenizer), is_harmony(tokenizer)
        self.num_rows, self._first = Counter[str](), dict[str, str]()

    def look(
        self, messages: Sequence[Message], where: str, *, rejected: Sequence[Message] = (), whole: bool = False
    ) -> None:
        """Look through the texts of a row; an answer may end with a mark, as its author may have written its end.

        rejected: the same chat with another answer.

        Raises DataError if the chat template does not write all of them; for `whole` see `RoleCheck.require`.
        """
        for chat in (messages, rejected) if whole and rejected else (messages,):
            self._roles.require(chat, where, whole=whole)
        for number, message in enumerate((*messages, *rejected[-1:])):
            if self._has_channels and message.role == "assistant":
                continue
            for found in self._marks.finditer(message.content):
                if found.lastgroup == "media" and message.images:
                    continue
                if message.role != "assistant" or found.end() < len(message.content):
                    kind = str(found.lastgroup)
                    self.num_rows[kind] += 1
                    self._first.setdefault(kind, f"{where}: turn {number} of the role {message.role} has {found[0]!r}")
                    return

    def warnings(self, key: str) -> list[str]:
        """Return what to say of these rows, if there are any; `key`: the setting of the files."""
        return [_SAID[kind].format(key, num, self._first[kind]) for kind, num in self.num_rows.items()]
