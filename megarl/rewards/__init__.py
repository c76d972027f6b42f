"""Scorers by data source, and the managers that apply them to rollouts."""

from megarl.rewards import code, countdown, final_number, formats, luffy, mathematics
from megarl.rewards.custom import load_reward_function
from megarl.rewards.manager import RewardManager
from megarl.rewards.registry import PARSE_FAILED, SCORERS, Scorer
from megarl.rewards.sources import SOURCES, SourceSpec, score, source_spec

__all__ = [
    "PARSE_FAILED",
    "SCORERS",
    "SOURCES",
    "RewardManager",
    "Scorer",
    "SourceSpec",
    "code",
    "countdown",
    "final_number",
    "formats",
    "load_reward_function",
    "luffy",
    "mathematics",
    "score",
    "source_spec",
]
