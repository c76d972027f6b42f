"""Define the built-in tasks, whose answers can be verified; `TASKS` holds them by name."""

from megarl.data.tasks.base import TASKS, BuiltinTask, LevelMix, Problem
from megarl.data.tasks.countdown import COUNTDOWN
from megarl.data.tasks.sums import SUMS

__all__ = ["COUNTDOWN", "SUMS", "TASKS", "BuiltinTask", "LevelMix", "Problem"]
