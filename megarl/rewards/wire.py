"""OpenRLHF's format of reward services: what is posted, and what an answer must be.

Request: {"query": [prompt + response, …], "prompts": […], "labels": [ground truth, …]}, and, which services may
ignore, "data_source": […] and "extra_info": […]. Answer: {"rewards": [number, …], "scores": [number, …],
"extra_logs": {name: [number, …] or number}}, of which the last two may be missing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.rewards.judge import Item
from megarl.types import Reward

_MAX_SHOWN_CHARS = 80


class BadReplyError(Exception):
    """What a service answered is not in the format; the message says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A checked answer: a number per row each, `scores` and the logs if they were given."""

    rewards: Sequence[float]
    scores: Sequence[float] | None
    logs: Mapping[str, Sequence[float]]

    def reward(self, row: int) -> Reward:
        """Of one row. It counts as correct by its score, which is in [0, 1], if there is one; else by its reward."""
        correct = self.rewards[row] > 0 if self.scores is None else self.scores[row] > 0.5
        return Reward(
            score=self.rewards[row],
            correct=correct,
            details={name: values[row] for name, values in self.logs.items()},
        )


def encode_request(items: Sequence[Item]) -> dict[str, list[Any]]:
    """The body of a request."""
    return {
        "query": [item.prompt_text + item.response for item in items],
        "prompts": [item.prompt_text for item in items],
        "labels": [item.prompt.ground_truth for item in items],
        "data_source": [item.prompt.data_source for item in items],
        "extra_info": [dict(item.prompt.extra_info) for item in items],
    }


def decode_reply(reply: Any, num_rows: int) -> Reply:
    """The answer to `num_rows` rows; BadReplyError if it is not one."""
    if not isinstance(reply, dict):
        raise BadReplyError(f"got {_shown(reply)}, expected an object with rewards")
    if reply.get("rewards") is None:
        raise BadReplyError(f"got keys {sorted(map(str, reply))}, expected rewards")
    scores, logs = reply.get("scores"), reply.get("extra_logs") or {}
    if not isinstance(logs, dict):
        raise BadReplyError(f"extra_logs: got {_shown(logs)}, expected an object")
    return Reply(
        rewards=_numbers("rewards", reply["rewards"], num_rows),
        scores=None if scores is None else _numbers("scores", scores, num_rows),
        logs={
            str(name): _numbers(f"extra_logs.{name}", _each(entry, num_rows), num_rows) for name, entry in logs.items()
        },
    )


def _each(entry: Any, num_rows: int) -> list[Any]:
    """One per row; a number alone is that of every row."""
    return entry if isinstance(entry, list) else [entry] * num_rows


def _numbers(name: str, values: Any, num_rows: int) -> list[float]:
    if not isinstance(values, list):
        raise BadReplyError(f"{name}: got {_shown(values)}, expected a list of {num_rows} numbers")
    if len(values) != num_rows:
        raise BadReplyError(f"{name}: got {len(values)} numbers, expected {num_rows}, one per row")
    for row, value in enumerate(values):
        # JSON as Python reads it has NaN, and integers beyond every float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise BadReplyError(f"{name}[{row}]: got {_shown(value)}, expected a finite number")
    return [float(value) for value in values]


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: Any) -> str:
    return repr(value)[:_MAX_SHOWN_CHARS]
