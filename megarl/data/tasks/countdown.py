"""Countdown: use every number once to reach the target: `4 5 9 -> 8`, answered `<answer>4+9-5</answer>`."""

import json
import random
from types import MappingProxyType

from megarl.data.tasks.base import TASKS, LevelMix, Problem

MAX_NUMBER = 9
# How often a wrong search ends with a value made to fit.
MISCALCULATED_FRAC = 0.5


def candidates(numbers: tuple[int, ...]) -> list[tuple[str, int]]:
    """Expressions and values in the order of the search: all added, then the last subtracted … the first."""
    total = sum(numbers)
    found = [("+".join(map(str, numbers)), total)]
    for i in reversed(range(len(numbers))):
        others = "+".join(map(str, numbers[:i] + numbers[i + 1 :]))
        found.append((f"{others}-{numbers[i]}", total - 2 * numbers[i]))
    return found


class Countdown:
    """Level n has n + 2 numbers from 1 to 9, all added but at most one, and so n + 3 candidates to search.

    The worked answer tries the candidates in order until one hits; the cheap one is a random candidate.
    """

    data_source = "megarl/countdown"
    levels = range(1, 5)
    sft_mix: LevelMix = MappingProxyType({1: 1.0})
    rl_mix: LevelMix = MappingProxyType({1: 1.0})

    def draw(self, rng: random.Random, level: int) -> Problem:
        while True:
            numbers = tuple(rng.randint(1, MAX_NUMBER) for _ in range(level + 2))
            _, target = rng.choice(candidates(numbers))
            if target >= 1:
                return Problem(numbers=numbers, target=target, level=level)

    def key(self, problem: Problem) -> str:
        return str((sorted(problem.numbers), problem.target))

    def question(self, problem: Problem) -> str:
        return f"{' '.join(map(str, problem.numbers))} -> {problem.target}"

    def ground_truth(self, problem: Problem) -> str:
        return json.dumps({"numbers": list(problem.numbers), "target": problem.target})

    def solution(self, problem: Problem) -> str:
        return f"{self._search(problem)[-1]}\n{self.direct(problem)}"

    def worked(self, problem: Problem) -> str:
        return "\n".join([*self._search(problem), self.direct(problem)])

    def direct(self, problem: Problem) -> str:
        expression, _, _ = self._search(problem)[-1].partition("=")
        return f"<answer>{expression}</answer>"

    def cheap(self, problem: Problem, rng: random.Random) -> str:
        return f"<answer>{rng.choice(candidates(problem.numbers))[0]}</answer>"

    def corrupted_worked(self, problem: Problem, rng: random.Random) -> str:
        """A search that stops at a wrong candidate, whose value it may miscalculate to be the target."""
        found = candidates(problem.numbers)
        wrong = [i for i, (_, value) in enumerate(found) if value != problem.target]
        last = rng.choice(wrong)
        lines = [f"{expression}={value}" for expression, value in found[: last + 1]]
        if rng.random() < MISCALCULATED_FRAC:
            lines[last] = f"{found[last][0]}={problem.target}"
        return "\n".join([*lines, f"<answer>{found[last][0]}</answer>"])

    def corrupted_direct(self, problem: Problem, rng: random.Random) -> str:
        wrong = [expression for expression, value in candidates(problem.numbers) if value != problem.target]
        return f"<answer>{rng.choice(wrong)}</answer>"

    def _search(self, problem: Problem) -> list[str]:
        lines = []
        for expression, value in candidates(problem.numbers):
            lines.append(f"{expression}={value}")
            if value == problem.target:
                break
        return lines


TASKS.register("countdown")(Countdown())
