"""List options of verl, OpenRLHF and LUFFY that need no megarl setting, as patterns of option names, for `aliases`.

In a pattern, `*` stands for any text, dots included. Each group of patterns has a text that says why there is nothing
to set.
"""

from collections.abc import Mapping

from megarl.config.aliases_absent import by_name

_MEGATRON = "training is Megatron-Core's, whose layout actor.layout sets; parameters are not sharded as FSDP does"
_PACKED = "rows are always packed and micro-batches filled up to actor.micro_batch_tokens"
_CHECKPOINTS = "checkpoints always hold everything that --resume needs, and a run exports its final weights"
_NO_CHOICE = "there is nothing to choose here"
_HEAD = "the log-prob head is chunked by actor.head"
_SCORING = "scoring uses actor.micro_batch_tokens"
_LOAD = "weights are always read from safetensors and sent to the engines"
_MEASURED = "metrics.jsonl always has timings, memory and throughput"
_BY_SOURCE = "the scorer follows from the data source, see rewards.sources"

NEEDLESS: Mapping[str, Mapping[str, str]] = {
    "verl": by_name(
        (
            _MEGATRON,
            (
                "*.fsdp_config*",
                "*.fsdp.*",
                "*actor.strategy",
                "*.ref.strategy",
                "critic.strategy",
                "*reward_model.strategy",
                "*.use_torch_compile",
                "*.enable_activation_offload",
                "*.tiled_mlp*",
                "*.turbo_config*",
                "*.use_megatron_fsdp",
                "*.use_mbridge",
                "*.vanilla_mbridge",
                "*.forward_only",
                "*.dynamic_context_parallel",
                "*.max_seqlen_per_dp_cp_rank",
                "*.ref.megatron.use_distributed_optimizer",
                "reward_model.megatron.use_distributed_optimizer",
                "*.ref.megatron.*_offload",
                "trainer.use_legacy_worker_impl",
                "trainer.use_v1",
                "trainer.device",
                "*nccl_timeout",
                "*.ray_wait_register_center_timeout",
                "ray_kwargs.ray_init.runtime_env*",
            ),
        ),
        (
            _PACKED,
            (
                "*.use_remove_padding",
                "*use_dynamic_bsz",
                "*.pad_to_length*",
                "*.pad_bshd_to_minibatch_max",
                "*.use_prefix_grouper",
                "trainer.balance_batch",
                "*.forward_micro_batch_size",
                "*.val_batch_size",
                "*.gen_batch_size",
                "*.dataloader_num_workers",
                "*.filter_overlong_prompts_workers",
                "*.use_token_level_loss",
            ),
        ),
        (_SCORING, ("*.rollout.log_prob_*", "*.calculate_log_probs")),
        (
            _CHECKPOINTS,
            (
                "*.checkpoint.*",
                "*dist_checkpointing*",
                "*dist_ckpt*",
                "*distrib_optim*",
                "*.use_checkpoint_opt_param_scheduler",
                "trainer.del_local_ckpt_after_load",
                "trainer.max_critic_ckpt_to_keep",
                "trainer.remove_previous_ckpt*",
                "trainer.resume_from_path",
            ),
        ),
        (
            _HEAD,
            ("*entropy_from_logits*", "*entropy_checkpointing", "*.use_fused_kernels", "*fused_kernel_options*"),
        ),
        (_LOAD, ("*.load_weight", "*.load_format", "*.layer_name_map*", "*.checkpoint_engine.*", "*bucket_megabytes")),
        (
            _MEASURED,
            ("*.calculate_*", "*.disable_log_stats", "*.moe_load_balance_metrics_interval", "*.rollout_correction.*"),
        ),
        (
            _NO_CHOICE,
            (
                "*.rollout.name",
                "*.rollout.mode",
                "*.router_replay.mode",
                "*.rollout.do_sample",
                "*.rollout.prompt_length",
                "*.enable_chunked_prefill",
                "*.max_num_batched_tokens",
                "*.multi_stage_wake_up",
                "*.rollout_n",
                "*.use_liger",
                "*.actor.shuffle",
                "critic.shuffle",
                "*.data_loader_seed",
                "*.megatron.seed",
                "*.megatron.dtype",
                "*.optim.total_training_steps",
                "*.ref.model",
                "*.ref.use_ref",
                "*tokenizer_path",
                "*sandbox_fusion.max_concurrent",
                "reward_model.max_length",
                "reward_model.param_offload",
                "*.ref.param_offload",
                "reward_model.megatron.param_offload",
                "critic.enable",
                "critic.kl_ctrl.*",
                "data.tokenizer",
                "data.return_*",
                "data.validation_shuffle",
                "trainer.log_val_generations",
                "trainer.val_generations_to_log_to_wandb",
                "trainer.validation_data_dir",
                "reward_model.reward_kwargs.max_resp_len",
                "*.overlong_buffer_cfg.log",
                "*.overlong_buffer.log",
            ),
        ),
    ),
    "LUFFY": by_name(
        (_BY_SOURCE, ("data.reward_impl_version",)),
        (_NO_CHOICE, ("*.off_policy_loss_impl", "*.debug", "*.max_optim_to_keep", "*.sft_prefix_reward_weight")),
    ),
    "OpenRLHF": by_name(
        (
            _MEGATRON,
            (
                "zero_stage",
                "zpg",
                "overlap_comm",
                "deepcompile",
                "actor_init_on_gpu",
                "bf16",
                "param_dtype",
                "flash_attn",
                "attn_implementation",
                "use_liger_kernel",
                "local_rank",
                "gradient_checkpointing_use_reentrant",
                "fsdp2_*",
                "ds.*",
                "*.gradient_checkpointing_reentrant",
            ),
        ),
        (_PACKED, ("use_dynamic_batch", "train.dynamic_batch_enable", "*vllm_generate_batch_size", "*num_workers")),
        (_SCORING, ("rollout_max_tokens_per_gpu", "rollout.max_tokens_per_gpu")),
        (
            _CHECKPOINTS,
            (
                "ckpt_path",
                "save_hf_ckpt",
                "disable_ds_ckpt",
                "max_ckpt_mem",
                "use_ds_universal_ckpt",
                "ckpt.disable_ds",
                "ckpt.max_mem",
                "ckpt.path",
                "ckpt.save_hf",
                "ckpt.best_metric_key",
            ),
        ),
        (
            _NO_CHOICE,
            (
                "colocate_critic_reward",
                "*.colocate_critic_reward",
                "ref_reward_offload",
                "ref.offload",
                "reward.offload",
                "value_head_prefix",
                "disable_fast_tokenizer",
                "*.disable_fast_tokenizer",
                "ring_head_stride",
                "vllm_sync_with_ray",
                "vllm.sync_with_ray",
                "apply_chat_template",
                "*.apply_chat_template",
            ),
        ),
        (_MEASURED, ("logging_steps", "logger.logging_steps", "perf", "wandb_org", "wandb_group", "logger.wandb.*")),
    ),
}
