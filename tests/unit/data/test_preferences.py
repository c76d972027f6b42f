"""Preference pairs: what a file may say, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from megarl.data.preferences import PreferenceDataset
from megarl.errors import DataError

QUESTION, OTHER = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "3+3?"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dataset(path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int = 100) -> PreferenceDataset:
    return PreferenceDataset([path], tokenizer, max_tokens=max_tokens)


def text(tokenizer: PreTrainedTokenizerBase, answered: str) -> str:
    return f"<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n{answered}<|im_end|>\n"


FORMS = {
    "texts": {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    "turns": {"prompt": [QUESTION], "chosen": [answer("4")], "rejected": [answer("5")]},
    "messages": {"messages": [QUESTION], "chosen": "4", "rejected": [answer("5")]},
    "whole chats": {"chosen": [QUESTION, answer("4")], "rejected": [QUESTION, answer("5")]},
    "whole chats and their prompt": {
        "prompt": "2+2?",
        "chosen": [QUESTION, answer("4")],
        "rejected": [QUESTION, answer("5")],
    },
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_all_forms_mean_the_same_two_chats(
    form: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = dataset(write(tmp_path / "pairs.jsonl", form), tokenizer)
    chosen, rejected = data.rows([0])
    for row, answered in ((chosen, "4"), (rejected, "5")):
        # The last token is only the place of the score.
        assert tokenizer.decode(row.token_ids[:-1]) == text(tokenizer, answered)
        assert (row.num_prompt_tokens, row.scores["margin"].tolist()) == (len(row.token_ids) - 1, [0.0])
    assert (chosen.label, rejected.label) == ("pair:0/0", "pair:0/1")


def test_rows_of_several_pairs_and_their_margins(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    pairs = [{"prompt": "p", "chosen": f"c{i}", "rejected": f"r{i}", "margin": i / 2} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(pairs), tmp_path / "pairs.parquet")
    data = dataset(tmp_path / "pairs.parquet", tokenizer)
    assert len(data) == 3
    rows = data.rows([2, 0])
    assert [tokenizer.decode(row.token_ids).split("\n")[3][:2] for row in rows] == ["c2", "c0", "r2", "r0"]
    assert [row.scores["margin"].tolist() for row in rows] == [[1.0], [0.0], [0.0], [0.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": ""}, r"chosen ends with .*'content': ''}, expected an answer of the assistant"),
        ({"chosen": [answer("4"), QUESTION]}, "chosen ends with .*'role': 'user'"),
        ({"rejected": 5}, r"rejected is int, expected a list of \{role, content\}"),
        ({"rejected": "4"}, "chosen and rejected are the same answer"),
        ({"rejected": [OTHER, answer("5")]}, r"rejected answers .*3\+3\?.*, expected the same prompt"),
        ({"prompt": None}, r"chosen answers \[\], expected the same prompt in chosen, rejected and prompt"),
        ({"margin": "1"}, "margin is '1', expected a finite number, or none"),
        ({"margin": True}, "margin is True, expected a finite number"),
        ({"margin": float("inf")}, "margin is inf, expected a finite number"),
        ({"chosen": "4" * 90}, r"chosen: the conversation has 10[0-9] tokens, .* is 100; raise one of them"),
    ],
)
def test_a_bad_row_is_named(
    change: dict[str, Any], message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write(tmp_path / "pairs.jsonl", FORMS["texts"], {**FORMS["texts"], **change})
    with pytest.raises(DataError, match=rf"pairs\.jsonl row 1: {message}"):
        dataset(path, tokenizer)


def test_files_without_pairs(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="column 'rejected' is missing"):
        dataset(write(tmp_path / "pairs.jsonl", {"prompt": "p", "chosen": "4"}), tokenizer)
