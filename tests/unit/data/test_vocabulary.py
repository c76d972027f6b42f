"""Tokens that the model's embedding has no row for."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.config.algo import DemonstrationConfig, HintConfig
from megarl.config.schema import DataConfig
from megarl.data.demonstrations import SftDataset
from megarl.data.hints import HintPlacer
from megarl.data.preferences import PreferenceDataset, ResponsePairDataset
from megarl.data.prompts import PromptDataset
from megarl.data.vocabulary import EVERY_TOKEN, Vocabulary
from megarl.errors import ConfigError, DataError
from megarl.types import Message, Prompt
from megarl_lab.recipes.tiny_model import make_byte_tokenizer

LABEL = {"data_source": "mine", "reward_model": {"ground_truth": "2"}}
QUESTION, USE = [{"role": "user", "content": "1+1=?"}], [{"role": "user", "content": "Use <search>."}]


@pytest.fixture(scope="module")
def added() -> PreTrainedTokenizerBase:
    """The byte tokenizer, whose tokens fill its model's rows, with two more."""
    tokenizer = make_byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<search>", "</search>"]})
    return tokenizer


@pytest.fixture(scope="module")
def vocabulary(added: PreTrainedTokenizerBase) -> Vocabulary:
    return Vocabulary.of(added, len(added) - 2)


def write(path: Path, *rows: dict[str, Any]) -> list[Path]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [path]


def test_every_kind_of_file_names_the_row_and_the_token(
    added: PreTrainedTokenizerBase, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    rows = len(added) - 2
    problem = (
        rf"the token '<search>' with id {rows}, for which the model of model\.path has no row in its embedding "
        rf"\(vocab_size={rows}\); resize the model's embeddings, or remove the token from the tokenizer$"
    )
    path = tmp_path / "x.jsonl"
    prompt, target = {**LABEL, "prompt": QUESTION}, [{"role": "assistant", "content": "<search>2"}]
    files = write(path, prompt, {**LABEL, "prompt": USE})
    with pytest.raises(DataError, match=rf"^{path} row 1: has {problem}"):
        PromptDataset(files, added, DataConfig(max_prompt_tokens=100), vocabulary=vocabulary)
    assert (
        len(PromptDataset(files, added, DataConfig(max_prompt_tokens=100), vocabulary=Vocabulary.of(added, len(added))))
        == 2
    )
    files = write(path, prompt, {**prompt, "target": target})
    demonstrations = DemonstrationConfig(strategy="fixed")
    with pytest.raises(DataError, match=rf"^{path} row 1: target: has {problem}"):
        PromptDataset(
            files, added, DataConfig(max_prompt_tokens=100), demonstrations=demonstrations, vocabulary=vocabulary
        )
    files = write(path, {"messages": [*QUESTION, *target]})
    with pytest.raises(DataError, match=rf"^{path} row 0: has {problem}"):
        SftDataset(files, added, max_prompt_tokens=100, max_response_tokens=100, vocabulary=vocabulary)
    files = write(path, {"prompt": QUESTION, "chosen": "2", "rejected": "<search>"})
    with pytest.raises(DataError, match=rf"^{path} row 0: rejected: has {problem}"):
        PreferenceDataset(files, added, max_tokens=100, on_long="error", vocabulary=vocabulary)
    with pytest.raises(DataError, match=rf"^{path} row 0: rejected: has {problem}"):
        ResponsePairDataset(
            files, added, max_prompt_tokens=100, max_response_tokens=100, on_long="error", vocabulary=vocabulary
        )
    (ids,) = added(["1+1=?"], add_special_tokens=False)["input_ids"]
    hinted = Prompt(
        uid="mine:3",
        token_ids=tuple(ids),
        data_source="mine",
        ground_truth="2",
        extra_info={"solution": "<search> it"},
        messages=(Message(**QUESTION[0]),),
    )
    with pytest.raises(DataError, match=rf"^prompt mine:3 with its hint: has {problem}"):
        HintPlacer(added, HintConfig(), max_prompt_tokens=200, vocabulary=vocabulary).place(hinted)


def test_marks_of_the_template_and_the_end_token_need_rows(added: PreTrainedTokenizerBase) -> None:
    num_rows = added.convert_tokens_to_ids("<|im_start|>")
    written = rf"^model\.path: the tokenizer's chat template writes the token '<\|im_start\|>' with id {num_rows},"
    with pytest.raises(ConfigError, match=written):
        Vocabulary.of(added, num_rows)
    ending = make_byte_tokenizer()
    ending.add_special_tokens({"eos_token": "<end>"})
    with pytest.raises(ConfigError, match=r"^critic\.model_path: the tokenizer's eos_token is the token '<end>'"):
        Vocabulary.of(ending, len(ending) - 1, "critic.model_path")


def test_tokens_that_nothing_uses_are_a_warning_unless_later_texts_may(
    added: PreTrainedTokenizerBase, vocabulary: Vocabulary
) -> None:
    (warning,) = vocabulary.warnings
    assert warning.startswith("the tokenizer has 2 tokens, such as '<search>', for which the model of model.path")
    vocabulary.require_all("model.path", [])
    with pytest.raises(
        ConfigError, match=r"^model\.path: the tokenizer has the token '.*; environment e may write it$"
    ):
        vocabulary.require_all("model.path", ["environment e"])


def test_models_with_more_rows_than_tokens_lack_nothing(added: PreTrainedTokenizerBase) -> None:
    padded = Vocabulary.of(added, len(added) + 100)
    assert padded.warnings == EVERY_TOKEN.warnings == []
    padded.require(range(len(added) + 100), "x")
    padded.require_all("model.path", ["anything"])
