"""List option names of verl for data, actor, rollout and the run, for `aliases`."""

from functools import partial

from megarl.config import translate
from megarl.config.aliases_roles import Entries
from megarl.config.translate import UNSET

_ACTOR = "actor_rollout_ref.actor"
_ALL_PARTS = "parameters, gradients and optimizer state together"
_SPLIT = "with placement.mode=split"
_TOKENS = "tokens, not rows"
_KL_LOSS = "the latter with algo.kl.where=both"
_KL_PLACE = "reward, loss, or both if both switches are on"
_WARMUP_SHARE = partial(
    translate.warmup_share, steps="trainer.total_training_steps", given=f"{_ACTOR}.optim.lr_warmup_steps"
)

VERL: Entries = {
    "actor_rollout_ref.actor.checkpoint.async_save": ("checkpoint.async_save",),
    "actor_rollout_ref.actor.fsdp_config.grad_offload": ("placement.offload", _ALL_PARTS, translate.SWITCH),
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": ("placement.offload", _ALL_PARTS, translate.SWITCH),
    "actor_rollout_ref.actor.fsdp_config.param_offload": ("placement.offload", _ALL_PARTS, translate.SWITCH),
    "actor_rollout_ref.actor.megatron.router_replay.mode": (
        "actor.moe.replay_routing",
        "R3 is true",
        translate.choose({"disabled": False, None: False, "R3": True}),
    ),
    "actor_rollout_ref.actor.optim.betas": ("actor.optimizer.betas",),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": ("actor.optimizer.schedule", "", translate.SCHEDULE),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": ("actor.layout.cp",),
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": ("actor.layout.cp",),
    "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router": ("actor.moe.freeze_router",),
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": ("actor.moe.replay_routing",),
    "actor_rollout_ref.rollout.full_determinism": ("run.deterministic",),
    "actor_rollout_ref.rollout.val_kwargs.do_sample": (
        "validation.greedy",
        "sampled answers are always scored; true is false",
        translate.NEGATED,
    ),
    "algorithm.rollout_correction.bypass_mode": (
        "algo.correction.name",
        "true is rollout_ratio",
        translate.choose({True: "rollout_ratio", False: UNSET, None: UNSET}),
    ),
    "algorithm.rollout_correction.rollout_is": (
        "algo.correction.name",
        "token is tis_upper",
        translate.choose({"token": "tis_upper", "sequence": "sequence", None: UNSET}),
    ),
    "algorithm.rollout_correction.rollout_is_batch_normalize": (
        "algo.correction.normalise",
        "",
        translate.SWITCH,
    ),
    "algorithm.rollout_correction.rollout_is_threshold": (
        "algo.correction.high",
        "",
        lambda value, options: value if options.get("algorithm.rollout_correction.rollout_is") else UNSET,
    ),
    "algorithm.rollout_correction.rollout_token_veto_threshold": (
        "algo.correction.veto",
        "the inverse",
        lambda value, _: None if value is None else 1 / value,
    ),
    "data.seed": ("run.seed", "", translate.if_given),
    "data.val_max_samples": ("validation.max_prompts", "", translate.if_given),
    "trainer.rollout_data_dir": (
        "rollout.record",
        "a directory is true; files go to RUN/records",
        lambda value, _: bool(value) or UNSET,
    ),
    "trainer.val_only": (
        "trainer.total_steps",
        "true is 0",
        lambda value, _: 0 if value else UNSET,
    ),
    "actor_rollout_ref.actor.clip_ratio": (
        "algo.policy_loss.clip_low algo.policy_loss.clip_high",
        "",
        translate.clip_ratio,
    ),
    "actor_rollout_ref.actor.clip_ratio_c": (
        "algo.policy_loss.dual_clip",
        "",
        partial(translate.dual_clip, loss=f"{_ACTOR}.policy_loss.loss_mode"),
    ),
    "actor_rollout_ref.actor.clip_ratio_high": ("algo.policy_loss.clip_high", "", translate.if_given),
    "actor_rollout_ref.actor.clip_ratio_low": ("algo.policy_loss.clip_low", "", translate.if_given),
    "actor_rollout_ref.actor.entropy_coeff": ("algo.entropy_coef",),
    "actor_rollout_ref.actor.grad_clip": ("actor.optimizer.clip_grad_norm",),
    "actor_rollout_ref.actor.kl_loss_coef": (
        "algo.kl.coef algo.kl.loss_coef",
        _KL_LOSS,
        translate.kl_in_loss,
    ),
    "actor_rollout_ref.actor.kl_loss_type": (
        "algo.kl.estimator algo.kl.loss_estimator",
        f"{_KL_LOSS}; low_var_kl is k3, and k3+ is k3_straight_through",
        translate.kl_in_loss,
    ),
    "actor_rollout_ref.actor.loss_agg_mode": ("algo.aggregation",),
    "actor_rollout_ref.actor.megatron.context_parallel_size": ("actor.layout.cp",),
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": ("actor.layout.ep",),
    "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size": ("actor.layout.etp", "", translate.if_given),
    "actor_rollout_ref.actor.megatron.grad_offload": ("placement.offload", _ALL_PARTS, translate.SWITCH),
    "actor_rollout_ref.actor.megatron.optimizer_offload": ("placement.offload", _ALL_PARTS, translate.SWITCH),
    "actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff": ("actor.moe.aux_loss_coef",),
    "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity": (
        "actor.recompute",
        "",
        translate.choose({None: "none", "selective": "selective", "full": "full"}),
    ),
    "actor_rollout_ref.actor.megatron.param_offload": ("placement.offload", _ALL_PARTS, translate.SWITCH),
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": ("actor.layout.pp",),
    "actor_rollout_ref.actor.megatron.sequence_parallel": ("actor.layout.sequence_parallel",),
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": ("actor.layout.tp",),
    "actor_rollout_ref.actor.megatron.use_distributed_optimizer": ("actor.optimizer.distributed",),
    "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size": (
        "actor.layout.virtual_pp",
        "",
        translate.if_given,
    ),
    "actor_rollout_ref.actor.optim.clip_grad": ("actor.optimizer.clip_grad_norm", "", translate.if_given),
    "actor_rollout_ref.actor.optim.lr": ("actor.optimizer.lr",),
    "actor_rollout_ref.actor.optim.lr_decay_style": ("actor.optimizer.schedule", "", translate.SCHEDULE),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": ("actor.optimizer.warmup_steps", "", translate.warmup_steps),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": (
        "actor.optimizer.warmup_steps",
        "a number of steps",
        _WARMUP_SHARE,
    ),
    "actor_rollout_ref.actor.optim.min_lr_ratio": ("actor.optimizer.min_lr_frac", "", translate.if_given),
    "actor_rollout_ref.actor.optim.warmup_style": ("actor.optimizer.schedule", "", translate.SCHEDULE),
    "actor_rollout_ref.actor.optim.weight_decay": ("actor.optimizer.weight_decay",),
    "actor_rollout_ref.actor.ppo_epochs": ("trainer.num_epochs",),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": ("actor.micro_batch_tokens", "", translate.VERL_TOKENS),
    "actor_rollout_ref.actor.ppo_micro_batch_size": ("actor.micro_batch_tokens", _TOKENS, lambda *_: UNSET),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": ("actor.micro_batch_tokens", _TOKENS, translate.VERL_ROWS),
    "actor_rollout_ref.actor.ppo_mini_batch_size": ("trainer.mini_batch_prompts", "prompts in both"),
    "actor_rollout_ref.actor.use_dynamic_bsz": ("", "micro-batches are always filled up to actor.micro_batch_tokens"),
    "actor_rollout_ref.actor.use_kl_loss": (
        "algo.kl.where",
        _KL_PLACE,
        translate.kl_place,
    ),
    "actor_rollout_ref.hybrid_engine": (
        "placement.mode",
        "true is colocated, false is split",
        translate.choose({True: "colocated", False: "split"}),
    ),
    "actor_rollout_ref.model.enable_gradient_checkpointing": (
        "actor.recompute",
        "none, selective or full",
        translate.RECOMPUTE,
    ),
    "actor_rollout_ref.model.path": ("model.path",),
    "actor_rollout_ref.model.use_remove_padding": ("", "rows are always packed"),
    "actor_rollout_ref.rollout.checkpoint_engine.backend": (
        "sync.host_group",
        "gloo or device",
        translate.choose({"naive": "gloo", "gloo": "gloo", "nccl": "device"}),
    ),
    "actor_rollout_ref.rollout.data_parallel_size": ("rollout.engine.num_engines",),
    "actor_rollout_ref.rollout.dtype": ("rollout.engine.dtype",),
    "actor_rollout_ref.rollout.enable_prefix_caching": ("rollout.engine.prefix_caching",),
    "actor_rollout_ref.rollout.enforce_eager": ("rollout.engine.enforce_eager",),
    "actor_rollout_ref.rollout.free_cache_engine": ("placement.offload", "", translate.SWITCH),
    "actor_rollout_ref.rollout.gpu_memory_utilization": ("rollout.engine.gpu_memory_utilization",),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": (
        "actor.micro_batch_tokens",
        _TOKENS,
        lambda *_: UNSET,
    ),
    "actor_rollout_ref.rollout.max_model_len": ("rollout.engine.max_model_tokens", "", translate.if_given),
    "actor_rollout_ref.rollout.max_num_seqs": ("rollout.engine.max_num_seqs",),
    "actor_rollout_ref.rollout.n": ("rollout.num_samples",),
    "actor_rollout_ref.rollout.n_gpus_per_node": ("placement.engines.devices_per_node", _SPLIT),
    "actor_rollout_ref.rollout.nnodes": ("placement.engines.num_nodes", _SPLIT),
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": ("rollout.engine.pp",),
    "actor_rollout_ref.rollout.response_length": ("rollout.max_response_tokens",),
    "actor_rollout_ref.rollout.temperature": ("rollout.temperature",),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": ("rollout.engine.tp",),
    "actor_rollout_ref.rollout.top_k": ("rollout.top_k",),
    "actor_rollout_ref.rollout.top_p": ("rollout.top_p", "below 1, set rollout.top_k too"),
    "actor_rollout_ref.rollout.val_kwargs.n": ("validation.num_samples",),
    "actor_rollout_ref.rollout.val_kwargs.temperature": ("validation.temperature", "", translate.sampled_validation),
    "actor_rollout_ref.rollout.val_kwargs.top_k": ("validation.top_k",),
    "actor_rollout_ref.rollout.val_kwargs.top_p": ("validation.top_p",),
    "algorithm.adv_estimator": (
        "algo.advantage.estimator",
        "",
        translate.choose(
            {
                "gae": "gae",
                "grpo": "grpo",
                "grpo_split": "grpo_split",
                "grpo_vectorized": "grpo",
                "rloo": "rloo",
                "rloo_vectorized": "rloo",
                "reinforce_plus_plus": "reinforce_plus_plus",
                "reinforce_plus_plus_baseline": "reinforce_baseline",
                "opo": "opo",
                "gpg": "gpg",
                "grpo_passk": "passk_best",
                "gdpo": "gdpo",
                "remax": "remax",
                "cpo": "grpo",
            }
        ),
    ),
    "algorithm.gdpo_reward_keys": (
        "algo.advantage.components",
        "names with their weights; acc is correct",
        translate.reward_components,
    ),
    "algorithm.gdpo_reward_weights": ("algo.advantage.components", "", lambda *_: UNSET),
    "algorithm.kl_ctrl.horizon": ("algo.kl.horizon", "", translate.kl_in_reward),
    "algorithm.kl_ctrl.kl_coef": ("algo.kl.coef", "", translate.kl_in_reward),
    "algorithm.kl_ctrl.target_kl": ("algo.kl.target_nats", "", translate.kl_in_reward),
    "algorithm.kl_ctrl.type": ("algo.kl.controller", "", translate.kl_in_reward),
    "algorithm.kl_penalty": ("algo.kl.estimator", "", translate.kl_in_reward),
    "algorithm.norm_adv_by_std_in_grpo": (
        "algo.advantage.norm_by_std",
        "only GRPO and its variants have it there",
        lambda value, options: (
            value if str(options["algorithm.adv_estimator"]).startswith(("grpo", "gdpo", "cpo")) else UNSET
        ),
    ),
    "algorithm.use_kl_in_reward": (
        "algo.kl.where",
        _KL_PLACE,
        translate.kl_place,
    ),
    "data.apply_chat_template_kwargs": ("data.chat_template", "", translate.if_given),
    "data.filter_overlong_prompts": (
        "data.on_long_prompt",
        "set it to drop",
        translate.choose({True: "drop", False: UNSET}),
    ),
    "data.max_prompt_length": ("data.max_prompt_tokens",),
    "data.max_response_length": ("rollout.max_response_tokens",),
    "data.reward_fn_key": ("data.source_key",),
    "data.train_batch_size": ("trainer.prompts_per_step", "", translate.if_given),
    "data.train_files": ("data.train", "", translate.as_list),
    "data.truncation": (
        "data.on_long_prompt",
        "error or drop; nothing is truncated",
        translate.truncation,
    ),
    "data.val_files": ("data.val", "", translate.as_list),
    "ray_init.num_cpus": ("cluster.num_cpus",),
    "ray_kwargs.ray_init.num_cpus": ("cluster.num_cpus",),
    "trainer.default_local_dir": ("run.dir",),
    "trainer.experiment_name": ("run.name",),
    "trainer.logger": ("logging.tensorboard", "others than tensorboard and wandb do not exist", translate.loggers),
    "trainer.max_actor_ckpt_to_keep": ("checkpoint.keep_last", "", translate.if_given),
    "trainer.n_gpus_per_node": ("placement.trainer.devices_per_node",),
    "trainer.nnodes": ("placement.trainer.num_nodes",),
    "trainer.project_name": ("logging.wandb_project", "", translate.wandb_project),
    "trainer.resume_mode": ("", "megarl train --resume continues a run"),
    "trainer.save_freq": ("checkpoint.every_steps", "", lambda value, _: max(value, 0)),
    "trainer.test_freq": ("validation.every_steps", "", translate.every_steps),
    "trainer.total_training_steps": ("trainer.total_steps", "", translate.if_given),
    "trainer.val_before_train": ("validation.before_train",),
}

# Names that are the same here and mean the same.
SAME = frozenset({"data.prompt_key", "data.shuffle", "trainer.total_epochs"})
