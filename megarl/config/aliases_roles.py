"""List options of verl and OpenRLHF for reference, critic, reward model and rewards, which `aliases` looks up."""

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

from megarl.config import translate
from megarl.config.translate import UNSET

# By the other framework's name: our key (or keys, separated by spaces), optionally a note on what differs ("": none),
# and then the rule that translates values.
Entries: TypeAlias = Mapping[str, tuple[Any, ...]]

_TOKENS = "tokens, not rows"
_ALL_PARTS = "parameters, gradients and optimizer state together"
_DEVICES = "it runs on the devices of the actor's ranks, placement.trainer"
_MODEL_REWARDS = translate.choose({True: "model", False: UNSET, None: UNSET})
_MANAGER = translate.choose({"naive": "rule", "dapo": "rule", "prime": "rule", "gdpo": "rule", "remote": "remote"})
_REFERENCE = "actor_rollout_ref.ref"

VERL_ROLES: Entries = {
    f"{_REFERENCE}.log_prob_max_token_len_per_gpu": ("reference.micro_batch_tokens", "", translate.VERL_TOKENS),
    f"{_REFERENCE}.log_prob_micro_batch_size": ("reference.micro_batch_tokens", _TOKENS, lambda *_: UNSET),
    f"{_REFERENCE}.log_prob_micro_batch_size_per_gpu": ("reference.micro_batch_tokens", _TOKENS, translate.VERL_ROWS),
    f"{_REFERENCE}.megatron.context_parallel_size": ("reference.layout.cp",),
    f"{_REFERENCE}.megatron.expert_model_parallel_size": ("reference.layout.ep",),
    f"{_REFERENCE}.megatron.expert_tensor_parallel_size": ("reference.layout.etp",),
    f"{_REFERENCE}.megatron.param_offload": ("placement.offload", _ALL_PARTS, translate.SWITCH),
    f"{_REFERENCE}.megatron.pipeline_model_parallel_size": ("reference.layout.pp",),
    f"{_REFERENCE}.megatron.sequence_parallel": ("reference.layout.sequence_parallel",),
    f"{_REFERENCE}.megatron.tensor_model_parallel_size": ("reference.layout.tp",),
    f"{_REFERENCE}.megatron.virtual_pipeline_model_parallel_size": ("reference.layout.virtual_pp",),
    f"{_REFERENCE}.model.path": ("reference.model_path",),
    "critic.cliprange_value": ("critic.value_clip",),
    "critic.forward_max_token_len_per_gpu": ("critic.micro_batch_tokens", "", lambda *_: UNSET),
    "critic.forward_micro_batch_size_per_gpu": ("critic.micro_batch_tokens", _TOKENS, lambda *_: UNSET),
    "critic.grad_clip": ("critic.optimizer.clip_grad_norm",),
    "critic.loss_agg_mode": ("", "the critic's loss is a mean over tokens"),
    "critic.megatron.context_parallel_size": ("critic.layout.cp",),
    "critic.megatron.expert_model_parallel_size": ("critic.layout.ep",),
    "critic.megatron.expert_tensor_parallel_size": ("critic.layout.etp",),
    "critic.megatron.grad_offload": ("placement.offload", _ALL_PARTS, translate.SWITCH),
    "critic.megatron.optimizer_offload": ("placement.offload", _ALL_PARTS, translate.SWITCH),
    "critic.megatron.override_transformer_config.recompute_granularity": ("critic.recompute",),
    "critic.megatron.param_offload": ("placement.offload", _ALL_PARTS, translate.SWITCH),
    "critic.megatron.pipeline_model_parallel_size": ("critic.layout.pp",),
    "critic.megatron.sequence_parallel": ("critic.layout.sequence_parallel",),
    "critic.megatron.tensor_model_parallel_size": ("critic.layout.tp",),
    "critic.megatron.use_distributed_optimizer": ("critic.optimizer.distributed",),
    "critic.megatron.virtual_pipeline_model_parallel_size": ("critic.layout.virtual_pp",),
    "critic.model.enable_gradient_checkpointing": ("critic.recompute", "none, selective or full", translate.RECOMPUTE),
    "critic.model.path": ("critic.model_path",),
    "critic.model.tokenizer_path": ("", "the critic must have the tokenizer of model.path"),
    "critic.optim.clip_grad": ("critic.optimizer.clip_grad_norm",),
    "critic.optim.lr": ("critic.optimizer.lr",),
    "critic.optim.lr_decay_style": ("critic.optimizer.schedule", "", translate.SCHEDULE),
    "critic.optim.lr_warmup_steps": ("critic.optimizer.warmup_steps", "", translate.warmup_steps),
    "critic.optim.lr_warmup_steps_ratio": (
        "critic.optimizer.warmup_steps",
        "a number of steps",
        partial(translate.warmup_share, steps="trainer.total_training_steps", given="critic.optim.lr_warmup_steps"),
    ),
    "critic.optim.min_lr_ratio": ("critic.optimizer.min_lr_frac", "", translate.if_given),
    "critic.optim.weight_decay": ("critic.optimizer.weight_decay",),
    "critic.model.fsdp_config.grad_offload": ("placement.offload", _ALL_PARTS, translate.SWITCH),
    "critic.model.fsdp_config.optimizer_offload": ("placement.offload", _ALL_PARTS, translate.SWITCH),
    "critic.model.fsdp_config.param_offload": ("placement.offload", _ALL_PARTS, translate.SWITCH),
    "critic.optim.betas": ("critic.optimizer.betas",),
    "critic.optim.lr_scheduler_type": ("critic.optimizer.schedule", "", translate.SCHEDULE),
    "critic.optim.warmup_style": ("critic.optimizer.schedule", "", translate.SCHEDULE),
    "critic.ulysses_sequence_parallel_size": ("critic.layout.cp",),
    f"{_REFERENCE}.ulysses_sequence_parallel_size": ("reference.layout.cp",),
    "critic.ppo_epochs": ("trainer.num_epochs", "one number for actor and critic", lambda *_: UNSET),
    "critic.ppo_max_token_len_per_gpu": ("critic.micro_batch_tokens", "", translate.VERL_TOKENS),
    "critic.ppo_micro_batch_size": ("critic.micro_batch_tokens", _TOKENS, lambda *_: UNSET),
    "critic.ppo_micro_batch_size_per_gpu": ("critic.micro_batch_tokens", _TOKENS, translate.VERL_ROWS),
    "critic.ppo_mini_batch_size": (
        "trainer.mini_batch_prompts",
        "one number for actor and critic",
        lambda *_: UNSET,
    ),
    "trainer.critic_warmup": ("critic.warmup_steps",),
}

OPENRLHF_ROLES: Entries = {
    "critic_learning_rate": ("critic.optimizer.lr",),
    "critic_num_gpus_per_node": ("", _DEVICES),
    "critic_num_nodes": ("", _DEVICES),
    "critic_pretrain": ("critic.model_path",),
    "freezing_actor_steps": ("critic.warmup_steps", "", translate.if_given),
    "ref_num_gpus_per_node": ("", _DEVICES),
    "ref_num_nodes": ("", _DEVICES),
    "save_value_network": ("", "a trained critic is always exported, to RUN/export_critic"),
    "value_clip": ("critic.value_clip",),
}

VERL_REWARDS: Entries = {
    "reward.custom_reward_function.name": ("rewards.custom.name",),
    "reward.custom_reward_function.path": ("rewards.custom.path",),
    "reward.num_workers": ("rewards.verifier.workers",),
    "reward.reward_manager.name": ("rewards.manager", "naive is rule", _MANAGER),
    "reward.reward_model.enable": ("rewards.manager", "true is model", _MODEL_REWARDS),
    "reward.reward_model.model_path": ("reward_model.model_path",),
    "reward.sandbox_fusion.memory_limit_mb": ("rewards.code.limits.memory_mib",),
    "reward.sandbox_fusion.url": ("", "programs run in a sandbox of this machine, see rewards.code"),
    "reward_model.megatron.context_parallel_size": ("reward_model.layout.cp",),
    "reward_model.megatron.expert_tensor_parallel_size": ("reward_model.layout.etp", "", translate.if_given),
    "reward_model.megatron.virtual_pipeline_model_parallel_size": (
        "reward_model.layout.virtual_pp",
        "",
        translate.if_given,
    ),
    "reward_model.ulysses_sequence_parallel_size": ("reward_model.layout.cp",),
    "custom_reward_function.name": ("rewards.custom.name",),
    "custom_reward_function.path": ("rewards.custom.path",),
    "reward_model.enable": ("rewards.manager", "true is model", _MODEL_REWARDS),
    "reward_model.forward_max_token_len_per_gpu": ("reward_model.micro_batch_tokens",),
    "reward_model.launch_reward_fn_async": ("", "samples are always judged as they finish"),
    "reward_model.megatron.expert_model_parallel_size": ("reward_model.layout.ep",),
    "reward_model.megatron.pipeline_model_parallel_size": ("reward_model.layout.pp",),
    "reward_model.megatron.sequence_parallel": ("reward_model.layout.sequence_parallel",),
    "reward_model.megatron.tensor_model_parallel_size": ("reward_model.layout.tp",),
    "reward_model.micro_batch_size": ("reward_model.micro_batch_tokens", _TOKENS),
    "reward_model.micro_batch_size_per_gpu": ("reward_model.micro_batch_tokens", _TOKENS),
    "reward_model.model.input_tokenizer": ("", "samples are always written in the reward model's own template"),
    "reward_model.model.path": ("reward_model.model_path",),
    "reward_model.num_workers": ("rewards.verifier.workers",),
    "reward_model.reward_manager": ("rewards.manager", "naive is rule", _MANAGER),
    "reward_model.sandbox_fusion.memory_limit_mb": ("rewards.code.limits.memory_mib",),
    "reward_model.sandbox_fusion.url": ("", "programs run in a sandbox of this machine, see rewards.code"),
}

OPENRLHF_REWARDS: Entries = {
    "remote_rm_url": (
        "rewards.manager rewards.remote.urls rewards.custom.path",
        "URLs with manager=remote, or a .py file with manager=rule",
        translate.reward_url,
    ),
    "reward_num_gpus_per_node": ("", _DEVICES),
    "reward_num_nodes": ("", _DEVICES),
    "reward_pretrain": (
        "reward_model.model_path rewards.manager",
        "with rewards.manager=model",
        lambda value, _: (value, "model") if value else UNSET,
    ),
}
