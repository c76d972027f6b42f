"""Parse rows of prompt files, in the Parquet/JSON-lines schema that verl and LUFFY use.

`prompt` and `target`: lists of {role, content}; `target_probs`: optional list of the probabilities that the author of
the target gave its tokens, -1 where unknown; `data_source`: string, at the top level or in `extra_info`;
`ability`: optional string; `reward_model`: {style, ground_truth}; `extra_info`: any object.

Preference rows have `chosen` and `rejected`: texts, or lists of {role, content} that end with the assistant's
answer; `prompt` (or `messages`): a text or such a list, which may be left out if chosen or rejected starts with it;
and `margin`, an optional number.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.errors import DataError
from megarl.types import Message

PROMPT_COLUMNS = ("prompt", "data_source", "ability", "reward_model", "extra_info")
TARGET_COLUMNS = ("target", "target_probs")
DEMONSTRATION_COLUMNS = ("prompt", "target")
PREFERENCE_SIDES = ("chosen", "rejected")
PREFERENCE_COLUMNS = (*PREFERENCE_SIDES, "prompt", "messages", "margin")

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SCHEMA = pa.schema(
    [
        ("prompt", _MESSAGES),
        ("data_source", pa.string()),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [
                    ("index", pa.int64()),
                    ("split", pa.string()),
                    ("gold_solution", pa.string()),
                    ("difficulty_score", pa.float64()),
                    ("subject", pa.string()),
                ]
            ),
        ),
        ("target", _MESSAGES),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """Hold a question and what its scorer needs; `ground_truth` may be empty if a model judges (style "model")."""

    messages: tuple[Message, ...]
    data_source: str
    ability: str | None
    reward_style: str
    ground_truth: str
    extra_info: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationRecord:
    """Hold a question with the answer to imitate."""

    messages: tuple[Message, ...]
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRecord:
    """Hold two complete chats with the same prompt, and the margin by which their scores should differ."""

    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float


def parse_prompt(row: Mapping[str, Any], where: str) -> PromptRecord:
    """Parse a prompt row; DataError names `where` and what is wrong."""
    extra_info = _mapping(row, "extra_info", where, required=False)
    reward_model = _mapping(row, "reward_model", where, required=True)
    style = _string({"style": "rule", **reward_model}, "style", f"{where}: reward_model")
    if style not in ("rule", "model"):
        raise DataError(f"{where}: reward_model.style is {style!r}, expected 'rule' or 'model'")
    if style == "model":
        reward_model = {"ground_truth": "", **reward_model}
    source = row if row.get("data_source") is not None else extra_info
    ability = row.get("ability")
    return PromptRecord(
        messages=_messages(row, "prompt", where),
        data_source=_string(source, "data_source", where),
        ability=None if ability is None else str(ability),
        reward_style=style,
        ground_truth=_string(reward_model, "ground_truth", f"{where}: reward_model"),
        extra_info=extra_info,
    )


def parse_demonstration(row: Mapping[str, Any], where: str) -> DemonstrationRecord:
    """Parse a row whose `target` must be one assistant turn; DataError names `where` and what is wrong."""
    return DemonstrationRecord(messages=_messages(row, "prompt", where), target=parse_target(row, where))


def parse_preference(row: Mapping[str, Any], where: str) -> PreferenceRecord:
    """Parse a preference row; DataError names `where` and what is wrong."""
    sides = {side: _conversation(row, side, where) for side in PREFERENCE_SIDES}
    prompt = next((_conversation(row, name, where) for name in ("prompt", "messages") if row.get(name)), ())
    openings = {side: turns[:-1] for side, turns in sides.items()}
    opening = prompt or openings["chosen"]
    for side, turns in sides.items():
        if turns[-1].role != "assistant" or not turns[-1].content:
            raise DataError(f"{where}: {side} ends with {turns[-1].as_dict()}, expected an answer of the assistant")
        if openings[side] not in ((), opening) or not opening:
            raise DataError(
                f"{where}: {side} answers {[m.as_dict() for m in openings[side]]}, expected the same prompt in chosen, "
                f"rejected and prompt, in at least one of these"
            )
    if sides["chosen"][-1] == sides["rejected"][-1]:
        raise DataError(f"{where}: chosen and rejected are the same answer, expected two; remove the row")
    margin = row.get("margin")
    if margin is None:
        margin = 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(f"{where}: margin is {margin!r}, expected a finite number, or none")
    return PreferenceRecord(
        chosen=(*opening, sides["chosen"][-1]), rejected=(*opening, sides["rejected"][-1]), margin=float(margin)
    )


def _conversation(row: Mapping[str, Any], name: str, where: str) -> tuple[Message, ...]:
    """Parse a list of turns, or a text as one turn: an answer in chosen and rejected, a question elsewhere."""
    value = row.get(name)
    if isinstance(value, str):
        return (Message(role="assistant" if name in PREFERENCE_SIDES else "user", content=value),)
    return _messages(row, name, where)


def parse_target(row: Mapping[str, Any], where: str) -> str:
    """Read the text of `target`, one assistant turn; DataError names `where` and what is wrong."""
    target = _messages(row, "target", where)
    if len(target) != 1 or target[0].role != "assistant" or not target[0].content:
        raise DataError(f"{where}: target has roles {[m.role for m in target]}, expected one assistant turn")
    return target[0].content


def parse_target_probs(row: Mapping[str, Any], where: str) -> tuple[float, ...]:
    """Read `target_probs`, in (0, 1] or -1; empty if the row has none. DataError names `where` and what is wrong."""
    value = row.get("target_probs")
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"{where}: target_probs is {type(value).__name__}, expected a list of numbers")
    for i, prob in enumerate(value):
        if not isinstance(prob, int | float) or not (0 < prob <= 1 or prob == -1):
            raise DataError(f"{where}: target_probs[{i}] is {prob!r}, expected a number in (0, 1], or -1 if unknown")
    return tuple(map(float, value))


def write_parquet(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows of `SCHEMA`; keys that a row leaves out become nulls."""
    pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), path)


def _messages(row: Mapping[str, Any], name: str, where: str) -> tuple[Message, ...]:
    value = row.get(name)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        got = "an empty list" if isinstance(value, list) else type(value).__name__
        raise DataError(f"{where}: {name} is {got}, expected a list of {{role, content}}")
    messages = []
    for i, item in enumerate(value):
        place = f"{where}: {name}[{i}]"
        if not isinstance(item, Mapping):
            raise DataError(f"{place} is {type(item).__name__}, expected {{role, content}}")
        messages.append(Message(role=_string(item, "role", place), content=_string(item, "content", place)))
    return tuple(messages)


def _mapping(row: Mapping[str, Any], name: str, where: str, *, required: bool) -> Mapping[str, Any]:
    value = row.get(name)
    if value is None and not required:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: {name} is {type(value).__name__}, expected an object")
    # Parquet gives every row all fields of a struct, as nulls where a row had none.
    return {key: item for key, item in value.items() if item is not None}


def _string(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is {'missing' if value is None else repr(value)}, expected a string")
    return value
