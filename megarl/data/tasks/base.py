"""What a built-in task is, and how problems are drawn and held out."""

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from megarl.errors import ConfigError
from megarl.registry import Registry

# Weight of each difficulty level.
LevelMix: TypeAlias = Mapping[int, float]

HELD_OUT_EVERY = 5  # one key in five is held out


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Numbers in the order of the question, and what they are to give."""

    numbers: tuple[int, ...]
    target: int
    level: int


class Task(Protocol):
    """A family of problems that code can pose, solve and judge.

    The teacher is mixed on purpose: `cheap` is short and mostly wrong, `worked` is long and right. A model
    that learned both gives RL something to choose between.
    """

    data_source: str
    levels: range
    sft_mix: LevelMix
    rl_mix: LevelMix

    def draw(self, rng: random.Random, level: int) -> Problem:
        """A random problem of `level`."""

    def key(self, problem: Problem) -> str:
        """Equal for problems that are the same up to the order of their numbers; decides what is held out."""

    def question(self, problem: Problem) -> str:
        """What the user asks."""

    def ground_truth(self, problem: Problem) -> str:
        """What the scorer of `data_source` judges by."""

    def solution(self, problem: Problem) -> str:
        """The gold solution, given as a hint."""

    def worked(self, problem: Problem) -> str:
        """A demonstration that works the answer out."""

    def direct(self, problem: Problem) -> str:
        """A demonstration that states the right answer at once, as one can with a hint."""

    def cheap(self, problem: Problem, rng: random.Random) -> str:
        """A demonstration that answers at once, without checking."""

    def corrupted_worked(self, problem: Problem, rng: random.Random) -> str:
        """A wrong answer that is worked out, but for a slip."""

    def corrupted_direct(self, problem: Problem, rng: random.Random) -> str:
        """A wrong answer near the right one, stated at once."""


TASKS: Registry[Task] = Registry("task", key="task")


def is_held_out(task: Task, problem: Problem) -> bool:
    """crc32 of the key modulo 5 is 0."""
    return zlib.crc32(task.key(problem).encode()) % HELD_OUT_EVERY == 0


def check_levels(task: Task, mix: LevelMix) -> None:
    """ConfigError unless `mix` gives weight to levels that the task has."""
    unknown = [level for level in mix if level not in task.levels]
    if unknown or not mix or min(mix.values()) < 0 or sum(mix.values()) <= 0:
        raise ConfigError(
            f"levels of {task.data_source}: got {dict(mix)}, expected weights >= 0, not all 0, "
            f"of levels {task.levels[0]} to {task.levels[-1]}"
        )


def draw_problem(task: Task, rng: random.Random, mix: LevelMix, *, held_out: bool) -> Problem:
    """A random problem of the training or of the held-out part; its level follows `mix`."""
    while True:
        level = rng.choices(list(mix), list(mix.values()))[0]
        problem = task.draw(rng, level)
        if is_held_out(task, problem) == held_out:
            return problem
