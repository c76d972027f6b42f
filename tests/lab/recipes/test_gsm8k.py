"""Conversion of GSM8K's JSON lines."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.config.schema import DataConfig
from megarl.data.demonstrations import SftDataset
from megarl.data.prompts import PromptDataset
from megarl.errors import DataError
from megarl.rewards import score
from megarl_lab.recipes.gsm8k import convert_gsm8k

ROWS = [
    {"question": "How much is 2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4"},
    {"question": "A thousand dollars and 500?", "answer": "So $1,500.\n#### 1,500"},
]


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_conversion(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    out = convert_gsm8k(write(tmp_path / "train.jsonl", ROWS), tmp_path / "out")
    assert out == tmp_path / "out" / "train.parquet"
    data = PromptDataset([out], tokenizer, DataConfig(max_prompt_tokens=200))
    prompts = [data[i] for i in range(len(data))]
    assert [p.ground_truth for p in prompts] == ["4", "1500"]
    assert [p.uid for p in prompts] == ["openai/gsm8k:0", "openai/gsm8k:1"]
    assert prompts[1].extra_info == {"index": 1, "split": "train", "gold_solution": ROWS[1]["answer"]}
    text = tokenizer.decode(prompts[0].token_ids)
    assert 'How much is 2+2? Let\'s think step by step and output the final answer after "####".' in text
    for p in prompts:
        assert score(p.data_source, p.extra_info["gold_solution"], p.ground_truth, p.extra_info).correct
    demonstrations = SftDataset([out], tokenizer, max_prompt_tokens=200, max_response_tokens=100)
    row = demonstrations[0]
    response = row.token_ids[row.num_prompt_tokens :]
    assert tokenizer.decode(response) == "2+2=<<2+2=4>>4\n#### 4<|im_end|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?", "answer": "4"}, "row 1: the answer ends in '4', expected '#### value'"),
        ({"question": "?", "answer": "x #### "}, "row 1: the answer ends in"),
        ({"question": 3, "answer": "x #### 4"}, "row 1: question is 3, expected a string"),
        ({"question": "?"}, "row 1: answer is missing, expected a string"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict[str, object], message: str) -> None:
    path = write(tmp_path / "train.jsonl", [{"question": "?", "answer": "x\n#### 1"}, row])
    with pytest.raises(DataError, match=message):
        convert_gsm8k(path, tmp_path)
