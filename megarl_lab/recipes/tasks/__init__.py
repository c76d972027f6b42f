"""Define the built-in tasks (arithmetic puzzles whose answers a rule can check); `TASKS` holds them by name."""

from megarl_lab.recipes.tasks.base import TASKS, BuiltinTask, LevelMix, Problem
from megarl_lab.recipes.tasks.countdown import COUNTDOWN
from megarl_lab.recipes.tasks.sums import SUMS

__all__ = ["COUNTDOWN", "SUMS", "TASKS", "BuiltinTask", "LevelMix", "Problem"]
