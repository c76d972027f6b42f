"""A reward function that a random policy's answers please half of the time."""

from collections.abc import Mapping
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    """1 for an answer of an even number of characters, else 0."""
    return float(len(solution_str) % 2 == 0)
