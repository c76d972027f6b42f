"""Define the task Countdown: use every number once to reach a target. `4 5 9 -> 8` is solved by `4+9-5`.

A problem of level n has n + 2 numbers from 1 to 9 and is solved by adding all of them, or all but one, which is
subtracted: n + 3 candidates. The worked answer tries the candidates in order until one reaches the target, and ends
with `<answer>4+9-5</answer>`. The cheap answer is a random candidate.
"""

import json
import random
from collections.abc import Sequence
from itertools import permutations, product

from megarl_lab.recipes.tasks.base import TASKS, BuiltinTask, Problem

MAX_NUMBER = 9
# How often a wrong search ends with a value made to fit.
MISCALCULATED_FRAC = 0.5


def candidates(numbers: tuple[int, ...]) -> list[tuple[str, int]]:
    """List candidates and their values in search order: the plain sum, then the sums with one number subtracted."""
    total = sum(numbers)
    found = [("+".join(map(str, numbers)), total)]
    for i in reversed(range(len(numbers))):
        others = "+".join(map(str, numbers[:i] + numbers[i + 1 :]))
        found.append((f"{others}-{numbers[i]}", total - 2 * numbers[i]))
    return found


def pose_countdown(numbers: tuple[int, ...], target: int) -> Problem:
    """Build the problem of reaching `target`, which must be the value of one of the `candidates`."""
    found = candidates(numbers)
    first = [value for _, value in found].index(target)
    search = [f"{expression}={value}" for expression, value in found[: first + 1]]
    direct = f"<answer>{found[first][0]}</answer>"
    return Problem(
        numbers=numbers,
        target=target,
        level=len(numbers) - 2,
        key=str((sorted(numbers), target)),
        question=f"{' '.join(map(str, numbers))} -> {target}",
        ground_truth=json.dumps({"numbers": list(numbers), "target": target}),
        solution=f"{search[-1]}\n{direct}",
        worked="\n".join([*search, direct]),
        direct=direct,
    )


def _draw(rng: random.Random, level: int) -> Problem:
    while True:
        numbers = tuple(rng.randint(1, MAX_NUMBER) for _ in range(level + 2))
        _, target = rng.choice(candidates(numbers))
        if target >= 1:
            return pose_countdown(numbers, target)


def _cheap(problem: Problem, rng: random.Random) -> str:
    return f"<answer>{rng.choice(candidates(problem.numbers))[0]}</answer>"


def _corrupted_worked(problem: Problem, rng: random.Random) -> str:
    """Write a search that ends at an expression of the wrong value; the answer may claim that it equals the target."""
    found = candidates(problem.numbers)
    wrong = [i for i, (_, value) in enumerate(found) if value != problem.target]
    last = rng.choice(wrong)
    lines = [f"{expression}={value}" for expression, value in found[: last + 1]]
    if rng.random() < MISCALCULATED_FRAC:
        lines[last] = f"{found[last][0]}={problem.target}"
    return "\n".join([*lines, f"<answer>{found[last][0]}</answer>"])


def _corrupted_direct(problem: Problem, rng: random.Random) -> str:
    wrong = [expression for expression, value in candidates(problem.numbers) if value != problem.target]
    return f"<answer>{rng.choice(wrong)}</answer>"


def _next_lines(problem: Problem, lines: Sequence[str]) -> set[str]:
    """List the lines that may come next in a right answer: any expression with its value, or a right final answer."""
    if lines and lines[-1].startswith("<answer>"):
        return set()
    found = set()
    for order in set(permutations(problem.numbers)):
        for signs in product((1, -1), repeat=len(order) - 1):
            expression = f"{order[0]}" + "".join(f"{s * n:+d}" for s, n in zip(signs, order[1:], strict=True))
            value = order[0] + sum(s * n for s, n in zip(signs, order[1:], strict=True))
            found.add(f"{expression}={value}")
            if value == problem.target:
                found.add(f"<answer>{expression}</answer>")
    return found


COUNTDOWN = TASKS.register("countdown")(
    BuiltinTask(
        data_source="megarl/countdown",
        levels=range(1, 5),
        sft_mix={1: 1.0},
        rl_mix={1: 1.0},
        draw=_draw,
        cheap=_cheap,
        corrupted_worked=_corrupted_worked,
        corrupted_direct=_corrupted_direct,
        next_lines=_next_lines,
    )
)
