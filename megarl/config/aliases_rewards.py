"""Names of reward options in verl and OpenRLHF, in the form of `aliases`."""

from megarl.config.aliases_roles import Entries

_TOKENS = "tokens, not rows"
_DEVICES = "it runs on the devices of the actor's ranks, placement.trainer"

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
