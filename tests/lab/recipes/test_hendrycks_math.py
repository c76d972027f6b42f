"""Conversion of MATH: files in its forms, what is left out, and rows that are refused."""

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from megarl.config.algo import HintConfig
from megarl.config.schema import DataConfig
from megarl.data.demonstrations import SftDataset
from megarl.data.hints import HintPlacer, survey_hints
from megarl.data.prompts import PromptDataset
from megarl.errors import DataError
from megarl.rewards import score
from megarl_answers.extract import last_boxed
from megarl_answers.options import AnswerOptions
from megarl_lab.recipes.hendrycks_math import TRAIN_SOURCE, convert_math

TOOL = Path(__file__).parents[3] / "tools" / "prepare_data.py"
# As MATH writes them: a box with braces in it, one without braces, and a level that nobody knows.
ROWS: list[dict[str, Any]] = [
    {
        "problem": "What is $\\frac{1}{2}+\\frac{1}{4}$?",
        "level": "Level 1",
        "type": "Prealgebra",
        "solution": "Over 4 it is $\\frac{2}{4}+\\frac{1}{4}=\\boxed{\\frac{3}{4}}$.",
    },
    {
        "problem": "Find $x$ if $x-3=2$.",
        "level": "Level 5",
        "type": "Algebra",
        "solution": "Not $\\boxed{4}$: adding 3 gives $x=\\boxed 5$.",
    },
    {
        "problem": "Which set has the members 1 and 2?",
        "level": "Level ?",
        "type": "Geometry",
        "solution": "It is\n\\[\\boxed{\\{1,2\\}}.\\]",
    },
]
TRUTHS = ["\\frac{3}{4}", "5", "\\{1,2\\}"]
convert = partial(convert_math, data_source=TRAIN_SOURCE, read_answer=partial(last_boxed, options=AnswerOptions()))


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def directory(root: Path) -> Path:
    """MATH's original form; file 10 comes after file 9."""
    for name, row in zip(("algebra/9.json", "algebra/10.json", "geometry/1.json"), ROWS, strict=True):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps(row, indent=4))
    return root


def test_every_form_has_the_same_prompts(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    parquet = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), parquet)
    for place in (lines(tmp_path / "rows.jsonl", ROWS), parquet, directory(tmp_path / "MATH" / "train")):
        out = tmp_path / "out" / "train.parquet"
        assert convert([place], out) == [row["problem"] for row in ROWS]
        data = PromptDataset([out], tokenizer, DataConfig(max_prompt_tokens=300))
        prompts = [data[i] for i in range(len(data))]
        assert [p.ground_truth for p in prompts] == TRUTHS
        assert [p.uid for p in prompts] == [f"hendrycks_math:{i}" for i in range(3)]
        assert prompts[1].extra_info == {
            "index": 1,
            "split": "train",
            "gold_solution": ROWS[1]["solution"],
            "difficulty_score": 5,
            "subject": "Algebra",
        }
        assert "difficulty_score" not in prompts[2].extra_info
        assert "$x-3=2$. Let's think step by step and output the final answer within \\boxed{}." in str(
            tokenizer.decode(prompts[1].token_ids)
        )
        for p in prompts:
            assert score(p.data_source, p.extra_info["gold_solution"], p.ground_truth, p.extra_info).score == 1.0
            assert score(p.data_source, "\\boxed{77}", p.ground_truth, p.extra_info).score == -1.0
        hints = survey_hints(HintPlacer(tokenizer, HintConfig(), max_prompt_tokens=400), prompts)
        assert hints.counts == {"hendrycks_math": {"prompts": 3, "placed": 3}}
        demonstrations = SftDataset([out], tokenizer, max_prompt_tokens=300, max_response_tokens=100)
        row = demonstrations[0]
        assert tokenizer.decode(row.token_ids[row.num_prompt_tokens :]) == ROWS[0]["solution"] + "<|im_end|>"


def test_the_tool_leaves_the_test_split_out_of_training(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """MATH-500 is taken from the test split of MATH, on which people train too. Its levels are numbers."""
    row = {**ROWS[1], "subject": "Algebra", "level": 5, "answer": "5", "unique_id": "test/algebra/9.json"}
    del row["type"]
    test, train = lines(tmp_path / "test.jsonl", [row]), lines(tmp_path / "train.jsonl", ROWS)
    command = [
        sys.executable,
        str(TOOL),
        "--math",
        str(train),
        "--math-test",
        str(test),
        "--out",
        str(tmp_path / "out"),
    ]
    got = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TOOL.parents[1])
    assert got.stdout.splitlines() == [
        f"{tmp_path}/out/test.parquet: 1 rows",
        f"{tmp_path}/out/train.parquet: 2 rows",
    ]
    made = PromptDataset([tmp_path / "out/test.parquet"], tokenizer, DataConfig(max_prompt_tokens=300))[0]
    assert (made.data_source, made.ground_truth) == ("math500", "5")
    assert made.extra_info["difficulty_score"] == 5
    assert made.extra_info["subject"] == "Algebra"
    alone = subprocess.run([*command[:2], "--task", "sums", *command[4:]], capture_output=True, text=True, check=False)
    assert "--math-test: goes with --math" in alone.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problem": None}, "row 1: problem is None, expected a string"),
        ({"solution": 3}, "row 1: solution is 3, expected a string"),
        ({"solution": "So it is 5."}, r"row 1: the solution ends in 'So it is 5.', expected a \\boxed\{\} answer"),
        ({"solution": "It is $\\boxed{5$."}, "row 1: the solution ends in"),
        ({"level": "Level 6"}, "row 1: level is 'Level 6', expected 1 to 5, as in 'Level 5'"),
        ({"level": "hard"}, "row 1: level is 'hard', expected 1 to 5"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, change: Mapping[str, object], message: str) -> None:
    path = lines(tmp_path / "rows.jsonl", [ROWS[0], {**ROWS[1], **change}])
    with pytest.raises(DataError, match=message):
        convert([path], tmp_path / "out.parquet")


def test_a_directory_without_problems(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no \.json file; expected a directory of MATH"):
        convert([tmp_path], tmp_path / "out.parquet")
