"""Scorers by data source, and the manager that applies them to rollouts."""

from megarl.rewards import code, countdown, final_number
from megarl.rewards.manager import RewardManager
from megarl.rewards.registry import SCORERS, Scorer, score

__all__ = ["SCORERS", "RewardManager", "Scorer", "code", "countdown", "final_number", "score"]
