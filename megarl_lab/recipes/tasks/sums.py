"""Define the task of sums of one-digit numbers: `5+7+3+6=?` is answered by running totals and `#### 21`.

Level n adds n + 1 numbers from 1 to 9. The cheap answer is the sum to the nearest ten.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

from megarl_lab.recipes.tasks.base import TASKS, BuiltinTask, Problem

MAX_NUMBER = 9

# How far off wrong totals are, how often a total is wrong in a corrupted answer, and how often a number is misread.
SLIPS = (1, 1, 2, 10)
WRONG_TOTAL_FRAC = 0.5
MISREAD_FRAC = 0.25


def pose_sum(numbers: tuple[int, ...]) -> Problem:
    """Build the problem of adding these numbers."""
    total = sum(numbers)
    worked = _worked(numbers, list(accumulate(numbers)), total)
    return Problem(
        numbers=numbers,
        target=total,
        level=len(numbers) - 1,
        key=str(sorted(numbers)),
        question="+".join(map(str, numbers)) + "=?",
        ground_truth=str(total),
        solution=worked,
        worked=worked,
        direct=f"#### {total}",
    )


def _draw(rng: random.Random, level: int) -> Problem:
    return pose_sum(tuple(rng.randint(1, MAX_NUMBER) for _ in range(level + 1)))


def _cheap(problem: Problem, rng: random.Random) -> str:
    return f"#### {(problem.target + 5) // 10 * 10}"


def _corrupted_worked(problem: Problem, rng: random.Random) -> str:
    """Write running totals that lead to a wrong result: numbers may be misread, and the steps after a wrong total use
    it.
    """
    while True:
        numbers, totals = [*problem.numbers[:1]], [*problem.numbers[:1]]
        for number in problem.numbers[1:]:
            numbers.append(rng.randint(1, MAX_NUMBER) if rng.random() < MISREAD_FRAC else number)
            totals.append(_slipped(totals[-1] + numbers[-1], rng, WRONG_TOTAL_FRAC))
        answer = _slipped(totals[-1], rng, WRONG_TOTAL_FRAC)
        if answer != problem.target:
            return _worked(numbers, totals, answer)


def _corrupted_direct(problem: Problem, rng: random.Random) -> str:
    return f"#### {_slipped(problem.target, rng, 1.0)}"


def _next_lines(problem: Problem, lines: Sequence[str]) -> set[str]:
    """List the lines that may come next in a right answer: adding one of the numbers left, or the final answer."""
    answer = f"#### {problem.target}"
    if answer in lines:
        return set()
    left, totals = Counter(problem.numbers), set(problem.numbers)
    for step, line in enumerate(lines):
        before, number, total = map(int, re.split(r"[+=]", line))
        left -= Counter([number] if step else [before, number])
        totals = {total}
    steps = ((a, b) for a in totals for b in left if lines or a != b or left[b] > 1)
    return {answer, *(f"{a}+{b}={a + b}" for a, b in steps)}


def _worked(numbers: Sequence[int], totals: Sequence[int], answer: int) -> str:
    """Write the running totals and the final answer that are given, whether or not they are right."""
    lines = [f"{a}+{n}={b}" for n, (a, b) in zip(numbers[1:], pairwise(totals), strict=True)]
    return "\n".join([*lines, f"#### {answer}"])


def _slipped(total: int, rng: random.Random, slip_frac: float) -> int:
    """Return the total or, with probability `slip_frac`, a wrong total of at least 1, which is off by 1, 2 or 10."""
    if rng.random() >= slip_frac:
        return total
    slip = rng.choice(SLIPS) * rng.choice((-1, 1))
    return total + slip if total + slip >= 1 else total - slip


SUMS = TASKS.register("sums")(
    BuiltinTask(
        data_source="megarl/sums",
        levels=range(1, 8),
        sft_mix={1: 0.3, 2: 0.4, 3: 0.3},
        rl_mix={2: 0.5, 3: 0.5},
        draw=_draw,
        cheap=_cheap,
        corrupted_worked=_corrupted_worked,
        corrupted_direct=_corrupted_direct,
        next_lines=_next_lines,
    )
)
