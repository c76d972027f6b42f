"""Read chats as lists of turns, each with a speaker and a text."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megarl.data.files import PLAIN, REPAIR, UNREAD_COLUMNS
from megarl.data.written import read_turns, require_text
from megarl.errors import DataError
from megarl.types import Message

if TYPE_CHECKING:
    from megarl.data.images import RowsImages

# ShareGPT's names of speakers.
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"} | {
    role: role for role in ("system", "user", "assistant", "tool")
}
# Other programs' names of speakers, by which turns are not read, as answers could not be told from other turns.
_MEANT = SHAREGPT_ROLES | {"prompter": "user", **dict.fromkeys(("ai", "bot", "chatgpt", "model"), "assistant")}
# A turn may hold these besides its text. They would be lost: chats are rendered from roles, texts and `_SHOWN`.
_UNREAD = "tool_calls function_call channel recipient refusal reasoning_content reasoning reasoning_details thinking"
_SHOWN = ("name", "tool_call_id")
UNREAD_TURN_KEYS: Mapping[str, str] = {
    **UNREAD_COLUMNS,
    **dict.fromkeys(
        (*_UNREAD.split(), "thought", "thoughts"),
        "write it into the turn's text, in the form in which the model is to write it",
    ),
    "prefix": "set data.prefill=true, by which the last turn of a prompt is continued, and remove the key",
}


def read_messages(
    row: Mapping[str, object], name: str, where: str, *, text_role: str = "", images: "RowsImages | None" = None
) -> tuple[Message, ...]:
    """Read a list of turns from column `name`. With `text_role`, a plain text becomes one turn with that role.

    images: those of the row, for which marks in the texts stand; None: the texts have none.

    Raises DataError, which names `where`, for anything else.
    """
    value = row.get(name)
    if isinstance(value, str):
        value = read_turns(value, f"{where}: {name}")
    if text_role and isinstance(value, str):
        if value.startswith("["):
            require_text(value, f"{where}: {name}")
        shown = () if images is None or text_role == "assistant" else images.text(value, f"{where}: {name}")[1]
        return (Message(role=text_role, content=value, images=shown),)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        got = "an empty list" if isinstance(value, list) else type(value).__name__
        raise DataError(f"{where}: {name} is {got}, expected a list of {{role, content}}; {REPAIR}")
    messages = []
    for i, item in enumerate(value):
        place = f"{where}: {name}[{i}]"
        if not isinstance(item, Mapping):
            raise DataError(f"{place} is {type(item).__name__}, expected {{role, content}}; {REPAIR}")
        if unread := [
            key for key in item.keys() & UNREAD_TURN_KEYS.keys() if item[key] and item[key] != PLAIN.get(key)
        ]:
            raise DataError(f"{place}: {min(unread)} is not read here; {UNREAD_TURN_KEYS[min(unread)]}")
        item = _as_openai_turn(item, place)
        given = {key: text_of(item, key, place) for key in _SHOWN if item.get(key)}
        content, shown = item.get("content"), tuple[str, ...]()
        if images is not None:
            content, shown = images.text(content, f"{place}: content")
        text = text_of({"content": content}, "content", place)
        message = Message(role=text_of(item, "role", place), content=text, images=shown, **given)
        if shown and message.role == "assistant":
            raise DataError(f"{place}: an answer shows an image, but models write texts alone; write it without")
        if message.name and message.role == "assistant":
            raise DataError(f"{place}: the policy writes no name before an answer; remove name, or rename the role")
        role = message.role.strip().lower()
        if not role or _MEANT.get(role, message.role) != message.role:
            raise _role_error(message.role, f"{place}: role")
        if message.content.startswith("["):
            require_text(message.content, f"{place}: content")
        messages.append(message)
    return tuple(messages)


def read_answer(row: Mapping[str, object], name: str, where: str) -> Message:
    """Read an answer from column `name`, a text or one turn of the assistant; DataError names `where` otherwise."""
    turns = read_messages(row, name, where, text_role="assistant")
    if len(turns) != 1 or turns[0].role != "assistant" or not turns[0].content:
        raise DataError(f"{where}: {name} has roles {[m.role for m in turns]}, expected one assistant turn")
    return turns[0]


def _as_openai_turn(turn: Mapping[str, object], place: str) -> Mapping[str, object]:
    """Return a turn in OpenAI's form, also of one in ShareGPT's; DataError for a speaker that it does not have."""
    if turn.get("from") is None:
        return turn
    if not isinstance(turn["from"], str) or turn["from"] not in SHAREGPT_ROLES:
        raise _role_error(turn["from"], f"{place}: from")
    return {**turn, "role": SHAREGPT_ROLES[turn["from"]], "content": turn.get("value")}


def text_of(row: Mapping[str, object], name: str, where: str) -> str:
    """Return a column's text; DataError names `where` if it has none."""
    value = row.get(name)
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {name} is {'missing' if value is None else f'{value!r:.200}'}, expected a string; write its text"
        )
    return value


def _role_error(role: object, place: str) -> DataError:
    meant = _MEANT.get(str(role).strip().lower())
    remedy = f"write {meant!r}" if meant else "rename it to that of these which speaks there"
    return DataError(f"{place} is {role!r:.60}, expected one of {sorted(set(_MEANT.values()))}; {remedy}")
