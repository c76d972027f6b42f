"""Preference pairs: what a file may say, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from megarl.data.preferences import OnLong, PreferenceDataset, ResponsePairDataset, mismatched_rows
from megarl.errors import DataError

SHORT_AND_LONG = [
    {"prompt": "2+2?", "chosen": "4", "rejected": "5", "margin": 1.0},
    {"prompt": "2+2?" * 30, "chosen": "4", "rejected": "5", "margin": 2.0},
    {"prompt": "2+2?", "chosen": "4", "rejected": "5" * 120, "margin": 3.0},
    {"prompt": "3+3?", "chosen": "6", "rejected": "7", "margin": 4.0},
]


QUESTION, OTHER = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "3+3?"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dataset(
    path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int = 100, on_long: OnLong = "error"
) -> PreferenceDataset:
    return PreferenceDataset([path], tokenizer, max_tokens=max_tokens, on_long=on_long)


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
        assert (row.num_prompt_tokens, row.quantities["margin"].tolist()) == (len(row.token_ids) - 1, [0.0])
    assert (chosen.label, rejected.label) == ("pair:0/0", "pair:0/1")


def test_rows_of_several_pairs_and_their_margins(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    pairs = [{"prompt": "p", "chosen": f"c{i}", "rejected": f"r{i}", "margin": i / 2} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(pairs), tmp_path / "pairs.parquet")
    data = dataset(tmp_path / "pairs.parquet", tokenizer)
    assert len(data) == 3
    rows = data.rows([2, 0])
    assert [tokenizer.decode(row.token_ids).split("\n")[3][:2] for row in rows] == ["c2", "c0", "r2", "r0"]
    assert [row.quantities["margin"].tolist() for row in rows] == [[1.0], [0.0], [0.0], [0.0]]


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


# --- pairs for policies


def responses(
    path: Path, tokenizer: PreTrainedTokenizerBase, on_long: OnLong = "error", **limits: int
) -> ResponsePairDataset:
    limits = {"max_prompt_tokens": 50, "max_response_tokens": 50, **limits}
    return ResponsePairDataset([path], tokenizer, on_long=on_long, **limits)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_policies_see_a_prompt_and_two_responses(
    form: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = responses(write(tmp_path / "pairs.jsonl", form), tokenizer)
    assert len(data) == 1
    for row, answered in zip(data.rows([0]), "45", strict=True):
        prompt, response = row.token_ids[: row.num_prompt_tokens], row.token_ids[row.num_prompt_tokens :]
        assert tokenizer.decode(prompt) == text(tokenizer, "").removesuffix("<|im_end|>\n")
        # The end token is part of what is learnt, the line feed that the template writes after it is not.
        assert tokenizer.decode(response) == f"{answered}<|im_end|>"
        assert row.loss_mask.all()
        assert row.quantities == {}
    assert [row.label for row in data.rows([0])] == ["pair:0/0", "pair:0/1"]


def test_chosen_responses_come_first(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    pairs = [{"prompt": "2+2?", "chosen": f"{i}", "rejected": f"{i}!"} for i in range(4)]
    rows = responses(write(tmp_path / "pairs.jsonl", *pairs), tokenizer).rows([3, 1])
    assert [row.uid for row in rows] == ["pair:3", "pair:1"] * 2
    answers = [tokenizer.decode(row.token_ids[row.num_prompt_tokens :]) for row in rows]
    assert answers == [f"{answered}<|im_end|>" for answered in ("3", "1", "3!", "1!")]


def test_long_pairs_are_dropped_whole(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "pairs.jsonl", *SHORT_AND_LONG)
    policies, judges = responses(path, tokenizer, "drop"), dataset(path, tokenizer, on_long="drop")
    for data in (policies, judges):
        assert (len(data), data.num_dropped) == (2, 2)
    rows = policies.rows([0, 1])
    answers = [tokenizer.decode(row.token_ids[row.num_prompt_tokens :]) for row in rows]
    assert answers == [f"{answered}<|im_end|>" for answered in "4657"]
    assert [tokenizer.decode(row.token_ids).split("\n")[1] for row in rows] == ["2+2?<|im_end|>", "3+3?<|im_end|>"] * 2
    assert [row.quantities["margin"].item() for row in judges.rows([0, 1])] == [1, 4, 0, 0]
    only_long = write(tmp_path / "long.jsonl", *SHORT_AND_LONG[1:3])
    for opened in (responses, dataset):
        with pytest.raises(DataError, match=r"^all 2 pairs .* raise one of them$"):
            opened(only_long, tokenizer, on_long="drop")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"max_prompt_tokens": 3},
            r"pairs\.jsonl.*: the prompt has \d+ tokens, data\.max_prompt_tokens is 3; raise it or set "
            r"train_preference\.on_long=drop",
        ),
        (
            {"max_response_tokens": 2},
            r"pairs\.jsonl.*: rejected: the response has \d+ tokens, rollout\.max_response_tokens is 2; raise it, "
            r"remove the row, or set train_preference\.on_long=drop",
        ),
    ],
)
def test_long_pairs_for_policies_are_refused_by_name(
    limits: dict[str, int], message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write(tmp_path / "pairs.jsonl", {"prompt": "2+2?", "chosen": "4", "rejected": "five and then some"})
    with pytest.raises(DataError, match=message):
        responses(path, tokenizer, **limits)


def test_mismatched_rows_answer_another_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    pairs = [{"prompt": f"{i}?", "chosen": f"{i}" * (i + 1), "rejected": f"-{i}"} for i in range(2)]
    mixed = mismatched_rows(responses(write(tmp_path / "pairs.jsonl", *pairs), tokenizer).rows([0, 1]))
    prompts = [tokenizer.decode(row.token_ids[: row.num_prompt_tokens]) for row in mixed]
    answers = [tokenizer.decode(row.token_ids[row.num_prompt_tokens :]) for row in mixed]
    # Prompts in their order; the responses are 0, 11, -0, -1, each one place on.
    assert [prompt.split("\n")[1].removesuffix("<|im_end|>") for prompt in prompts] == ["0?", "1?", "0?", "1?"]
    assert answers == [f"{answered}<|im_end|>" for answered in ("11", "-0", "-1", "0")]
    assert [row.num_loss_tokens for row in mixed] == [row.num_response_tokens for row in mixed]
