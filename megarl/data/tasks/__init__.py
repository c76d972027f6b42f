"""Define the built-in tasks (arithmetic puzzles whose answers a rule can check); `TASKS` holds them by name."""

from megarl.data.tasks.base import TASKS, BuiltinTask, LevelMix, Problem
from megarl.data.tasks.countdown import COUNTDOWN
from megarl.data.tasks.sums import SUMS

__all__ = ["COUNTDOWN", "SUMS", "TASKS", "BuiltinTask", "LevelMix", "Problem"]
