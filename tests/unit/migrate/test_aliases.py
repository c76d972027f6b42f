"""Names of other frameworks are answered with ours."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, cast, get_args, get_type_hints

import pytest

from megarl.config import Config, from_dict
from megarl.errors import UnknownKeyError
from megarl.migrate.aliases import ALIASES, answered, find_alias, unknown_options


def keys_of(cls: type, path: str = "") -> Iterator[str]:
    for key, hint in get_type_hints(cls).items():
        yield path + key
        # A section may be null.
        for section in filter(is_dataclass, (hint, *get_args(hint))):
            yield from keys_of(cast(type, section), f"{path}{key}.")


def test_every_alias_leads_to_a_key_of_the_schema_and_is_none_itself() -> None:
    known = set(keys_of(Config))
    targets = {key for alias in ALIASES.values() for key in alias.key.split()}
    assert targets <= known
    assert known.isdisjoint(ALIASES)
    assert all(alias.key or alias.note for alias in ALIASES.values())


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (
            {"actor_rollout_ref": {"rollout": {"n": 8}}},
            "unknown key 'actor_rollout_ref.rollout.n', verl's name for 'rollout.num_samples'",
        ),
        (
            {"data": {"train_batch_size": 64}},
            "unknown key 'data.train_batch_size', verl's name for 'trainer.prompts_per_step'",
        ),
        (
            {"micro_train_batch_size": 4},
            "unknown key 'micro_train_batch_size', OpenRLHF's name for 'actor.micro_batch_tokens' (tokens, not rows)",
        ),
        (
            {"eps_clip": 0.2},
            "unknown key 'eps_clip', OpenRLHF's name for 'algo.policy_loss.clip_low' and 'algo.policy_loss.clip_high'",
        ),
        (
            {"packing_samples": True},
            "unknown key 'packing_samples', of OpenRLHF (rows are always packed)",
        ),
        (
            {"critic": {"megatron": {"tensor_model_parallel_size": 2}}},
            "unknown key 'critic.megatron.tensor_model_parallel_size', verl's name for 'critic.layout.tp'",
        ),
        (
            {"ref": {"megatron": {"pipeline_model_parallel_size": 2}}},
            "unknown key 'ref.megatron.pipeline_model_parallel_size', verl's name for 'reference.layout.pp'",
        ),
        (
            {"reward_model": {"reward_manager": "naive"}},
            "unknown key 'reward_model.reward_manager', verl's name for 'rewards.manager' (naive is rule)",
        ),
        (
            {"custom_reward_function": {"path": "mine.py"}},
            "unknown key 'custom_reward_function.path', verl's name for 'rewards.custom.path'",
        ),
        (
            {"remote_rm_url": "http://judge:5000/get_reward"},
            "unknown key 'remote_rm_url', OpenRLHF's name for 'rewards.manager' and 'rewards.remote.urls' and "
            "'rewards.custom.path' (URLs with manager=remote, or a .py file with manager=rule)",
        ),
        (
            {"trainer": {"critic_warmup": 5}},
            "unknown key 'trainer.critic_warmup', verl's name for 'critic.warmup_steps'",
        ),
        (
            {"algorithm": {"wrap_method": "mi_qwen3"}},
            "unknown key 'algorithm.wrap_method', CPO's name for 'algo.cpo.method'",
        ),
        (  # an estimator to verl, a file of settings here
            {"algorithm": {"adv_estimator": "cpo"}},
            "unknown key 'algorithm.adv_estimator=cpo', of CPO (set use.algo=cpo, or another file of configs/algo)",
        ),
        (
            {"algorithm": {"adv_estimator": "gae"}},
            "unknown key 'algorithm.adv_estimator', verl's name for 'algo.advantage.estimator'",
        ),
        (
            {"algorithm": {"reward_source": "critic"}},
            "unknown key 'algorithm.reward_source', PPO_critic's name for 'algo.reward.source' (rule_based is rule)",
        ),
        (
            {"actor_rollout_ref": {"rollout": {"n_prefix": 4}}},
            "unknown key 'actor_rollout_ref.rollout.n_prefix', LUFFY's name for 'algo.demonstrations.num_prefixed'",
        ),
        (
            {"vllm_is_truncated_threshold": [0.5, 5.0]},
            "unknown key 'vllm_is_truncated_threshold', OpenRLHF's name for 'algo.correction.low' and "
            "'algo.correction.high'",
        ),
        (
            {"critic_learning_rate": 1e-5},
            "unknown key 'critic_learning_rate', OpenRLHF's name for 'critic.optimizer.lr'",
        ),
        (  # a feature that exists only in another form
            {"async_training": {"staleness_threshold": 0.5}},
            "unknown key 'async_training.staleness_threshold', of verl, asks for what is not supported here: "
            "asynchronous training in this form; choose use.schedule=one_step_off or use.schedule=async, see "
            "docs/async.md",
        ),
        (  # the first section left out
            {"rollout": {"n": 8}},
            "unknown key 'rollout.n', verl's name for 'rollout.num_samples'",
        ),
        (
            {"+trainer": {"val_before_train": False}},
            "unknown key 'trainer.val_before_train', verl's name for 'validation.before_train'",
        ),
        (
            {"actor_rollout_ref": {"rollout": {"tensor_model_parallel_size": 2}}},
            "unknown key 'actor_rollout_ref.rollout.tensor_model_parallel_size', verl's name for 'rollout.engine.tp'",
        ),
        (
            {"rollout": {"nnodes": 2}},
            "unknown key 'rollout.nnodes', verl's name for 'placement.engines.num_nodes' (with placement.mode=split)",
        ),
        (
            {"actor_rollout_ref": {"hybrid_engine": False}},
            "unknown key 'actor_rollout_ref.hybrid_engine', verl's name for 'placement.mode' "
            "(true is colocated, false is split)",
        ),
        (  # the actor's and the reference's mean the same
            {"megatron": {"param_offload": True}},
            "unknown key 'megatron.param_offload', verl's name for 'placement.offload' "
            "(parameters, gradients and optimizer state together)",
        ),
        (
            {"vllm_num_engines": 4},
            "unknown key 'vllm_num_engines', OpenRLHF's name for 'rollout.engine.num_engines'",
        ),
        (
            {"rollout": {"engine": {"tensor_parallel_size": 2}}},
            "unknown key 'rollout.engine.tensor_parallel_size', vLLM's name for 'rollout.engine.tp'",
        ),
        (  # GKD's, of TRL and ms-swift
            {"beta": 0.5},
            "unknown key 'beta', TRL's name for 'algo.distill.beta' (the same β, with algo.distill.divergence=jsd; "
            "0 is divergence=forward, 1 is reverse)",
        ),
        (
            {"rlhf_type": "gkd"},
            "unknown key 'rlhf_type=gkd', of ms-swift (set use.algo=gkd, or opd_exact for own samples alone)",
        ),
        (  # not one of verl's section of this name
            {"distillation": {"topk_logits_k": 64}},
            "unknown key 'distillation.topk_logits_k', NeMo-RL's name for 'algo.distill.top_k' (with "
            "algo.distill.mode=topk)",
        ),
        (
            {"trainer": {"loss": {"teacher_tau": 0.5}}},
            "unknown key 'trainer.loss.teacher_tau', prime-rl's name for 'algo.distill.coef'",
        ),
        (
            {"kl_discount_factor": 0.0},
            "unknown key 'kl_discount_factor', tinker's name for 'algo.distill.discount'",
        ),
        (
            {"opd_teacher_loads": ["a", "b"]},
            "unknown key 'opd_teacher_loads', of miles, asks for what is not supported here: a mean of several "
            "teachers; teachers.NAME teaches the data sources in its sources",
        ),
        (  # beside a name that nobody knows
            {"actor_rollout_ref": {"xyzzy": 1, "actor": {"ppo_epochs": 2}}},
            "unknown key 'actor_rollout_ref.actor.ppo_epochs', verl's name for 'trainer.num_epochs'",
        ),
    ],
)
def test_unknown_key(mapping: Any, expected: str) -> None:
    with pytest.raises(UnknownKeyError) as caught:
        from_dict(Config, mapping)
    assert str(answered(caught.value)) == expected


def test_a_name_that_no_framework_has() -> None:
    assert find_alias("actor_rollout_ref", {"xyzzy": 1}) is None
    # Two of verl's names end like this.
    assert find_alias("x.optim", {"lr_": 1}) is None


def test_options_of_the_command_line() -> None:
    assert unknown_options(["--micro-train_batch_size", "4", "--zzz=1"]) == (
        "unrecognized arguments: --micro-train_batch_size 4 --zzz=1; --micro-train_batch_size is OpenRLHF's name for "
        "'actor.micro_batch_tokens' (tokens, not rows); settings are given as key=value"
    )
