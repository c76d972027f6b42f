"""List option names of verl and OpenRLHF for reference, critic, reward model and rewards, for `aliases`."""

from collections.abc import Mapping
from typing import TypeAlias

# By the other framework's name: our key (or keys, separated by spaces), and optionally a note on what differs.
Entries: TypeAlias = Mapping[str, tuple[str, ...]]

_TOKENS = "tokens, not rows"
_ALL_PARTS = "parameters, gradients and optimizer state together"
_DEVICES = "it runs on the devices of the actor's ranks, placement.trainer"
_REFERENCE = "actor_rollout_ref.ref"

VERL_ROLES: Entries = {
    f"{_REFERENCE}.log_prob_max_token_len_per_gpu": ("reference.micro_batch_tokens",),
    f"{_REFERENCE}.log_prob_micro_batch_size": ("reference.micro_batch_tokens", _TOKENS),
    f"{_REFERENCE}.log_prob_micro_batch_size_per_gpu": ("reference.micro_batch_tokens", _TOKENS),
    f"{_REFERENCE}.megatron.context_parallel_size": ("reference.layout.cp",),
    f"{_REFERENCE}.megatron.expert_model_parallel_size": ("reference.layout.ep",),
    f"{_REFERENCE}.megatron.expert_tensor_parallel_size": ("reference.layout.etp",),
    f"{_REFERENCE}.megatron.param_offload": ("placement.offload", _ALL_PARTS),
    f"{_REFERENCE}.megatron.pipeline_model_parallel_size": ("reference.layout.pp",),
    f"{_REFERENCE}.megatron.sequence_parallel": ("reference.layout.sequence_parallel",),
    f"{_REFERENCE}.megatron.tensor_model_parallel_size": ("reference.layout.tp",),
    f"{_REFERENCE}.megatron.virtual_pipeline_model_parallel_size": ("reference.layout.virtual_pp",),
    f"{_REFERENCE}.model.path": ("reference.model_path",),
    "critic.cliprange_value": ("critic.value_clip",),
    "critic.forward_max_token_len_per_gpu": ("critic.micro_batch_tokens",),
    "critic.forward_micro_batch_size_per_gpu": ("critic.micro_batch_tokens", _TOKENS),
    "critic.grad_clip": ("critic.optimizer.clip_grad_norm",),
    "critic.loss_agg_mode": ("", "the critic's loss is a mean over tokens"),
    "critic.megatron.context_parallel_size": ("critic.layout.cp",),
    "critic.megatron.expert_model_parallel_size": ("critic.layout.ep",),
    "critic.megatron.expert_tensor_parallel_size": ("critic.layout.etp",),
    "critic.megatron.grad_offload": ("placement.offload", _ALL_PARTS),
    "critic.megatron.optimizer_offload": ("placement.offload", _ALL_PARTS),
    "critic.megatron.override_transformer_config.recompute_granularity": ("critic.recompute",),
    "critic.megatron.param_offload": ("placement.offload", _ALL_PARTS),
    "critic.megatron.pipeline_model_parallel_size": ("critic.layout.pp",),
    "critic.megatron.sequence_parallel": ("critic.layout.sequence_parallel",),
    "critic.megatron.tensor_model_parallel_size": ("critic.layout.tp",),
    "critic.megatron.use_distributed_optimizer": ("critic.optimizer.distributed",),
    "critic.megatron.virtual_pipeline_model_parallel_size": ("critic.layout.virtual_pp",),
    "critic.model.enable_gradient_checkpointing": ("critic.recompute", "none, selective or full"),
    "critic.model.path": ("critic.model_path",),
    "critic.model.tokenizer_path": ("", "the critic must have the tokenizer of model.path"),
    "critic.optim.clip_grad": ("critic.optimizer.clip_grad_norm",),
    "critic.optim.lr": ("critic.optimizer.lr",),
    "critic.optim.lr_decay_style": ("critic.optimizer.schedule",),
    "critic.optim.lr_warmup_steps": ("critic.optimizer.warmup_steps",),
    "critic.optim.lr_warmup_steps_ratio": ("critic.optimizer.warmup_steps", "a number of steps"),
    "critic.optim.min_lr_ratio": ("critic.optimizer.min_lr_frac",),
    "critic.optim.weight_decay": ("critic.optimizer.weight_decay",),
    "critic.ppo_epochs": ("trainer.num_epochs", "one number for actor and critic"),
    "critic.ppo_max_token_len_per_gpu": ("critic.micro_batch_tokens",),
    "critic.ppo_micro_batch_size": ("critic.micro_batch_tokens", _TOKENS),
    "critic.ppo_micro_batch_size_per_gpu": ("critic.micro_batch_tokens", _TOKENS),
    "critic.ppo_mini_batch_size": ("trainer.mini_batch_prompts", "one number for actor and critic"),
    "trainer.critic_warmup": ("critic.warmup_steps",),
}

OPENRLHF_ROLES: Entries = {
    "critic_learning_rate": ("critic.optimizer.lr",),
    "critic_num_gpus_per_node": ("", _DEVICES),
    "critic_num_nodes": ("", _DEVICES),
    "critic_pretrain": ("critic.model_path",),
    "freezing_actor_steps": ("critic.warmup_steps",),
    "ref_num_gpus_per_node": ("", _DEVICES),
    "ref_num_nodes": ("", _DEVICES),
    "save_value_network": ("", "a trained critic is always exported, to RUN/export_critic"),
    "value_clip": ("critic.value_clip",),
}

VERL_REWARDS: Entries = {
    "custom_reward_function.name": ("rewards.custom.name",),
    "custom_reward_function.path": ("rewards.custom.path",),
    "reward_model.enable": ("rewards.manager", "true is model"),
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
    "reward_model.reward_manager": ("rewards.manager", "naive is rule"),
    "reward_model.sandbox_fusion.memory_limit_mb": ("rewards.code.limits.memory_mib",),
    "reward_model.sandbox_fusion.url": ("", "programs run in a sandbox of this machine, see rewards.code"),
}

OPENRLHF_REWARDS: Entries = {
    "remote_rm_url": ("rewards.remote.urls rewards.custom.path", "URLs with rewards.manager=remote, or a .py file"),
    "reward_num_gpus_per_node": ("", _DEVICES),
    "reward_num_nodes": ("", _DEVICES),
    "reward_pretrain": ("reward_model.model_path", "with rewards.manager=model"),
}
