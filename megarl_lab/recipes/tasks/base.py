"""Define what a built-in task is, and how its problems are drawn and held out."""

import random
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from megarl.errors import ConfigError
from megarl.registry import Registry

# Weight of each difficulty level.
LevelMix: TypeAlias = Mapping[int, float]

HELD_OUT_EVERY = 5  # one key in five is held out


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of a built-in task: its question, solution and demonstrations.

    Attributes:
        numbers: the given numbers, in the order of the question.
        target: the result that a right answer has.
        key: equal for problems that are the same up to the order of their numbers; it decides what is held out.
        question: the text of the user's turn.
        ground_truth: what the data source's scorer compares answers with.
        solution: the gold solution, given as a hint.
        worked: a demonstration that works the answer out.
        direct: a demonstration that states the right answer at once, as one can with a hint.
    """

    numbers: tuple[int, ...]
    target: int
    level: int
    key: str
    question: str
    ground_truth: str
    solution: str
    worked: str
    direct: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinTask:
    """A family of problems that code can generate, solve and score.

    Demonstrations have two styles on purpose: `cheap` is short and mostly wrong, `Problem.worked` is long and right. A
    model that learned both gives RL something to choose between.

    Attributes:
        sft_mix: default weights of the difficulty levels in demonstrations.
        rl_mix: default weights of the difficulty levels in RL prompts.
        draw: draws a random problem of a level.
        cheap: writes a demonstration that answers at once, without checking.
        corrupted_worked: writes a wrong answer that is worked out, but with a slip.
        corrupted_direct: writes a wrong answer near the right one, stated at once.
        next_lines: lists the lines that may follow given ones in a right answer; none if these are complete.
    """

    data_source: str
    levels: range
    sft_mix: LevelMix
    rl_mix: LevelMix
    draw: Callable[[random.Random, int], Problem]
    cheap: Callable[[Problem, random.Random], str]
    corrupted_worked: Callable[[Problem, random.Random], str]
    corrupted_direct: Callable[[Problem, random.Random], str]
    next_lines: Callable[[Problem, Sequence[str]], Collection[str]]


TASKS: Registry[BuiltinTask] = Registry("task", key="task")


def check_levels(task: BuiltinTask, mix: LevelMix) -> None:
    """Raise ConfigError unless the task has all levels in `mix`, and their weights are >= 0 and not all 0."""
    unknown = [level for level in mix if level not in task.levels]
    if unknown or not mix or min(mix.values()) < 0 or sum(mix.values()) <= 0:
        raise ConfigError(
            f"levels of {task.data_source}: got {dict(mix)}, expected weights >= 0, not all 0, "
            f"of levels {task.levels[0]} to {task.levels[-1]}"
        )


def draw_problem(task: BuiltinTask, rng: random.Random, mix: LevelMix, *, held_out: bool) -> Problem:
    """Draw a random problem, either one for training or one that is held out; the weights `mix` decide its level.

    A problem is held out if the CRC-32 of its key is a multiple of 5.
    """
    while True:
        level = rng.choices(list(mix), list(mix.values()))[0]
        problem = task.draw(rng, level)
        if (zlib.crc32(problem.key.encode()) % HELD_OUT_EVERY == 0) == held_out:
            return problem
