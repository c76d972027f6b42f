"""Encode requests and decode answers of reward services in OpenRLHF's format.

Request: {"query": [prompt + response, …], "prompts": […], "labels": [ground truth, …]}, and "data_source": […] and
"extra_info": […], which services may ignore. Answer: {"rewards": [number, …], "scores": [number, …],
"extra_logs": {name: [number, …] or number}}; "scores" and "extra_logs" may be missing. Lists in "extra_logs" have an
entry for each row; null among numbers says that the service has no opinion there. Other values are kept beside
the row's sample, and not averaged. A reward of null says that the service could not judge the row; the row's entry in
"extra_logs": {"unjudged": [text, …]} must then say why. "no_opinion": [name, …], which may be missing, names numbers
that other answers of the service have, but on which it has no opinion in any of these rows.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from megarl.errors import ConfigError
from megarl.types import DROPPED, Reward
from megarl.types.judged import FinishedSample

# Shorter ones could be guessed.
MIN_CHARS = 16


def read_service_key(variable: str, *, setting: str) -> str:
    """Return the key in an environment variable that `setting` names. ConfigError if it is unset, short or no text that
    a header can carry, without showing it.
    """
    key = os.environ.get(variable, "")
    if len(key) < MIN_CHARS or not (key.isascii() and key.isprintable()) or " " in key:
        got = f"{len(key)} characters" if key else "nothing"
        raise ConfigError(
            f"{setting}: the environment variable {variable} holds {got}, expected a key of at least {MIN_CHARS} "
            f"printable ASCII characters without spaces; make one with: openssl rand -hex 32"
        )
    return key


# The entry of "extra_logs" that says for each row why it has no reward.
UNJUDGED = "unjudged"
# The key of an answer that names numbers on which the service has no opinion in any row.
NO_OPINION = "no_opinion"
# Longest note that is kept, since replies are limited and rollout files are meant for reading.
MAX_NOTE_CHARS = 16_384


class BadReplyError(Exception):
    """The error of a malformed answer of a service; its message says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReply:
    """A service's checked answer, with an entry per row; `scores` is None if the service gave none.

    rewards: None for a row that the service could not judge.
    """

    rewards: Sequence[float | None]
    scores: Sequence[float | None] | None
    logs: Mapping[str, Sequence[float | None]]
    notes: Mapping[str, Sequence[object]] = field(default_factory=dict)

    def reward(self, row: int) -> Reward:
        """Return a row's reward; it is correct if its score is above 0.5 or, without scores, its reward is above 0.
        Without a reward, the row is dropped.
        """
        value = self.rewards[row]
        if value is None:
            return DROPPED
        score = None if self.scores is None else self.scores[row]
        return Reward(
            score=value,
            correct=value > 0 if score is None else score > 0.5,
            details={name: number for name, values in self.logs.items() if (number := values[row]) is not None},
            notes={name: values[row] for name, values in self.notes.items() if name != UNJUDGED},
            own_score=score,
            no_opinion=tuple(name for name, values in self.logs.items() if values[row] is None),
        )


def encode_request(items: Sequence[FinishedSample]) -> dict[str, list[object]]:
    """Build the body of a request that asks a service to judge samples."""
    return {
        "query": [item.prompt_text + item.response for item in items],
        "prompts": [item.prompt_text for item in items],
        "labels": [item.prompt.ground_truth for item in items],
        "data_source": [item.prompt.data_source for item in items],
        "extra_info": [dict(item.prompt.extra_info) for item in items],
    }


def decode_reply(reply: object, num_rows: int) -> ServiceReply:
    """Check a service's answer to `num_rows` rows; BadReplyError if it is malformed."""
    if not isinstance(reply, dict):
        raise BadReplyError(f"got {reply!r:.80}, expected an object with rewards")
    if reply.get("rewards") is None:
        raise BadReplyError(f"got keys {sorted(map(str, reply))}, expected rewards")
    scores, logs = reply.get("scores"), reply.get("extra_logs") or {}
    if not isinstance(logs, dict):
        raise BadReplyError(f"extra_logs: got {logs!r:.80}, expected an object")
    # A single value applies to every row.
    columns = {str(name): entry if isinstance(entry, list) else [entry] * num_rows for name, entry in logs.items()}
    numbers, notes = dict[str, Sequence[float | None]](), dict[str, Sequence[object]]()
    for name, column in columns.items():
        if len(column) != num_rows:
            raise BadReplyError(f"extra_logs.{name}: got {len(column)} values, expected {num_rows}, one per row")
        if name != UNJUDGED and all(value is None or _is_finite(value) for value in column):
            numbers[name] = [None if value is None else float(value) for value in column]
        else:
            notes[name] = [note(value) for value in column]
    silent = reply.get(NO_OPINION) or []
    if not isinstance(silent, list) or not all(isinstance(name, str) for name in silent):
        raise BadReplyError(f"{NO_OPINION}: got {silent!r:.80}, expected a list of names")
    numbers |= {name: [None] * num_rows for name in silent if name not in columns}
    rewards = _numbers("rewards", reply["rewards"], num_rows)
    checked = None if scores is None else _numbers("scores", scores, num_rows)
    for row, value in enumerate(rewards):
        if value is None and not (UNJUDGED in notes and notes[UNJUDGED][row]):
            raise BadReplyError(f"rewards[{row}]: got None, expected a finite number, or why in extra_logs.{UNJUDGED}")
        if checked is not None and checked[row] is None and value is not None:
            raise BadReplyError(f"scores[{row}]: got None, expected a finite number, as rewards[{row}] is one")
    return ServiceReply(
        rewards=rewards,
        scores=checked,
        logs=numbers,
        notes=notes,
    )


def note(value: object) -> object:
    """Convert a value to JSON types, arrays to lists. A value that is too long, or that JSON cannot express, becomes
    text.
    """
    try:
        text = json.dumps(value, allow_nan=False, default=lambda other: getattr(other, "tolist", other.__str__)())
    except (TypeError, ValueError):
        text = json.dumps(str(value))
    return json.loads(text) if len(text) <= MAX_NOTE_CHARS else text[:MAX_NOTE_CHARS]


def _is_finite(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number, not a boolean."""
    # JSON as Python reads it has NaN, and integers beyond every float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _numbers(name: str, values: object, num_rows: int) -> list[float | None]:
    """Return the list `name` of an answer if it has one finite number, or None, for each row; otherwise raise
    BadReplyError.
    """
    if not isinstance(values, list):
        raise BadReplyError(f"{name}: got {values!r:.80}, expected a list of {num_rows} numbers")
    if len(values) != num_rows:
        raise BadReplyError(f"{name}: got {len(values)} numbers, expected {num_rows}, one per row")
    for row, value in enumerate(values):
        if value is not None and not _is_finite(value):
            raise BadReplyError(f"{name}[{row}]: got {value!r:.80}, expected a finite number")
    return [None if value is None else float(value) for value in values]
