"""Encode what comes between two turns of the policy, without changing the token ids of the conversation so far.

Nothing that an engine wrote is tokenised again. *Inter-turn tokens* is what the chat template writes between the end
token of an answer and the next place where the assistant speaks. It begins with a special token, with which no text
before it merges.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from megarl.data.chat import TemplateRefusal, encode_chats, render_chats
from megarl.data.harmony import END_OF_CALL, called_tool, is_harmony
from megarl.data.pieces import encode, encode_after, encode_pieces
from megarl.data.special_tokens import special_tokens_of
from megarl.data.stop_tokens import ANSWER, QUESTION, answer_form
from megarl.errors import ConfigError, DataError
from megarl.host.unicode import readable
from megarl.types import Message
from megarl.types.forks import num_common

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A text that no template writes itself, and that none changes.
_REPLY = Message(role="user", content="Zq3 reply")


class InterTurnTokens:
    """The inter-turn tokens of one tokenizer's chat template.

    It is the same whatever the conversation: it is taken from a chat of one fixed question and answer. A
    template that drops or changes earlier turns, as some do with thoughts, therefore has no say in it: after inter-turn
    tokens the policy reads its own earlier turns as it wrote them.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Check the template with a user's reply; ConfigError if it writes no special token after an answer."""
        self._tokenizer, self._ends = tokenizer, [answer_form(tokenizer).end_id]
        if is_harmony(tokenizer):
            self._ends.append(tokenizer.convert_tokens_to_ids(END_OF_CALL))
        # The text before an answer is nearly always the same.
        self._encoded = lru_cache(8)(partial(encode, tokenizer))
        self._special_tokens = re.compile(r"(?!)")
        before, after = self._around_end([QUESTION])
        self._special_tokens = special_tokens_of(tokenizer, after)
        first = encode_pieces(tokenizer, [before, after])[1][0]
        if first not in tokenizer.all_special_ids and first not in tokenizer.added_tokens_decoder:
            raise ConfigError(
                f"environment: after an answer the chat template writes {after[:40]!r}, expected a special token that "
                f"ends the turn, such as {tokenizer.eos_token!r}; give the model a template that marks turns"
            )

    def plain(self, message: Message) -> Message:
        """Return the message with a text that stays text, whatever it spells: for what tools and environments say.

        A special token that it spells, such as one that ends a turn, gets a space after its first character, since
        tokenizers take it for the token. Halves of characters are replaced.
        """
        if not isinstance(message.content, str):
            raise TypeError(f"a reply's content is {type(message.content).__name__}, expected a text")
        content = self._special_tokens.sub(lambda found: f"{found[0][0]} {found[0][1:]}", readable(message.content))
        return message if content == message.content else replace(message, content=content)

    def between(self, replies: Sequence[Message], *, last_token: int, turn: str = "") -> list[int]:
        """Return the tokens from an answer to the next one, with `replies`, made `plain`, between them.

        turn: the answer, as some templates repeat the name of the tool that it calls. last_token: the answer's last
        token. An answer without the mark that ends it, since it was cut or ended by a stop string, gets one first. Some
        templates have no such mark, and the policy ends a turn with that of the next speaker; others end the last
        answer of a chat with another mark than those before it. Raises DataError if the template refuses a role of the
        replies.
        """
        before, after = self._around_end(replies, turn)
        whole = encode(self._tokenizer, before + after)
        ids = encode_after(self._tokenizer, self._encoded(before), after, whole)
        return ids[1:] if last_token in (ids[0], *self._ends) else ids

    def follows(self, replies: Sequence[Message], *, turn: str = "") -> str:
        """Return the text of which `between` has the tokens, with the mark that ends the answer."""
        return self._around_end(replies, turn)[1]

    def own_texts(
        self,
        ids: Sequence[int],
        chat: Sequence[Message],
        numbers: Iterable[int],
        render: Callable[[Sequence[Message]], str],
    ) -> list[tuple[int, int]]:
        """Return where in `ids` the texts of messages stand, as bounds of tokens, without those shared with a mark.

        ids: the last tokens of the text that `render` makes of the chat. numbers: those of the messages, ascending.
        Raises DataError if text or tokens cannot be told from what is the template's.
        """
        text, mark, found = render(chat), _REPLY.content, list[tuple[int, int]]()
        while mark in text:
            mark += "3"
        whole = encode(self._tokenizer, text)
        cut = len(whole) - len(ids)
        for i in numbers:
            other = [*chat[:i], replace(chat[i], content=mark), *chat[i + 1 :]]
            before, _, after = render(other).partition(mark)
            start, end = len(before), len(text) - len(after)
            if whole[cut:] != list(ids) or (text[:start], text[end:]) != (before, after):
                raise DataError(
                    f"the chat template renders {text[:200]!r}, of which the reply {chat[i].content[:60]!r} cannot be "
                    "told; set algo.echo_coef=0, or give the model another template"
                )
            if start < end:
                first, until, rest = (encode(self._tokenizer, t) for t in (text[:start], text[:end], text[start:]))
                begin = len(first)
                if whole[:begin] != first:
                    begin = len(whole) - num_common(np.asarray(rest[::-1]), np.asarray(whole[::-1]))
                found.append((begin - cut, max(begin, num_common(np.asarray(until), np.asarray(whole))) - cut))
        return found

    def require_reply(self, role: str) -> None:
        """Raise ConfigError unless the template writes replies of a role, before a conversation depends on it."""
        try:
            _, after = self._around_end([replace(_REPLY, role=role)], _call("probe"))
        except DataError as error:
            raise ConfigError(f"environment.tool_role: {error}") from error
        if _REPLY.content not in after:
            raise ConfigError(
                f"environment.tool_role: the chat template leaves out turns of the role {role!r}, which the policy "
                "would never read; set it to user"
            )

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()) -> list[int]:
        """Return the tokens of a chat up to where the assistant speaks first; `tools` as in `encode_chats`."""
        return encode_chats(self._tokenizer, [messages], prefill=True, tools=tools, places=["the opening"])[0]

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()) -> str:
        """Return the text of a chat up to where the assistant speaks next."""
        return render_chats(self._tokenizer, [messages], tools=tools, places=["the conversation"])[0]

    def _around_end(self, replies: Sequence[Message], turn: str = "") -> tuple[str, str]:
        """Return the text of a conversation up to the end of the answer, and that from its end to the next answer."""
        reads_call = is_harmony(self._tokenizer) and any(reply.role == "tool" for reply in replies)
        tool = called_tool(turn) if reads_call else ""
        said = replace(ANSWER, content=_call(tool)) if tool else ANSWER
        try:
            (text,) = render_chats(self._tokenizer, [[QUESTION, said, *map(self.plain, replies)]])
        except TemplateRefusal as error:
            roles = sorted({message.role for message in replies})
            remedy = "set environment.tool_role=user" if "tool" in roles else "give the model another template"
            raise DataError(
                f"the chat template refuses replies of the roles {roles}: {error.reason}; {remedy}"
            ) from error
        before, answer, after = text.partition(ANSWER.content)
        if not answer or not after.strip() or QUESTION.content not in before:
            raise ConfigError(
                f"environment: the chat template renders {text[:200]!r}, expected a question, its answer and what "
                "follows; conversations of several turns need a template that keeps all of them"
            )
        # Some templates pad answers with spaces.
        between = after[max(after.find(END_OF_CALL), 0) :] if tool else after.lstrip(" ")
        return text.removesuffix(between), between


def _call(tool: str) -> str:
    """Return a turn in harmony that calls a tool, with the probe's text as its argument."""
    return f'<|channel|>commentary to=functions.{tool}<|message|>{{"text": "{ANSWER.content}"}}'
