"""The first mistake of an answer, against answers whose mistakes are marked by hand."""

import random

import pytest

from megarl_lab.recipes.tasks import COUNTDOWN, SUMS, TASKS, BuiltinTask, Problem
from megarl_lab.recipes.tasks.countdown import pose_countdown
from megarl_lab.recipes.tasks.mistakes import read_answer
from megarl_lab.recipes.tasks.sums import pose_sum

SUM = pose_sum((5, 7, 3))  # 15
SEARCH = pose_countdown((4, 5, 9), 8)  # 4+9-5
# Brackets stand around the mistake; they are no part of the answer.
SUM_MISTAKES = (
    ("5+7=1[3]\n13+3=16\n#### 16", False),  # a wrong total
    ("5+[8=13]\n13+3=16\n#### 16", False),  # a misread number
    ("5+7=12\n12+[5=17]\n#### 17", False),  # a number used twice
    ("5+7=12\n1[5+3=18]\n#### 18", False),  # another total than the one before
    ("5+7=12\n12+3=15\n#### 1[6]", True),  # a wrong answer after right steps
    ("5+7=12\n#### 1[2]", False),  # the answer of another question
    ("#### [20]", False),  # stated at once
    ("5+7=12\n12+3=15\n[15+3=18]\n#### 18", True),  # a step too many
    ("5+7=1[\n]#### 15", False),  # the line ends too early
    ("#### 1[]", False),  # the text does
    ("[]", False),
    ("[hello]\n5+7=12", False),
)
SEARCH_MISTAKES = (
    ("4+5+9=1[6]\n<answer>4+9-5</answer>", False),
    ("4+5+9=18\n4+5-9=0\n4+9+[9=22]\n<answer>4+9+9</answer>", False),
    ("4+5+9=18\n<answer>4+[5+9</answer>]", False),  # no right answer begins with 4+5
    ("4+9-5=8\n<answer>4+9-5[]", True),
    ("4+9-5=8\n<answer>4+9[</answer>]", True),
)
RIGHT = (
    (SUMS, SUM, "5+7=12\n12+3=15\n#### 15", True),
    (SUMS, SUM, "3+7=10\n10+5=15\n#### 15\n", True),  # another order
    (SUMS, SUM, "#### 15", False),
    (SUMS, SUM, "5+7=12\n#### 15", False),  # steps are missing
    (COUNTDOWN, SEARCH, "4+5+9=18\n4+5-9=0\n4+9-5=8\n<answer>4+9-5</answer>", True),
    (COUNTDOWN, SEARCH, "4+5-9=0\n<answer>9-5+4</answer>", False),
)


@pytest.mark.parametrize(
    ("task", "problem", "marked", "worked"),
    [*((SUMS, SUM, *case) for case in SUM_MISTAKES), *((COUNTDOWN, SEARCH, *case) for case in SEARCH_MISTAKES)],
)
def test_the_first_mistake_is_found(task: BuiltinTask, problem: Problem, marked: str, worked: bool) -> None:
    before, _, rest = marked.partition("[")
    wrong, _, after = rest.partition("]")
    read = read_answer(task, problem, before + wrong + after)
    # Where only the text's end is wrong, the mistake lies right behind it.
    assert read.mistake == slice(len(before), len(before) + max(len(wrong), 1))
    assert read.worked == worked


@pytest.mark.parametrize(("task", "problem", "text", "worked"), RIGHT)
def test_right_answers_have_none(task: BuiltinTask, problem: Problem, text: str, worked: bool) -> None:
    read = read_answer(task, problem, text)
    assert (read.mistake, read.worked, read.lines) == (None, worked, tuple(text.splitlines()))


@pytest.mark.parametrize("name", sorted(TASKS))
def test_demonstrations_are_right_and_corrupted_ones_wrong(name: str) -> None:
    task, rng = TASKS.get(name), random.Random(0)
    for level in (1, 2):
        for _ in range(50):
            problem = task.draw(rng, level)
            assert read_answer(task, problem, problem.worked).mistake is None
            assert read_answer(task, problem, problem.worked).worked
            assert read_answer(task, problem, problem.direct).mistake is None
            assert read_answer(task, problem, task.corrupted_direct(problem, rng)).mistake is not None
            assert read_answer(task, problem, task.corrupted_worked(problem, rng)).mistake is not None
