"""Sums of one-digit numbers: `5+7+3+6=?`, answered by running totals and `#### 21`."""

import random
from itertools import accumulate, pairwise
from types import MappingProxyType

from megarl.data.tasks.base import TASKS, LevelMix, Problem

MAX_NUMBER = 9


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
        totals = pairwise(accumulate(problem.numbers))
        lines = [f"{a}+{n}={b}" for n, (a, b) in zip(problem.numbers[1:], totals, strict=True)]
        return "\n".join([*lines, self.direct(problem)])

    def worked(self, problem: Problem) -> str:
        return self.solution(problem)

    def direct(self, problem: Problem) -> str:
        return f"#### {problem.target}"

    def cheap(self, problem: Problem, rng: random.Random) -> str:
        return f"#### {(problem.target + 5) // 10 * 10}"


TASKS.register("sums")(Sums())
