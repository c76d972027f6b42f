"""Sums of one-digit numbers: `5+7+3+6=?`, answered by running totals and `#### 21`."""

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType

from megarl.data.tasks.base import TASKS, LevelMix, Problem

MAX_NUMBER = 9

# How far off wrong totals are, how often a total is wrong in a corrupted answer, and how often a number is misread.
SLIPS = (1, 1, 2, 10)
WRONG_TOTAL_FRAC = 0.5
MISREAD_FRAC = 0.25


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
        return _worked(problem.numbers, list(accumulate(problem.numbers)), problem.target)

    def worked(self, problem: Problem) -> str:
        return self.solution(problem)

    def direct(self, problem: Problem) -> str:
        return f"#### {problem.target}"

    def cheap(self, problem: Problem, rng: random.Random) -> str:
        return f"#### {(problem.target + 5) // 10 * 10}"

    def corrupted_worked(self, problem: Problem, rng: random.Random) -> str:
        """Numbers misread and totals that are wrong, each followed by what follows from it, and at last the answer."""
        while True:
            numbers, totals = [*problem.numbers[:1]], [*problem.numbers[:1]]
            for number in problem.numbers[1:]:
                numbers.append(rng.randint(1, MAX_NUMBER) if rng.random() < MISREAD_FRAC else number)
                totals.append(_slipped(totals[-1] + numbers[-1], rng, WRONG_TOTAL_FRAC))
            answer = _slipped(totals[-1], rng, WRONG_TOTAL_FRAC)
            if answer != problem.target:
                return _worked(numbers, totals, answer)

    def corrupted_direct(self, problem: Problem, rng: random.Random) -> str:
        return f"#### {_slipped(problem.target, rng, 1.0)}"


def _worked(numbers: Sequence[int], totals: Sequence[int], answer: int) -> str:
    """Running totals and an answer, right or wrong."""
    lines = [f"{a}+{n}={b}" for n, (a, b) in zip(numbers[1:], pairwise(totals), strict=True)]
    return "\n".join([*lines, f"#### {answer}"])


def _slipped(total: int, rng: random.Random, slip_frac: float) -> int:
    """This total, or with some probability one near it, as one errs: a few off, or a carry. None is below 1."""
    if rng.random() >= slip_frac:
        return total
    slip = rng.choice(SLIPS) * rng.choice((-1, 1))
    return total + slip if total + slip >= 1 else total - slip


TASKS.register("sums")(Sums())
