"""Sums of one-digit numbers: `5+7+3+6=?`, answered by running totals and `#### 21`."""

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType

from megarl.data.tasks.base import TASKS, LevelMix, Problem

MAX_NUMBER = 9

# How far off wrong totals are, and how often a worked answer goes wrong by a number misread instead.
SLIPS = (1, 1, 2, 10)
MISREAD_FRAC = 0.3


class Sums:
    """Level n adds n + 1 numbers from 1 to 9. The cheap answer is the sum to the nearest ten."""

    data_source = "megarl/sums"
    levels = range(1, 8)
    sft_mix: LevelMix = MappingProxyType({1: 0.3, 2: 0.4, 3: 0.3})
    rl_mix: LevelMix = MappingProxyType({2: 0.5, 3: 0.5})

    def draw(self, rng: random.Random, level: int) -> Problem:
        numbers = tuple(rng.randint(1, MAX_NUMBER) for _ in range(level + 1))
        return Problem(numbers=numbers, target=sum(numbers), level=level)

    def key(self, problem: Problem) -> str:
        return str(sorted(problem.numbers))

    def question(self, problem: Problem) -> str:
        return "+".join(map(str, problem.numbers)) + "=?"

    def ground_truth(self, problem: Problem) -> str:
        return str(problem.target)

    def solution(self, problem: Problem) -> str:
        return _worked(problem.numbers, list(accumulate(problem.numbers)))

    def worked(self, problem: Problem) -> str:
        return self.solution(problem)

    def direct(self, problem: Problem) -> str:
        return f"#### {problem.target}"

    def cheap(self, problem: Problem, rng: random.Random) -> str:
        return f"#### {(problem.target + 5) // 10 * 10}"

    def corrupted_worked(self, problem: Problem, rng: random.Random) -> str:
        """One wrong total, from which the rest follows; or one number misread; or another final answer."""
        numbers, slip = list(problem.numbers), _slip(rng)
        place = rng.randrange(1, len(numbers) + 1)
        if place == len(numbers):
            return _worked(numbers, list(accumulate(numbers)), answer=_near(problem.target, slip))
        if rng.random() < MISREAD_FRAC:
            others = [n for n in range(1, MAX_NUMBER + 1) if n != numbers[place]]
            numbers[place] = rng.choice(others)
            return _worked(numbers, list(accumulate(numbers)))
        totals = list(accumulate(numbers))
        shift = _near(totals[place], slip) - totals[place]
        return _worked(numbers, [*totals[:place], *(total + shift for total in totals[place:])])

    def corrupted_direct(self, problem: Problem, rng: random.Random) -> str:
        return f"#### {_near(problem.target, _slip(rng))}"


def _worked(numbers: Sequence[int], totals: Sequence[int], answer: int | None = None) -> str:
    """Running totals, right or wrong, and the last of them, or another, as the answer."""
    lines = [f"{a}+{n}={b}" for n, (a, b) in zip(numbers[1:], pairwise(totals), strict=True)]
    return "\n".join([*lines, f"#### {totals[-1] if answer is None else answer}"])


def _slip(rng: random.Random) -> int:
    """An error as one makes it: one or two off, or a carry lost or made up."""
    return rng.choice(SLIPS) * rng.choice((-1, 1))


def _near(total: int, slip: int) -> int:
    """Another number at this distance; no total is below 1."""
    return total + slip if total + slip >= 1 else total - slip


TASKS.register("sums")(Sums())
