"""Read and write turns in harmony, the format of gpt-oss: messages in channels, of which a tool's call ends the turn.

A turn is kept as the policy wrote it after the prompt's `<|start|>assistant`, without the token that ended it, so that
what an engine sampled is never written anew. Chat templates take the parts of a turn as fields.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FINAL, END_OF_CALL = "<|channel|>final<|message|>", "<|call|>"
# The marks within a turn; others end it.
MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
_MARK = re.compile("|".join(map(re.escape, (*MARKS, END_OF_CALL, "<|return|>"))))
# Each message but the first begins with a mark, which a policy may forget after the end of the one before.
_BETWEEN = re.compile(r"(?=<\|start\|>)|(?<=<\|end\|>)")
_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>(\w*)"), re.compile(r" to=([^\s<]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMessage:
    """A message within a turn. tool: the name of the tool that it calls, if any. source: all of it, as written."""

    channel: str
    tool: str
    text: str
    source: str

    @property
    def is_thought(self) -> bool:
        return self.channel == "analysis" and not self.tool


def is_harmony(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether a tokenizer's chat template writes turns as channels."""
    return "<|channel|>analysis<|message|>" in str(tokenizer.chat_template)


def read_channels(turn: str) -> list[ChannelMessage]:
    """Return the messages of a turn, also of one that was cut; none if it has no channels.

    >>> [each.text for each in read_channels("<|channel|>analysis<|message|>2+2<|end|><|channel|>final<|message|>4")]
    ['2+2', '4']
    """
    found = []
    has_channels = "<|channel|>" in turn or "<|message|>" in turn
    for source in filter(None, _BETWEEN.split(turn) if has_channels else ()):
        header, begins, body = source.partition("<|message|>")
        if not begins and _MARK.search(header) is None:
            # Words after the end of a message are shown.
            header, body = "", header
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header) if begins else None
        found.append(
            ChannelMessage(
                channel=channel[1] if channel else "",
                tool=recipient[1].removeprefix("functions.") if recipient else "",
                text=_MARK.sub("", body),
                source=source,
            )
        )
    return found


def split_channels(turn: str) -> tuple[str, str]:
    """Return the thoughts of a turn, and all else that it says, a line for each message."""
    messages = [each for each in read_channels(turn) if each.text]
    thoughts, shown = ([each.text for each in messages if each.is_thought is kind] for kind in (True, False))
    return "\n".join(thoughts), "\n".join(shown)


def without_channels(turn: str) -> str:
    """Return a turn as models without channels write theirs: a thought in tags, then what is shown.

    >>> without_channels("<|channel|>analysis<|message|>2+2<|end|><|start|>assistant<|channel|>final<|message|>4")
    '<think>\\n2+2\\n</think>\\n\\n4'
    """
    if not read_channels(turn):
        return _MARK.sub("", turn)
    thought, shown = split_channels(turn)
    ended = f"\n</think>\n\n{shown}" if shown else ""
    return f"<think>\n{thought}{ended}" if thought else shown


def in_channels(answer: str) -> str:
    """Return an answer as the policy writes it: a text without channels is its final message."""
    return answer if read_channels(answer) else FINAL + answer


def called_tool(turn: str) -> str:
    """Return the name of the tool that a turn calls; empty: it calls none."""
    return next((each.tool for each in read_channels(turn) if each.tool), "")


def template_fields(turn: str) -> dict[str, object]:
    """Return a turn as chat templates take it. They have no field for words before a call, which join the thoughts."""
    if not (messages := read_channels(turn)):
        return {"content": _MARK.sub("", turn)}
    calls, (thinking, content) = [each for each in messages if each.tool], split_channels(turn)
    if calls:
        thinking, content = "\n".join(each.text for each in messages if each.text and not each.tool), ""
    fields: dict[str, object] = {"content": content}
    if thinking:
        fields["thinking"] = thinking
    if calls:
        functions = [{"name": each.tool, "arguments": _arguments(each.text)} for each in calls]
        fields["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return fields


def _arguments(text: str) -> object:
    """Return a call's arguments, read from JSON; a text that is not JSON stays as it is."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text
