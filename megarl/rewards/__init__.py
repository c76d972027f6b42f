"""Compute rewards of samples: by scorers (functions that judge an answer), by services over HTTP, and by reward
models.
"""

from megarl.rewards import choices, code, countdown, final_number, luffy, mathematics, reasoning_gym
from megarl.rewards.scorers import PARSE_FAILED, SCORERS, SOURCES, Scorer, SourceSpec, score, source_spec

__all__ = [
    "PARSE_FAILED",
    "SCORERS",
    "SOURCES",
    "Scorer",
    "SourceSpec",
    "choices",
    "code",
    "countdown",
    "final_number",
    "luffy",
    "mathematics",
    "reasoning_gym",
    "score",
    "source_spec",
]
