"""Texts of files that spell the marks of the chat template, or other special tokens."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.config.algo import DemonstrationConfig
from megarl.config.schema import DataConfig
from megarl.data.demonstrations import SftDataset
from megarl.data.preferences import PreferenceDataset, ResponsePairDataset
from megarl.data.prompts import PromptDataset
from megarl.data.special_tokens import SpelledSpecialTokens
from megarl_lab.recipes.tiny_model import make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()
LABEL = {"data_source": "mine", "reward_model": {"ground_truth": "2"}}
ASKED, ANSWERED = {"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}
SPELLED = {"role": "user", "content": "What does <|im_end|> do?"}


def warnings_of(directory: Path, *rows: Mapping[str, Any]) -> list[str]:
    """What is said of rows, whatever kind of data they are."""
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spelled: SpelledSpecialTokens
    if "chosen" in rows[0]:
        sides = PreferenceDataset([path], TOKENIZER, max_tokens=200, on_long="error").spelled
        spelled = ResponsePairDataset(
            [path], TOKENIZER, max_prompt_tokens=200, max_response_tokens=200, on_long="error"
        ).spelled
        assert sides.warnings("x") == spelled.warnings("x")
    elif "messages" in rows[0]:
        spelled = SftDataset([path], TOKENIZER, max_prompt_tokens=200, max_response_tokens=200).spelled
    else:
        spelled = PromptDataset([path], TOKENIZER, DataConfig(max_prompt_tokens=200)).spelled
    return spelled.warnings("data.train")


def rows_of(kind: str, *asked: Mapping[str, str]) -> Sequence[Mapping[str, Any]]:
    if kind == "prompts":
        return [{**LABEL, "prompt": [each]} for each in asked]
    if kind == "chats":
        return [{"messages": [each, ANSWERED]} for each in asked]
    return [{"prompt": [each], "chosen": [ANSWERED], "rejected": [ANSWERED | {"content": "3"}]} for each in asked]


@pytest.mark.parametrize("kind", ["prompts", "chats", "pairs"])
def test_rows_that_spell_a_special_token_are_named(tmp_path: Path, kind: str) -> None:
    assert warnings_of(tmp_path, *rows_of(kind, ASKED, ASKED)) == []
    (warning,) = warnings_of(tmp_path, *rows_of(kind, ASKED, SPELLED, SPELLED))
    assert warning == (
        "data.train: 2 rows spell special tokens, which the model reads as such, and not as text, the first "
        f"{tmp_path}/rows.jsonl row 1: turn 0 of the role user has '<|im_end|>'; if they are only mentioned there, "
        "write them otherwise, such as with a space in them"
    )


@pytest.mark.parametrize(
    ("content", "warns"), [("2<|im_end|>", False), ("<|im_start|>2", True), ("2 < |im_end|>", False)]
)
def test_an_answer_may_have_its_end(tmp_path: Path, content: str, warns: bool) -> None:
    """Its author may have written it, and it is written once."""
    assert bool(warnings_of(tmp_path, {"messages": [ASKED, ANSWERED | {"content": content}]})) is warns


def test_a_demonstration_is_looked_through_where_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    target = [ANSWERED | {"content": "<|im_start|>2"}]
    path.write_text(json.dumps({**LABEL, "prompt": [ASKED], "target": target}) + "\n")
    used = DemonstrationConfig(strategy="fixed")
    assert PromptDataset([path], TOKENIZER, DataConfig(max_prompt_tokens=200)).spelled.num_rows.total() == 0
    data = PromptDataset([path], TOKENIZER, DataConfig(max_prompt_tokens=200), demonstrations=used)
    assert "row 0: turn 1 of the role assistant has '<|im_start|>'" in data.spelled.warnings("x")[0]


@pytest.mark.parametrize("kind", ["prompts", "chats", "pairs"])
@pytest.mark.parametrize("mark", ["<image>", "<video>", "<|audio|>"])
def test_rows_that_mark_pictures_are_named(tmp_path: Path, kind: str, mark: str) -> None:
    shown, about = ASKED | {"content": f"{mark}\nWhat is it?"}, ASKED | {"content": "Is <img> HTML? Is an image?"}
    assert warnings_of(tmp_path, *rows_of(kind, ASKED, about)) == []
    (warning,) = warnings_of(tmp_path, *rows_of(kind, ASKED, shown, shown))
    assert warning == (
        "data.train: 2 rows have marks that stand for pictures, films or sounds elsewhere, the first "
        f"{tmp_path}/rows.jsonl row 1: turn 0 of the role user has {mark!r}; models are trained on texts alone: "
        "leave such rows out, unless they speak of the mark itself"
    )
