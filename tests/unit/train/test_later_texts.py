"""What becomes tokens only during a run is checked at its start: replies, judges' questions, a reward model's chats."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM

from megarl.config import Config, from_dict
from megarl.data.chat import TemplateRefusal, load_tokenizer
from megarl.errors import ConfigError
from megarl.train.inputs import TrainInputs, open_train_inputs
from tests.helpers.checkpoints import VOCAB_SIZE, add_value_head, make_checkpoint

NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
NO_TOOL = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "policy", tied=True)


def refuse(model: Path, rule: str) -> None:
    template = model / "chat_template.jinja"
    template.write_text(rule + template.read_text())


def opened(directory: Path, policy: Path, *, environment: str = "", **sections: Any) -> TrainInputs:
    row = {
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+5=?"}],
        "data_source": "megarl/sums",
        "reward_model": {"ground_truth": "8"},
        **({"environment": environment} if environment else {}),
    }
    (directory / "train.jsonl").write_text(json.dumps(row) + "\n")
    tree = {
        "model": {"path": str(policy), "dtype": "float32"},
        "data": {"max_prompt_tokens": 64, "train": [str(directory / "train.jsonl")]},
        "rollout": {"max_response_tokens": 64},
        "trainer": {"prompts_per_step": 1},
    }
    return open_train_inputs(from_dict(Config, {**tree, **sections}))


def test_tokens_without_a_row_are_refused_where_texts_come_up_later(policy: Path, tmp_path: Path) -> None:
    shutil.copytree(policy, tmp_path / "policy")
    tokenizer = load_tokenizer(policy)
    tokenizer.add_tokens(["<search>"])
    tokenizer.save_pretrained(tmp_path / "policy")
    (warning,) = opened(tmp_path, tmp_path / "policy").warnings
    assert warning.startswith("the tokenizer has 1 tokens, such as '<search>', for which the model of model.path")
    found = rf"^model\.path: the tokenizer has the token '<search>' with id {VOCAB_SIZE}, .*; environment guess may"
    with pytest.raises(ConfigError, match=found):
        opened(tmp_path, tmp_path / "policy", environment="guess")


def test_a_template_that_refuses_tools_is_refused_with_tools_alone(policy: Path, tmp_path: Path) -> None:
    shutil.copytree(policy, tmp_path / "policy")
    refuse(tmp_path / "policy", NO_TOOL)
    opened(tmp_path, tmp_path / "policy")
    opened(tmp_path, tmp_path / "policy", environment="guess")
    refused = r"^environment\.tool_role: .*'tool'\]: no tools; set environment\.tool_role=user"
    with pytest.raises(ConfigError, match=refused):
        opened(tmp_path, tmp_path / "policy", environment="calculator")


def test_a_reward_models_template_must_take_the_prompts(policy: Path, tmp_path: Path) -> None:
    add_value_head(policy, tmp_path / "reward")
    load_tokenizer(policy).save_pretrained(tmp_path / "reward")
    own = {"rewards": {"manager": "model"}, "reward_model": {"model_path": str(tmp_path / "reward")}}
    opened(tmp_path, policy, **own)
    refuse(tmp_path / "reward", NO_SYSTEM)
    with pytest.raises(TemplateRefusal, match=r"^prompt megarl/sums:0 for reward_model\.model_path: the chat template"):
        opened(tmp_path, policy, **own)


def test_a_critic_needs_rows_for_what_the_policy_writes(policy: Path, tmp_path: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(policy)
    model.resize_token_embeddings(VOCAB_SIZE - 1)
    model.save_pretrained(tmp_path / "critic")
    load_tokenizer(policy).save_pretrained(tmp_path / "critic")
    found = rf"^critic\.model_path: the model in .* has no row .* with id {VOCAB_SIZE - 1} \(vocab_size=263\)"
    algo = {"advantage": {"estimator": "gae"}}
    with pytest.raises(ConfigError, match=found):
        opened(tmp_path, policy, algo=algo, critic={"model_path": str(tmp_path / "critic")})
