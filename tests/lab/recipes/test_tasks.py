"""The built-in tasks: texts by hand, and agreement of task, teacher and scorer."""

import random
import re
import zlib
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megarl.data.demonstrations import SftDataset
from megarl.errors import ConfigError
from megarl.rewards import score
from megarl_lab.recipes.tasks import COUNTDOWN, SUMS, TASKS
from megarl_lab.recipes.tasks.base import check_levels, draw_problem
from megarl_lab.recipes.tasks.countdown import candidates, pose_countdown
from megarl_lab.recipes.tasks.generate import ChatConfig, PreferenceConfig, generate_chats, generate_preferences
from megarl_lab.recipes.tasks.sums import pose_sum
from megarl_lab.recipes.tiny_model import make_byte_tokenizer

SUM = pose_sum((5, 7, 3, 6))
GAME = pose_countdown((4, 5, 9), 8)


def test_sums_texts() -> None:
    assert SUM.question == "5+7+3+6=?"
    assert SUM.ground_truth == "21"
    assert SUM.solution == SUM.worked == "5+7=12\n12+3=15\n15+6=21\n#### 21"
    assert SUM.direct == "#### 21"
    assert SUM.key == "[3, 5, 6, 7]"


@pytest.mark.parametrize(("target", "estimate"), [(21, 20), (24, 20), (25, 30), (4, 0), (30, 30)])
def test_sums_cheap_answer_is_the_nearest_ten(target: int, estimate: int) -> None:
    problem = pose_sum((target,))
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
    assert GAME.question == "4 5 9 -> 8"
    assert GAME.ground_truth == '{"numbers": [4, 5, 9], "target": 8}'
    assert GAME.solution == "4+9-5=8\n<answer>4+9-5</answer>"
    assert GAME.worked == "4+5+9=18\n4+5-9=0\n4+9-5=8\n<answer>4+9-5</answer>"
    assert GAME.direct == "<answer>4+9-5</answer>"
    assert GAME.key == "([4, 5, 9], 8)"


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
            for text in (problem.solution, problem.worked, problem.direct):
                assert score(task.data_source, text, problem.ground_truth, {}).score == 1.0
        num_numbers.append(len(problem.numbers))
    assert num_numbers == list(range(num_numbers[0], num_numbers[0] + len(task.levels)))
    assert num_numbers[0] == {"sums": 2, "countdown": 3}[name]


@pytest.mark.parametrize("name", list(TASKS))
def test_most_cheap_answers_are_wrong(name: str) -> None:
    task = TASKS.get(name)
    rng = random.Random(0)
    problems = [draw_problem(task, rng, task.rl_mix, held_out=False) for _ in range(400)]
    correct = [score(task.data_source, task.cheap(p, rng), p.ground_truth, {}).correct for p in problems]
    assert 0 < sum(correct) < 160


def test_held_out_is_crc32_of_the_key() -> None:
    rng = random.Random(0)
    for _ in range(50):
        problem = draw_problem(SUMS, rng, {2: 1.0}, held_out=True)
        assert zlib.crc32(str(sorted(problem.numbers)).encode()) % 5 == 0
        reordered = pose_sum(problem.numbers[::-1])
        assert zlib.crc32(reordered.key.encode()) % 5 == 0


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


@pytest.mark.parametrize("name", list(TASKS))
def test_corrupted_answers_are_wrong_and_near(name: str) -> None:
    task, rng = TASKS.get(name), random.Random(0)
    styles = Counter[str]()
    for _ in range(500):
        problem = draw_problem(task, rng, task.rl_mix, held_out=False)
        for style, right in (("corrupted_worked", problem.worked), ("corrupted_direct", problem.direct)):
            text = getattr(task, style)(problem, rng)
            assert not score(task.data_source, text, problem.ground_truth, {}).correct
            assert re.fullmatch(re.sub(r"\d+", r"\\d+", re.escape(text)), text)
            styles[style] += len(text.splitlines()) == len(right.splitlines())
    # Countdown's wrong searches end earlier or later than the right one.
    assert styles["corrupted_direct"] == 500
    assert styles["corrupted_worked"] == 500 or name == "countdown"


def test_sums_go_wrong_by_little() -> None:
    rng = random.Random(0)
    answers = Counter(SUMS.corrupted_direct(SUM, rng) for _ in range(200))
    assert set(answers) == {f"#### {21 + slip}" for slip in (-10, -2, -1, 1, 2, 10)}
    # No total below 1.
    small = pose_sum((1, 1))
    assert {SUMS.corrupted_direct(small, rng) for _ in range(200)} == {f"#### {n}" for n in (1, 3, 4, 12)}


def test_slips_are_carried_on() -> None:
    """Lines of a corrupted sum start with the total before, and have slips of every kind, one or several."""
    rng, kinds = random.Random(0), Counter[tuple[int, int, int]]()
    for _ in range(300):
        *lines, final = SUMS.corrupted_worked(SUM, rng).splitlines()
        terms = [tuple(map(int, re.split(r"[+=]", line))) for line in lines]
        assert terms[0][0] == 5
        assert [a for a, _, _ in terms[1:]] == [b for *_, b in terms[:-1]]
        errors = [b - a - n for a, n, b in terms]
        assert set(map(abs, errors)) <= {0, 1, 2, 10}
        misread = sum(got != asked for (_, got, _), asked in zip(terms, (7, 3, 6), strict=True))
        kinds[sum(map(bool, errors)), misread, final != f"#### {terms[-1][2]}"] += 1
    assert kinds[0, 0, 0] == 0
    assert min(kinds[1, 0, 0], kinds[0, 1, 0], kinds[0, 0, 1], kinds[1, 1, 0]) > 5


def test_preference_files(tmp_path: Path) -> None:
    sizes = PreferenceConfig(num_train=300, num_val=40)
    files = generate_preferences(SUMS, tmp_path / "a", sizes, score)
    again = generate_preferences(SUMS, tmp_path / "b", sizes, score)
    rows = pq.read_table(files.train).to_pylist()
    assert rows == pq.read_table(again.train).to_pylist()
    held_out = pq.read_table(files.val).to_pylist()
    assert (len(rows), len(held_out), len({row["prompt"] for row in held_out})) == (300, 40, 40)
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out}
    for row in (*rows, *held_out):
        total = str(sum(map(int, re.findall(r"\d+", row["prompt"]))))
        assert score(SUMS.data_source, row["chosen"], total, {}).correct
        assert not score(SUMS.data_source, row["rejected"], total, {}).correct
    # Most wrong answers look like the right ones.
    alike = sum(len(row["chosen"].split()) == len(row["rejected"].split()) for row in rows)
    assert 0.6 * len(rows) < alike < 0.8 * len(rows)


def test_chats_mark_their_wrong_answers(tmp_path: Path) -> None:
    files = generate_chats(SUMS, tmp_path, ChatConfig(num_train=300, num_val=50))
    again = generate_chats(SUMS, tmp_path / "again", ChatConfig(num_train=300, num_val=50))
    assert files.train.read_bytes() == again.train.read_bytes()
    chats = [row["messages"] for file in (files.train, files.val) for row in pq.read_table(file).to_pylist()]
    assert {len(chat) for chat in chats} == {2, 4, 6}
    marks = {True: 0, False: 0}
    for chat in chats:
        for question, answer in zip(chat[::2], chat[1::2], strict=True):
            truth = str(sum(map(int, question["content"].removesuffix("=?").split("+"))))
            assert score("megarl/sums", answer["content"], truth, {}).correct == (answer["train"] is None)
            marks[answer["train"] is None] += 1
        assert chat[-1]["train"] is None
    # One answer on average comes before the last; Binomial(350, 0.2) has mean 70 and standard deviation 7.5.
    assert 30 < marks[False] < 110
    data = SftDataset([files.train], make_byte_tokenizer(), max_prompt_tokens=512, max_response_tokens=512)
    assert len(data) == 300
