"""Data sets of prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.config.algo import CpoConfig, DemonstrationConfig, HintConfig
from megarl.config.environments import EnvironmentConfig
from megarl.config.schema import DataConfig
from megarl.data.hints import hint_text
from megarl.data.prompts import PromptDataset
from megarl.errors import DataError
from megarl.train.rows import stated_difficulty

# <|im_start|>user\n … <|im_end|>\n<|im_start|>assistant\n around a question of one token per character.
NUM_TEMPLATE_TOKENS = 8
DEMONSTRATED = CpoConfig(hint=HintConfig(source="demonstration"))


def row(question: str, **changes: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question}],
        "data_source": "megarl/sums",
        "reward_model": {"style": "rule", "ground_truth": str(len(question))},
        "extra_info": {"index": 7},
        **changes,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_prompts(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [row("1"), row("22")])
    second = write(tmp_path / "b.jsonl", [row("333", data_source="other")])
    data = PromptDataset([first, second], tokenizer, DataConfig(max_prompt_tokens=NUM_TEMPLATE_TOKENS + 3))
    assert len(data) == 3
    assert [data[i].uid for i in range(3)] == ["megarl/sums:0", "megarl/sums:1", "other:2"]
    assert [len(data[i].token_ids) for i in range(3)] == [NUM_TEMPLATE_TOKENS + n for n in (1, 2, 3)]
    prompt = data[1]
    assert (prompt.data_source, prompt.ground_truth, prompt.extra_info) == ("megarl/sums", "2", {"index": 7})
    assert tokenizer.decode(prompt.token_ids) == "<|im_start|>user\n22<|im_end|>\n<|im_start|>assistant\n"
    assert data.data_sources == {"megarl/sums", "other"}
    assert data.num_dropped == 0


def test_the_text_of_a_target_is_read_where_hints_are_made_of_it(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", [row("1", target=[{"role": "assistant", "content": "1=1"}]), row("22")])
    data = PromptDataset([path], tokenizer, DataConfig(max_prompt_tokens=100), cpo=DEMONSTRATED)
    assert [data[i].target for i in range(2)] == ["1=1", ""]
    assert data[0].demonstration_ids == ()
    assert PromptDataset([path], tokenizer, DataConfig(max_prompt_tokens=100))[0].target == ""


def test_columns_of_demonstrations_and_hints_are_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [
        row("1", worked="1=1", why="one", ease=-1, extra_info={}),
        row(
            "22",
            worked=[{"role": "assistant", "content": "2=2"}],
            why="two",
            ease=1,
            extra_info={"why": "2", "ease": 0},
        ),
    ]
    path, form = write(tmp_path / "a.jsonl", rows), DataConfig(max_prompt_tokens=100, target_key="worked")
    data = PromptDataset([path], tokenizer, form, demonstrations=DemonstrationConfig(), cpo=DEMONSTRATED)
    assert [data[i].target for i in range(2)] == ["1=1", "2=2"]
    assert [tokenizer.decode(data[i].demonstration_ids) for i in range(2)] == ["1=1<|im_end|>", "2=2<|im_end|>"]
    cpo = CpoConfig(difficulty="data", difficulty_field="ease", hint=HintConfig(field="why"))
    data = PromptDataset([path], tokenizer, form, cpo=cpo)
    assert [hint_text(data[i], cpo.hint) for i in range(2)] == ["one", "2"]
    assert [stated_difficulty(data[i], cpo.difficulty_field) for i in range(2)] == [-1, 0]
    with pytest.raises(DataError, match=r"none of the 2 prompts .* add the column target, "):
        PromptDataset([path], tokenizer, DataConfig(max_prompt_tokens=99), demonstrations=DemonstrationConfig())


@pytest.mark.parametrize("blank", ["", " \n"])
def test_blank_prompts_are_refused_unless_an_environment_writes_them(
    blank: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    system = {"role": "system", "content": "Be brief."}
    for turns in (blank, row(blank)["prompt"], [system, *row(blank)["prompt"]]):
        path = write(tmp_path / "a.jsonl", [row("1"), row("", prompt=turns)])
        with pytest.raises(DataError, match=r"a\.jsonl row 1: the turns before the answer are blank, expected a quest"):
            PromptDataset([path], tokenizer, DataConfig())
        assert len(PromptDataset([path], tokenizer, DataConfig(), environment=EnvironmentConfig(default="game"))) == 2
    path = write(tmp_path / "a.jsonl", [row("", prompt=[*row(blank)["prompt"], *row("1")["prompt"]])])
    assert len(PromptDataset([path], tokenizer, DataConfig())) == 1


def test_long_prompts_are_an_error_or_dropped(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row("1"), row("4444"), row("22")])
    limit = NUM_TEMPLATE_TOKENS + 3
    with pytest.raises(DataError, match=r"a\.jsonl row 1: the prompt has 12 tokens, data.max_prompt_tokens is 11"):
        PromptDataset([path], tokenizer, DataConfig(max_prompt_tokens=limit))
    data = PromptDataset([path], tokenizer, DataConfig(max_prompt_tokens=limit, on_long_prompt="drop"))
    assert data.num_dropped == 1
    # The uid keeps the place in the file, so that it does not depend on the limit.
    assert [(data[i].uid, data[i].ground_truth) for i in range(2)] == [
        ("megarl/sums:0", "1"),
        ("megarl/sums:2", "2"),
    ]
    with pytest.raises(DataError, match=r"all 3 prompts have more tokens than data.max_prompt_tokens=2"):
        PromptDataset([path], tokenizer, DataConfig(max_prompt_tokens=2, on_long_prompt="drop"))


def test_a_bad_row_stops_at_once(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row("1"), row("2", reward_model={"style": "rule"})])
    with pytest.raises(DataError, match=r"a\.jsonl row 1: reward_model: ground_truth is missing"):
        PromptDataset([path], tokenizer, DataConfig(max_prompt_tokens=100))
    path = write(tmp_path / "b.jsonl", [{"question": "1+1"}])
    with pytest.raises(DataError, match=r"b\.jsonl: column 'prompt' is missing; there are: question"):
        PromptDataset([path], tokenizer, DataConfig(max_prompt_tokens=100))
