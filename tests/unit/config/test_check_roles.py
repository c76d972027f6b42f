"""Rules of reference and critic, by their messages."""

import re
from typing import Any

import pytest

from megarl.config import Config, from_dict
from megarl.config.check import check_sft, check_train, check_train_preference, check_train_reward
from megarl.config.check_model import check_model
from megarl.errors import ConfigError

HF_CONFIG = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "max_position_embeddings": 4096,
}
# 2 tensor-parallel ranks; 20 steps of 12 rows, in 2 optimizer steps of 6.
RUN: dict[str, Any] = {
    "model": {"path": "models/tiny"},
    "data": {"train": ["train.parquet"], "max_prompt_tokens": 100},
    "sft": {"train": ["demos.parquet"]},
    "actor": {"layout": {"tp": 2, "dp": 2}},
    "rollout": {"num_samples": 3, "max_response_tokens": 28},
    "trainer": {"total_steps": 20, "prompts_per_step": 4, "mini_batch_prompts": 2},
}


def config(**sections: Any) -> Config:
    return from_dict(Config, {**RUN, **sections})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"reference": {"layout": {"tp": 2, "pp": 3}}},
            "reference.layout: tp 2 × pp 3 × cp 1 × dp 1 = 6 ranks, expected <= 4, those of actor.layout, whose "
            "devices they use; lower it, raise actor.layout, or set reference.layout=null",
        ),
        (
            {"critic": {"layout": {"cp": 2, "dp": 3}}},
            "critic.layout: tp 1 × pp 1 × cp 2 × dp 3 = 6 ranks, expected <= 4, those of actor.layout, whose devices "
            "they use; lower it, raise actor.layout, or set critic.layout=null",
        ),
        (
            {"critic": {"layout": {"sequence_parallel": True}}},
            "critic.layout.sequence_parallel: got true with tp=1, but it shards over tensor-parallel ranks; "
            "set critic.layout.sequence_parallel=false or critic.layout.tp >= 2",
        ),
        (
            {"reference": {"layout": {"virtual_pp": 2}}},
            "reference.layout.virtual_pp: got 2 with pp=1, but there is only one stage; "
            "remove it or set reference.layout.pp >= 2",
        ),
        (
            {"reference": {"micro_batch_tokens": 127}},
            "reference.micro_batch_tokens: got 127, expected >= 128 (data.max_prompt_tokens=100 + "
            "rollout.max_response_tokens=28), or the longest row fits no micro-batch; raise it or shorten the two",
        ),
        (
            {"critic": {"micro_batch_tokens": 127}},
            "critic.micro_batch_tokens: got 127, expected >= 128 (data.max_prompt_tokens=100 + "
            "rollout.max_response_tokens=28), or the longest row fits no micro-batch; raise it or shorten the two",
        ),
        *(
            (
                {**sections, "algo": {"kl": {"where": "loss", "reset_every_steps": 5}}},
                f"algo.kl.reset_every_steps: got 5 with {key}, but only a whole model on the actor's ranks can "
                f"become the policy; set {key}=null",
            )
            for key, sections in {
                "reference.model_path": {"reference": {"model_path": "models/other"}},
                "reference.layout": {"reference": {"layout": {"tp": 2}}},
                "actor.lora": {"actor": {**RUN["actor"], "lora": {"rank": 4}}},
            }.items()
        ),
        (
            {"critic": {"warmup_steps": 21}},
            "critic.warmup_steps: got 21, expected <= trainer.total_steps=20, or the actor never trains; shorten it or "
            "lengthen the run",
        ),
        (
            {"reward_model": {"layout": {"pp": 5}}},
            "reward_model.layout: tp 1 × pp 5 × cp 1 × dp 1 = 5 ranks, expected <= 4, those of actor.layout, whose "
            "devices they use; lower it, raise actor.layout, or set reward_model.layout=null",
        ),
        (
            {"critic": {"lora": {"rank": 8}, "layout": {"dp": 2, "ep": 2, "etp": 2, "tp": 2}}},
            "critic.lora.targets: got experts with layout.etp=2, but ranks would have to exchange what tokens of other "
            "experts' adapters add; set etp=1 and raise ep, or leave experts out",
        ),
        (
            {"critic": {"lora": {"rank": 8}, "freeze": True}},
            "critic.lora.path: is not set, but these adapters are not trained; set it to a directory with some, or "
            "critic.lora=null",
        ),
        (
            {"reward_model": {"lora": {"rank": 8}}, "rewards": {"manager": "model"}},
            "reward_model.lora.path: is not set, but these adapters are not trained; set it to a directory with some, "
            "or reward_model.lora=null",
        ),
        (
            {"rewards": {"manager": "model"}},
            "reward_model.model_path: is not set, but rewards.manager=model asks a reward model; set it to a directory "
            "with score.weight, such as RUN/export of megarl train-reward, or change the manager",
        ),
    ],
)
def test_unsound_roles(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_train(config(**sections))


@pytest.mark.parametrize(
    "sections",
    [
        {"reference": {"layout": {"dp": 4}}},  # of 12 rows; the actor's 2 divide 6
        {"reference": {"layout": {"pp": 2}, "model_path": "other", "micro_batch_tokens": 128}},
        {"critic": {"layout": {"tp": 4, "sequence_parallel": True}, "micro_batch_tokens": 128}},
        {"critic": {"warmup_steps": 20, "optimizer": {"warmup_steps": 39}}},
        {"critic": {"freeze": True, "value_clip": None}},
        {"rewards": {"manager": "model"}, "reward_model": {"model_path": "judge", "layout": {"dp": 4}}},
    ],
)
def test_sound_roles(sections: dict[str, Any]) -> None:
    check_train(config(**sections))


def test_a_warm_start_has_neither() -> None:
    check_sft(config(critic={"layout": {"dp": 16}, "warmup_steps": 1000}))


PAIRS = {"train_reward": {"train": ["pairs.jsonl"]}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"train_reward": {}},
            "train_reward.train: is empty; list parquet or JSONL files, as in train_reward.train=[a.jsonl]",
        ),
        (
            {**PAIRS, "actor": {"micro_batch_tokens": 257}},
            "actor.micro_batch_tokens: got 257, expected >= 258, two conversations of up to data.max_prompt_tokens=100 "
            "+ rollout.max_response_tokens=28 tokens and a place for each score; raise it or shorten the two",
        ),
        (
            {**PAIRS, "reward_model": {"model_path": "judge"}},
            "reward_model: is for runs that are judged by a reward model; train-reward trains model.path with the "
            "settings of actor: set those, and leave reward_model out",
        ),
    ],
)
def test_unsound_reward_training(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_train_reward(config(**sections))


def test_sound_reward_training() -> None:
    check_train_reward(config(**PAIRS, actor={"micro_batch_tokens": 258}))


PREFERENCES = {"train_preference": {"train": ["pairs.jsonl"]}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"train_preference": {}},
            "train_preference.train: is empty; list parquet or JSONL files, as in train_preference.train=[a.jsonl]",
        ),
        (
            {"train_preference": {"train": ["pairs.jsonl"], "objective": "kto", "batch_size": 1}},
            "train_preference.batch_size: got 1, where no other pair lends the response that kto's KL is estimated "
            "with; raise it, or choose another train_preference.objective",
        ),
        (
            {**PREFERENCES, "actor": {"micro_batch_tokens": 255}},
            "actor.micro_batch_tokens: got 255, expected >= 256, two rows of up to data.max_prompt_tokens=100 + "
            "rollout.max_response_tokens=28 tokens, as the loss of a pair needs both; raise it or shorten the two",
        ),
        (
            {**PREFERENCES, "reference": {"layout": {"dp": 16}}},
            "reference.layout: tp 1 × pp 1 × cp 1 × dp 16 = 16 ranks, expected <= 4, those of actor.layout, whose "
            "devices they use; lower it, raise actor.layout, or set reference.layout=null",
        ),
    ],
)
def test_unsound_training_on_preferences(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_train_preference(config(**sections))


def test_sound_training_on_preferences() -> None:
    check_train_preference(config(**PREFERENCES, actor={"micro_batch_tokens": 256}))
    epochs = {"train": ["pairs.jsonl"], "total_epochs": 1}
    check_train_preference(config(train_preference=epochs, actor={"optimizer": {"warmup_steps": 600}}))


def test_a_model_of_its_own_fits_the_roles_layout() -> None:
    tree = config(reference={"layout": {"tp": 4}}, critic={"layout": {"pp": 4}, "model_path": "values"})
    check_model(tree, HF_CONFIG)
    check_model(tree, HF_CONFIG, "reference")
    with pytest.raises(
        ConfigError, match=r"^reference\.layout\.tp: got 4, .* num_attention_heads=6; valid values: 1, 2$"
    ):
        check_model(tree, HF_CONFIG | {"num_attention_heads": 6}, "reference")
    with pytest.raises(ConfigError, match=r"^critic\.layout: 6 layers do not split over pp=4 stages"):
        check_model(tree, HF_CONFIG, "critic")
    with pytest.raises(ConfigError, match=r"= 128, but the critic has max_position_embeddings=127; shorten one"):
        check_model(tree, HF_CONFIG | {"num_hidden_layers": 4, "max_position_embeddings": 127}, "critic")
    message = r"^critic\.model_path: config\.json has intermediate_size=None, expected a positive int; is it a causal"
    with pytest.raises(ConfigError, match=message):
        check_model(tree, HF_CONFIG | {"intermediate_size": None}, "critic")


def test_layouts_may_be_null_or_a_mapping_and_nothing_else() -> None:
    assert config(reference={"layout": None}).reference.layout is None
    with pytest.raises(
        ConfigError, match=re.escape("critic.layout: got 2 (int), expected {tp, pp, cp, dp, ep, etp, sequence_parallel")
    ):
        config(critic={"layout": 2})
    with pytest.raises(
        ConfigError, match=r"unknown key 'reference\.layout\.tpp'; did you mean 'reference\.layout\.tp'"
    ):
        config(reference={"layout": {"tpp": 2}})
    with pytest.raises(ConfigError, match=r"^critic\.layout\.cp: got 0, expected >= 1$"):
        check_train(config(critic={"layout": {"cp": 0}}))
