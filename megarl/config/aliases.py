"""Map option names of verl, OpenRLHF and vLLM to keys here, to advise users who set an unknown key."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megarl.config.aliases_algo import CPO, LUFFY, OPENRLHF_ALGO, PPO_CRITIC, VERL_ALGO
from megarl.config.aliases_roles import OPENRLHF_REWARDS, OPENRLHF_ROLES, VERL_REWARDS, VERL_ROLES


@dataclass(frozen=True, slots=True)
class Alias:
    """An option of another framework, and the keys that correspond to it here.

    `key` holds keys separated by spaces, or is empty if nothing is to be set; `note` says what differs, or why.
    """

    framework: str
    key: str
    note: str = ""

    @property
    def advice(self) -> str:
        """Return the advice that an error message gives after naming the unknown key."""
        name = " and ".join(repr(key) for key in self.key.split())
        here = f"{self.framework}'s name for {name}" if name else f"of {self.framework}"
        return f"{here}{f' ({self.note})' if self.note else ''}"


_TOKENS = "tokens, not rows"
_PROMPTS = "prompts, not rows"
_ALL_PARTS = "parameters, gradients and optimizer state together"
_SPLIT = "with placement.mode=split"

_VERL = {
    "actor_rollout_ref.actor.clip_ratio": ("algo.policy_loss.clip_low algo.policy_loss.clip_high",),
    "actor_rollout_ref.actor.clip_ratio_c": ("algo.policy_loss.dual_clip",),
    "actor_rollout_ref.actor.clip_ratio_high": ("algo.policy_loss.clip_high",),
    "actor_rollout_ref.actor.clip_ratio_low": ("algo.policy_loss.clip_low",),
    "actor_rollout_ref.actor.entropy_coeff": ("algo.entropy_coef",),
    "actor_rollout_ref.actor.grad_clip": ("actor.optimizer.clip_grad_norm",),
    "actor_rollout_ref.actor.kl_loss_coef": ("algo.kl.coef",),
    "actor_rollout_ref.actor.kl_loss_type": ("algo.kl.estimator", "low_var_kl is k3"),
    "actor_rollout_ref.actor.loss_agg_mode": ("algo.aggregation",),
    "actor_rollout_ref.actor.megatron.context_parallel_size": ("actor.layout.cp",),
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": ("actor.layout.ep",),
    "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size": ("actor.layout.etp",),
    "actor_rollout_ref.actor.megatron.grad_offload": ("placement.offload", _ALL_PARTS),
    "actor_rollout_ref.actor.megatron.optimizer_offload": ("placement.offload", _ALL_PARTS),
    "actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff": ("actor.moe.aux_loss_coef",),
    "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity": ("actor.recompute",),
    "actor_rollout_ref.actor.megatron.param_offload": ("placement.offload", _ALL_PARTS),
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": ("actor.layout.pp",),
    "actor_rollout_ref.actor.megatron.sequence_parallel": ("actor.layout.sequence_parallel",),
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": ("actor.layout.tp",),
    "actor_rollout_ref.actor.megatron.use_distributed_optimizer": ("actor.optimizer.distributed",),
    "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size": ("actor.layout.virtual_pp",),
    "actor_rollout_ref.actor.optim.clip_grad": ("actor.optimizer.clip_grad_norm",),
    "actor_rollout_ref.actor.optim.lr": ("actor.optimizer.lr",),
    "actor_rollout_ref.actor.optim.lr_decay_style": ("actor.optimizer.schedule",),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": ("actor.optimizer.warmup_steps",),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": ("actor.optimizer.warmup_steps", "a number of steps"),
    "actor_rollout_ref.actor.optim.min_lr_ratio": ("actor.optimizer.min_lr_frac",),
    "actor_rollout_ref.actor.optim.warmup_style": ("actor.optimizer.schedule",),
    "actor_rollout_ref.actor.optim.weight_decay": ("actor.optimizer.weight_decay",),
    "actor_rollout_ref.actor.ppo_epochs": ("trainer.num_epochs",),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": ("actor.micro_batch_tokens",),
    "actor_rollout_ref.actor.ppo_micro_batch_size": ("actor.micro_batch_tokens", _TOKENS),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": ("actor.micro_batch_tokens", _TOKENS),
    "actor_rollout_ref.actor.ppo_mini_batch_size": ("trainer.mini_batch_prompts", "prompts in both"),
    "actor_rollout_ref.actor.use_dynamic_bsz": ("", "micro-batches are always filled up to actor.micro_batch_tokens"),
    "actor_rollout_ref.actor.use_kl_loss": ("algo.kl.where", "set it to loss"),
    "actor_rollout_ref.hybrid_engine": ("placement.mode", "true is colocated, false is split"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": ("actor.recompute", "none, selective or full"),
    "actor_rollout_ref.model.path": ("model.path",),
    "actor_rollout_ref.model.use_remove_padding": ("", "rows are always packed"),
    "actor_rollout_ref.rollout.checkpoint_engine.backend": ("sync.host_group", "gloo or device"),
    "actor_rollout_ref.rollout.data_parallel_size": ("rollout.engine.num_engines",),
    "actor_rollout_ref.rollout.dtype": ("model.dtype",),
    "actor_rollout_ref.rollout.enable_prefix_caching": ("rollout.engine.prefix_caching",),
    "actor_rollout_ref.rollout.enforce_eager": ("rollout.engine.enforce_eager",),
    "actor_rollout_ref.rollout.free_cache_engine": ("placement.offload",),
    "actor_rollout_ref.rollout.gpu_memory_utilization": ("rollout.engine.gpu_memory_utilization",),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": ("actor.micro_batch_tokens", _TOKENS),
    "actor_rollout_ref.rollout.max_model_len": ("rollout.engine.max_model_tokens",),
    "actor_rollout_ref.rollout.max_num_seqs": ("rollout.engine.max_num_seqs",),
    "actor_rollout_ref.rollout.n": ("rollout.num_samples",),
    "actor_rollout_ref.rollout.n_gpus_per_node": ("placement.engines.devices_per_node", _SPLIT),
    "actor_rollout_ref.rollout.nnodes": ("placement.engines.num_nodes", _SPLIT),
    "actor_rollout_ref.rollout.response_length": ("rollout.max_response_tokens",),
    "actor_rollout_ref.rollout.temperature": ("rollout.temperature",),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": ("rollout.engine.tp",),
    "actor_rollout_ref.rollout.top_k": ("rollout.top_k",),
    "actor_rollout_ref.rollout.top_p": ("rollout.top_p",),
    "actor_rollout_ref.rollout.val_kwargs.n": ("validation.num_samples",),
    "actor_rollout_ref.rollout.val_kwargs.temperature": ("validation.temperature",),
    "actor_rollout_ref.rollout.val_kwargs.top_k": ("validation.top_k",),
    "actor_rollout_ref.rollout.val_kwargs.top_p": ("validation.top_p",),
    "algorithm.adv_estimator": ("algo.advantage.estimator",),
    "algorithm.kl_ctrl.horizon": ("algo.kl.horizon",),
    "algorithm.kl_ctrl.kl_coef": ("algo.kl.coef",),
    "algorithm.kl_ctrl.target_kl": ("algo.kl.target_nats",),
    "algorithm.kl_ctrl.type": ("algo.kl.controller",),
    "algorithm.kl_penalty": ("algo.kl.estimator",),
    "algorithm.norm_adv_by_std_in_grpo": ("algo.advantage.norm_by_std",),
    "algorithm.use_kl_in_reward": ("algo.kl.where", "set it to reward"),
    "data.apply_chat_template_kwargs": ("data.chat_template",),
    "data.filter_overlong_prompts": ("data.on_long_prompt", "set it to drop"),
    "data.max_prompt_length": ("data.max_prompt_tokens",),
    "data.max_response_length": ("rollout.max_response_tokens",),
    "data.reward_fn_key": ("data.source_key",),
    "data.train_batch_size": ("trainer.prompts_per_step",),
    "data.train_files": ("data.train",),
    "data.truncation": ("data.on_long_prompt", "error or drop; nothing is truncated"),
    "data.val_files": ("data.val",),
    "ray_init.num_cpus": ("cluster.num_cpus",),
    "ray_kwargs.ray_init.num_cpus": ("cluster.num_cpus",),
    "trainer.default_local_dir": ("run.dir",),
    "trainer.experiment_name": ("run.name",),
    "trainer.logger": ("logging.tensorboard logging.wandb_project",),
    "trainer.max_actor_ckpt_to_keep": ("checkpoint.keep_last",),
    "trainer.n_gpus_per_node": ("placement.trainer.devices_per_node",),
    "trainer.nnodes": ("placement.trainer.num_nodes",),
    "trainer.project_name": ("logging.wandb_project",),
    "trainer.resume_mode": ("", "megarl train --resume continues a run"),
    "trainer.save_freq": ("checkpoint.every_steps",),
    "trainer.test_freq": ("validation.every_steps",),
    "trainer.total_training_steps": ("trainer.total_steps",),
    "trainer.val_before_train": ("validation.before_train",),
}

_OPENRLHF = {
    "actor_learning_rate": ("actor.optimizer.lr",),
    "actor_num_gpus_per_node": ("placement.trainer.devices_per_node",),
    "actor_num_nodes": ("placement.trainer.num_nodes",),
    "adam_betas": ("actor.optimizer.betas",),
    "adam_offload": ("placement.offload", _ALL_PARTS),
    "advantage_estimator": ("algo.advantage.estimator",),
    "async_train": ("placement.mode", "set it to split"),
    "colocate_actor_ref": ("", "actor and reference always share their devices"),
    "colocate_all_models": ("placement.mode", "set it to colocated"),
    "critic_num_gpus_per_node": ("critic.layout", "on the actor's devices"),
    "critic_num_nodes": ("critic.layout", "on the actor's devices"),
    "deepspeed_enable_sleep": ("placement.offload",),
    "ds_tensor_parallel_size": ("actor.layout.tp",),
    "enable_prefix_caching": ("rollout.engine.prefix_caching",),
    "enforce_eager": ("rollout.engine.enforce_eager",),
    "entropy_loss_coef": ("algo.entropy_coef",),
    "eps_clip": ("algo.policy_loss.clip_low algo.policy_loss.clip_high",),
    "eps_clip_low_high": ("algo.policy_loss.clip_low algo.policy_loss.clip_high",),
    "eval_dataset": ("data.val",),
    "eval_n_samples_per_prompt": ("validation.num_samples",),
    "eval_steps": ("validation.every_steps",),
    "eval_temperature": ("validation.temperature",),
    "full_determinism": ("run.deterministic",),
    "generate_max_len": ("rollout.max_response_tokens",),
    "gradient_checkpointing": ("actor.recompute", "none, selective or full"),
    "init_kl_coef": ("algo.kl.coef", "it acts only with algo.kl.where"),
    "input_key": ("data.prompt_key",),
    "kl_estimator": ("algo.kl.estimator",),
    "kl_horizon": ("algo.kl.horizon",),
    "kl_target": ("algo.kl.target_nats",),
    "l2": ("actor.optimizer.weight_decay",),
    "label_key": ("data.label_key",),
    "load_checkpoint": ("", "megarl train --resume continues a run"),
    "lr_scheduler": ("actor.optimizer.schedule",),
    "lr_warmup_ratio": ("actor.optimizer.warmup_steps", "a number of steps"),
    "max_ckpt_num": ("checkpoint.keep_last",),
    "max_epochs": ("trainer.num_epochs",),
    "max_norm": ("actor.optimizer.clip_grad_norm",),
    "micro_rollout_batch_size": ("actor.micro_batch_tokens", _TOKENS),
    "micro_train_batch_size": ("actor.micro_batch_tokens", _TOKENS),
    "n_samples_per_prompt": ("rollout.num_samples",),
    "no_advantage_std_norm": ("algo.advantage.norm_by_std", "set it to false"),
    "num_episodes": ("trainer.total_epochs",),
    "packing_samples": ("", "rows are always packed"),
    "policy_loss_type": ("algo.policy_loss.name",),
    "pretrain": ("model.path",),
    "prompt_data": ("data.train",),
    "prompt_data_probs": ("data.train", "entries of {path, weight}"),
    "prompt_max_len": ("data.max_prompt_tokens",),
    "ring_attn_size": ("actor.layout.cp",),
    "rollout_batch_size": ("trainer.prompts_per_step",),
    "save_path": ("run.dir",),
    "save_steps": ("checkpoint.every_steps",),
    "temperature": ("rollout.temperature",),
    "top_p": ("rollout.top_p",),
    "train_batch_size": ("trainer.mini_batch_prompts", _PROMPTS),
    "train_max_tokens_per_gpu": ("actor.micro_batch_tokens",),
    "use_kl_loss": ("algo.kl.where", "set it to loss"),
    "use_tensorboard": ("logging.tensorboard",),
    "use_wandb": ("logging.wandb_project",),
    "vllm_enable_sleep": ("placement.offload",),
    "vllm_gpu_memory_utilization": ("rollout.engine.gpu_memory_utilization",),
    "vllm_num_engines": ("rollout.engine.num_engines",),
    "vllm_sync_backend": ("sync.host_group", "gloo or device"),
    "vllm_tensor_parallel_size": ("rollout.engine.tp",),
    "wandb_project": ("logging.wandb_project",),
    "wandb_run_name": ("run.name",),
}

# Names of vLLM's engine arguments, for users who set them as `rollout.engine.*`.
_VLLM = {
    "rollout.engine.data_parallel_size": ("rollout.engine.num_engines",),
    "rollout.engine.enable_prefix_caching": ("rollout.engine.prefix_caching",),
    "rollout.engine.enable_sleep_mode": ("placement.offload",),
    "rollout.engine.kv_cache_memory_bytes": ("rollout.engine.kv_cache_mib", "MiB"),
    "rollout.engine.max_model_len": ("rollout.engine.max_model_tokens",),
    "rollout.engine.tensor_parallel_size": ("rollout.engine.tp",),
}

_EARLIER = {"sync.transport": ("", "the bridge is the only one; leave this out")}

ALIASES: Mapping[str, Alias] = {
    name: Alias(framework, *entry)
    for framework, tables in (
        ("verl", (_VERL, VERL_ROLES, VERL_ALGO, VERL_REWARDS)),
        ("PPO_critic", (PPO_CRITIC,)),
        ("CPO", (CPO,)),
        ("LUFFY", (LUFFY,)),
        ("OpenRLHF", (_OPENRLHF, OPENRLHF_ROLES, OPENRLHF_ALGO, OPENRLHF_REWARDS)),
        ("vLLM", (_VLLM,)),
        ("earlier versions", (_EARLIER,)),
    )
    for table in tables
    for name, entry in table.items()
}


def find_alias(path: str, value: object = None) -> tuple[str, Alias] | None:
    """Find an unknown dotted key, or a key below it, among other frameworks' options; return its name and its alias.

    A mapping is searched down to its leaves. A name may lack its first sections if all known names that end with it
    mean the same: `rollout.n` is found as verl's `actor_rollout_ref.rollout.n`. Hydra's `+` before a name is ignored.
    An alias of one value, such as `algorithm.adv_estimator=cpo`, precedes the alias of its key.
    """
    for leaf, item in _leaves(path.lstrip("+"), value):
        for name in (f"{leaf}={item}", leaf):
            if name in ALIASES:
                return name, ALIASES[name]
            found = {alias for known, alias in ALIASES.items() if "." in leaf and known.endswith(f".{name}")}
            if len(found) == 1:
                return name, found.pop()
    return None


def unknown_options(arguments: list[str]) -> str:
    """Return the message for command-line options that do not exist, such as `--micro_train_batch_size 4`."""
    names = [argument.lstrip("-").partition("=")[0] for argument in arguments if argument.startswith("-")]
    hints = [f"--{name} is {found[1].advice}" for name in names if (found := find_alias(name.replace("-", "_")))]
    advice = f"; {'; '.join(hints)}" if hints else ""
    return f"unrecognized arguments: {' '.join(arguments)}{advice}; settings are given as key=value"


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    else:
        yield path, value
