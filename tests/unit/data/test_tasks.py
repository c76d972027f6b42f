"""The built-in tasks: texts by hand, and agreement of task, teacher and scorer."""

import random
import re
import zlib
from collections import Counter

import pytest

from megarl.data.tasks import TASKS, Countdown, Problem, Sums
from megarl.data.tasks.base import check_levels, draw_problem, is_held_out
from megarl.data.tasks.countdown import candidates
from megarl.errors import ConfigError
from megarl.rewards import score

SUMS = Sums()
SUM = Problem(numbers=(5, 7, 3, 6), target=21, level=3)
COUNTDOWN = Countdown()
GAME = Problem(numbers=(4, 5, 9), target=8, level=1)


def test_sums_texts() -> None:
    assert SUMS.question(SUM) == "5+7+3+6=?"
    assert SUMS.ground_truth(SUM) == "21"
    assert SUMS.solution(SUM) == SUMS.worked(SUM) == "5+7=12\n12+3=15\n15+6=21\n#### 21"
    assert SUMS.direct(SUM) == "#### 21"
    assert SUMS.key(SUM) == "[3, 5, 6, 7]"


@pytest.mark.parametrize(("target", "estimate"), [(21, 20), (24, 20), (25, 30), (4, 0), (30, 30)])
def test_sums_cheap_answer_is_the_nearest_ten(target: int, estimate: int) -> None:
    problem = Problem(numbers=(target,), target=target, level=1)
    assert SUMS.cheap(problem, random.Random(0)) == f"#### {estimate}"


def test_countdown_candidates_in_order() -> None:
    assert candidates((4, 5, 9)) == [("4+5+9", 18), ("4+5-9", 0), ("4+9-5", 8), ("5+9-4", 10)]
    assert candidates((1, 2, 3, 4)) == [
        ("1+2+3+4", 10),
        ("1+2+3-4", 2),
        ("1+2+4-3", 4),
        ("1+3+4-2", 6),
        ("2+3+4-1", 8),
    ]


def test_countdown_texts() -> None:
    assert COUNTDOWN.question(GAME) == "4 5 9 -> 8"
    assert COUNTDOWN.ground_truth(GAME) == '{"numbers": [4, 5, 9], "target": 8}'
    assert COUNTDOWN.solution(GAME) == "4+9-5=8\n<answer>4+9-5</answer>"
    assert COUNTDOWN.worked(GAME) == "4+5+9=18\n4+5-9=0\n4+9-5=8\n<answer>4+9-5</answer>"
    assert COUNTDOWN.direct(GAME) == "<answer>4+9-5</answer>"
    assert COUNTDOWN.key(GAME) == "([4, 5, 9], 8)"


def test_countdown_cheap_answer_is_any_candidate() -> None:
    rng = random.Random(0)
    assert {COUNTDOWN.cheap(GAME, rng) for _ in range(200)} == {
        f"<answer>{e}</answer>" for e in ("4+5+9", "4+5-9", "4+9-5", "5+9-4")
    }


@pytest.mark.parametrize("name", list(TASKS))
def test_right_demonstrations_score_and_levels_differ(name: str) -> None:
    task = TASKS.get(name)
    rng = random.Random(0)
    num_numbers = []
    for level in task.levels:
        for _ in range(50):
            problem = task.draw(rng, level)
            assert problem.level == level
            assert problem.target >= 1
            for text in (task.solution(problem), task.worked(problem), task.direct(problem)):
                assert score(task.data_source, text, task.ground_truth(problem), {}).score == 1.0
        num_numbers.append(len(problem.numbers))
    assert num_numbers == list(range(num_numbers[0], num_numbers[0] + len(task.levels)))
    assert num_numbers[0] == {"sums": 2, "countdown": 3}[name]


@pytest.mark.parametrize("name", list(TASKS))
def test_most_cheap_answers_are_wrong(name: str) -> None:
    task = TASKS.get(name)
    rng = random.Random(0)
    problems = [draw_problem(task, rng, task.rl_mix, held_out=False) for _ in range(400)]
    correct = [score(task.data_source, task.cheap(p, rng), task.ground_truth(p), {}).correct for p in problems]
    assert 0 < sum(correct) < 160


def test_held_out_is_crc32_of_the_key() -> None:
    rng = random.Random(0)
    for _ in range(50):
        problem = draw_problem(SUMS, rng, {2: 1.0}, held_out=True)
        assert zlib.crc32(str(sorted(problem.numbers)).encode()) % 5 == 0
        reordered = Problem(numbers=problem.numbers[::-1], target=problem.target, level=2)
        assert is_held_out(SUMS, reordered)


def test_levels_follow_their_weights() -> None:
    rng = random.Random(0)
    levels = Counter(draw_problem(SUMS, rng, {1: 1, 4: 3, 5: 0}, held_out=False).level for _ in range(1000))
    # About Binomial(1000, 1/4); the held-out keys of level 1 move it a little.
    assert set(levels) == {1, 4}
    assert 170 < levels[1] < 330


@pytest.mark.parametrize("mix", [{}, {0: 1.0}, {8: 1.0}, {1: -1.0, 2: 2.0}, {1: 0.0}])
def test_bad_levels(mix: dict[int, float]) -> None:
    with pytest.raises(ConfigError, match=r"levels of megarl/sums: got .*, of levels 1 to 7"):
        check_levels(SUMS, mix)


def test_unknown_task_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=re.escape("unknown task 'products'; expected one of: countdown, sums")):
        TASKS.get("products")
