"""Questions of arithmetic in words: every answer is right, and no calculation is in both files."""

import operator
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megarl.rewards import score
from megarl_lab.recipes.tasks.arithmetic import OPERATIONS, generate_arithmetic
from megarl_lab.recipes.tasks.generate import GenerateConfig

COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SIZES = GenerateConfig(seed=1, num_train=1500, num_val=200)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    files = generate_arithmetic(tmp_path_factory.mktemp("arithmetic"), SIZES)
    return {path.stem: pq.read_table(path).to_pylist() for path in (files.train, files.val)}


def question_of(row: dict) -> str:
    return row["prompt"][-1]["content"]


def test_questions_have_their_numbers_and_right_answers(rows: dict) -> None:
    assert [len(rows["train"]), len(rows["val"])] == [1500, 200]
    for row in (*rows["train"], *rows["val"]):
        a, symbol, b, _, result = row["extra_info"]["gold_solution"].split()
        # Which of the two is named first depends on the wording.
        assert sorted(re.findall(r"\d+", question_of(row)), key=int) == sorted((a, b), key=int)
        assert COMPUTE[symbol](int(a), int(b)) == int(result) == int(row["reward_model"]["ground_truth"])
        truth = row["reward_model"]["ground_truth"]
        assert score(row["data_source"], row["target"][0]["content"], truth, {}).correct
        assert score(row["data_source"], f"{result} things", truth, {}).correct
        assert not score(row["data_source"], f"{a} {symbol} {b} = {int(result) + 1}", truth, {}).correct


def test_held_out_calculations_are_in_no_wording_of_training(rows: dict) -> None:
    def calculations(split: str) -> set[tuple[str, ...]]:
        found = set()
        for row in rows[split]:
            a, symbol, b, *_ = row["extra_info"]["gold_solution"].split()
            found.add((symbol, a, b) if symbol == "-" else (symbol, *sorted((a, b))))
        return found

    assert calculations("train").isdisjoint(calculations("val"))
    for split, each in rows.items():
        assert len({question_of(row) for row in each}) == len(each), split
        assert {row["extra_info"]["gold_solution"].split()[1] for row in each} == set(OPERATIONS)


def test_a_seed_decides_all(tmp_path: Path) -> None:
    first, again = (generate_arithmetic(tmp_path / name, SIZES) for name in ("first", "again"))
    other = generate_arithmetic(tmp_path / "other", GenerateConfig(seed=2, num_train=1500, num_val=200))
    assert first.train.read_bytes() == again.train.read_bytes()
    assert first.train.read_bytes() != other.train.read_bytes()
