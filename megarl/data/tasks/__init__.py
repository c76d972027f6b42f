"""Built-in verifiable tasks, in `TASKS` by name."""

from megarl.data.tasks.base import TASKS, LevelMix, Problem, Task
from megarl.data.tasks.countdown import Countdown
from megarl.data.tasks.sums import Sums

__all__ = ["TASKS", "Countdown", "LevelMix", "Problem", "Sums", "Task"]
