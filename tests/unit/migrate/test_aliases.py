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
        ({"actor_rollout_ref": {"rollout": {"n": 8}}}, "actor_rollout_ref.rollout.n', verl's name for 'rollout.num_"),
        # The first section left out, or Hydra's sign before it.
        ({"rollout": {"n": 8}}, "rollout.n', verl's name for 'rollout.num_samples'"),
        ({"+trainer": {"val_before_train": False}}, "trainer.val_before_train', verl's name for 'validation.before_"),
        # Notes, several keys, and what is no feature.
        ({"micro_train_batch_size": 4}, "micro_train_batch_size', OpenRLHF's name for 'actor.micro_batch_tokens' (tok"),
        ({"eps_clip": 0.2}, "eps_clip', OpenRLHF's name for 'algo.policy_loss.clip_low' and 'algo.policy_loss.clip_hi"),
        ({"packing_samples": True}, "packing_samples', of OpenRLHF (rows are always packed)"),
        ({"async_training": {"staleness_threshold": 0.5}}, "async_training.staleness_threshold', of verl, asks for wh"),
        (
            {"opd_teacher_loads": ["a", "b"]},
            "opd_teacher_loads', of miles, asks for what is not supported here: a mean",
        ),
        # An estimator to verl, a file of settings here; others keep their meaning.
        ({"algorithm": {"adv_estimator": "cpo"}}, "algorithm.adv_estimator=cpo', of CPO (set use.algo=cpo, or"),
        ({"algorithm": {"adv_estimator": "gae"}}, "algorithm.adv_estimator', verl's name for 'algo.advantage.est"),
        # Sections of one name in several frameworks, and one name in several sections.
        ({"rollout": {"engine": {"tensor_parallel_size": 2}}}, "rollout.engine.tensor_parallel_size', vLLM's name for"),
        (
            {"distillation": {"topk_logits_k": 64}},
            "distillation.topk_logits_k', NeMo-RL's name for 'algo.distill.top_k",
        ),
        ({"megatron": {"param_offload": True}}, "megatron.param_offload', verl's name for 'placement.offload' (param"),
        ({"data": {"train_batch_size": 64}}, "data.train_batch_size', verl's name for 'trainer.prompts_per_step'"),
        (
            {"critic": {"megatron": {"tensor_model_parallel_size": 2}}},
            "critic.megatron.tensor_model_parallel_size', verl's",
        ),
        (
            {"ref": {"megatron": {"pipeline_model_parallel_size": 2}}},
            "ref.megatron.pipeline_model_parallel_size', verl's",
        ),
        (
            {"reward_model": {"reward_manager": "naive"}},
            "reward_model.reward_manager', verl's name for 'rewards.manager' (n",
        ),
        (
            {"custom_reward_function": {"path": "a.py"}},
            "custom_reward_function.path', verl's name for 'rewards.custom.p",
        ),
        (
            {"remote_rm_url": "http://judge"},
            "remote_rm_url', OpenRLHF's name for 'rewards.manager' and 'rewards.remote.u",
        ),
        ({"trainer": {"critic_warmup": 5}}, "trainer.critic_warmup', verl's name for 'critic.warmup_steps'"),
        ({"algorithm": {"wrap_method": "mi_qwen3"}}, "algorithm.wrap_method', CPO's name for 'algo.cpo.method'"),
        (
            {"algorithm": {"reward_source": "critic"}},
            "algorithm.reward_source', PPO_critic's name for 'algo.reward.sou",
        ),
        (
            {"actor_rollout_ref": {"rollout": {"n_prefix": 4}}},
            "actor_rollout_ref.rollout.n_prefix', LUFFY's name for 'a",
        ),
        (
            {"vllm_is_truncated_threshold": [0.5, 5.0]},
            "vllm_is_truncated_threshold', OpenRLHF's name for 'algo.correcti",
        ),
        ({"critic_learning_rate": 1e-5}, "critic_learning_rate', OpenRLHF's name for 'critic.optimizer.lr'"),
        (
            {"rollout": {"nnodes": 2}},
            "rollout.nnodes', verl's name for 'placement.engines.num_nodes' (with placement.mod",
        ),
        (
            {"actor_rollout_ref": {"hybrid_engine": False}},
            "actor_rollout_ref.hybrid_engine', verl's name for 'placement",
        ),
        ({"vllm_num_engines": 4}, "vllm_num_engines', OpenRLHF's name for 'rollout.engine.num_engines'"),
        ({"beta": 0.5}, "beta', TRL's name for 'algo.distill.beta' (the same β, with algo.distill.divergence=jsd; "),
        ({"rlhf_type": "gkd"}, "rlhf_type=gkd', of ms-swift (set use.algo=gkd, or opd_exact for own samples alone)"),
        (
            {"trainer": {"loss": {"teacher_tau": 0.5}}},
            "trainer.loss.teacher_tau', prime-rl's name for 'algo.distill.coef'",
        ),
        ({"kl_discount_factor": 0.0}, "kl_discount_factor', tinker's name for 'algo.distill.discount'"),
        # Beside a name that nobody knows.
        (
            {"actor_rollout_ref": {"xyzzy": 1, "actor": {"ppo_epochs": 2}}},
            "actor_rollout_ref.actor.ppo_epochs', verl's name for 'trainer.num_epochs'",
        ),
    ],
)
def test_unknown_key(mapping: Any, expected: str) -> None:
    with pytest.raises(UnknownKeyError) as caught:
        from_dict(Config, mapping)
    assert str(answered(caught.value)).startswith(f"unknown key '{expected}")


def test_a_name_that_no_framework_has() -> None:
    assert find_alias("actor_rollout_ref", {"xyzzy": 1}) is None
    # Two of verl's names end like this.
    assert find_alias("x.optim", {"lr_": 1}) is None


def test_options_of_the_command_line() -> None:
    assert unknown_options(["--micro-train_batch_size", "4", "--zzz=1"]) == (
        "unrecognized arguments: --micro-train_batch_size 4 --zzz=1; --micro-train_batch_size is OpenRLHF's name for "
        "'actor.micro_batch_tokens' (tokens, not rows); settings are given as key=value"
    )
