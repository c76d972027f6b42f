"""Scorers by data source: functions of the response's text."""

from collections.abc import Mapping
from typing import Any, Protocol

from megarl.algos.registry import Registry
from megarl.types import Reward


class Scorer(Protocol):
    """Judges one response. Any text is judged; DataError is for a malformed ground truth."""

    def __call__(self, response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> Reward: ...


SCORERS: Registry[Scorer] = Registry("data source", key="data_source")


def score(data_source: str, response: str, ground_truth: str, extra_info: Mapping[str, Any]) -> Reward:
    """The reward of `response`; ConfigError lists the known sources if `data_source` is none of them."""
    return SCORERS.get(data_source)(response, ground_truth, extra_info)
