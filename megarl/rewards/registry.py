"""Scorers by name: functions of the response's text."""

from collections.abc import Mapping
from typing import Any, Protocol

from megarl.registry import Registry
from megarl.types import Reward

# The key of `Reward.details` that is 1 where no answer could be read, so that it counts apart from wrong ones.
PARSE_FAILED = "parse_failed"


class Scorer(Protocol):
    """Judges one response, from 0 (wrong) to 1 (right). Any text is judged; DataError: a malformed ground truth.

    Takes as long as it takes: time limits are the caller's.
    """

    def __call__(self, response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> Reward: ...


SCORERS: Registry[Scorer] = Registry("data source", key="data_source")


def reward_of(correct: bool, *, parse_failed: bool) -> Reward:
    """1 or 0, and whether an answer could be read."""
    return Reward(score=float(correct), correct=correct, details={PARSE_FAILED: float(parse_failed)})
