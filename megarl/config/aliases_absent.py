"""List options of verl, OpenRLHF and LUFFY for features that megarl does not have, as patterns of option names.

In a pattern, `*` stands for any text, dots included. Each group of patterns has a text that names the missing feature
and says what to do. `aliases` looks options up here last.
"""

from collections.abc import Iterable, Mapping

_ASYNC = "asynchronous training in this form; choose use.schedule=one_step_off or use.schedule=async, see docs/async.md"
_MULTI_TURN = "multi-turn rollouts, tools and agents in this form; set environment.default, see docs/environments.md"
_LORA = "LoRA; leave it out: all weights are trained"
_IMAGES = "images, audio and video; leave it out: prompts are text"
_QUANTISED = "quantised training, and rollouts in this form; for rollouts see rollout.engine.quantization"
_MTP = "training of multi-token prediction, and drafts in this form; for drafts see rollout.engine.speculation"
_DISTILLATION = "distillation from a teacher; leave it out, or train on its answers with megarl sft"
_PROFILER = "profilers other than torch's; megarl train --profile-steps FIRST:LAST writes torch traces"
_GENERATIVE = "reward models in vLLM; serve the judge yourself with rewards.manager=remote"
_LOSS = "this policy loss; choose one of docs/algorithms/losses.md"
_OPTIMIZER = "optimizers and schedules other than AdamW's with warm-up and decay; see actor.optimizer"
_MODEL_CODE = "changes to the model's code or config.json; edit config.json in the model's directory"
_TEMPLATE = "prompt templates as an option; change chat_template in the model's tokenizer_config.json"
_CAP = "limits on how much of a file is read; write a shorter file"
_PLUGIN = "data sets, samplers and trainers of your own; prepare the data as in docs/data.md"
_ENGINE = "this option in this form; see rollout.engine, and rollout.engine.vllm for vLLM's own arguments"
_HDFS = "remote file systems; leave it out and copy RUN yourself"
_PRETRAIN_MIX = "a pretraining loss beside the policy's; leave it out"
_REWARD_NORM = "running normalisation of rewards; advantages are normalised by algo.advantage"
_EMA = "averaged weights; leave it out"


def by_name(*groups: tuple[str, Iterable[str]]) -> Mapping[str, str]:
    """Return a mapping from each pattern of option names to the text of its group."""
    return {name: note for note, names in groups for name in names}


UNSUPPORTED: Mapping[str, Mapping[str, str]] = {
    "verl": by_name(
        (
            _ASYNC,
            (
                "async_training*",
                "trainer.v1.*",
                "transfer_queue*",
                "*.max_inflight_gen_batches",
                "rollout.total_rollout_steps",
            ),
        ),
        (
            _MULTI_TURN,
            (
                "*multi_turn*",
                "*.rollout.agent*",
                "*tool_config*",
                "*function_tool_path",
                "*interaction_config*",
                "data.return_full_prompt",
            ),
        ),
        (_LORA, ("*.lora*", "lora*", "*.model.target_modules", "*.model.exclude_modules", "*.layered_summon")),
        (
            _IMAGES,
            (
                "data.image_*",
                "data.video_*",
                "data.audio_*",
                "data.mm_*",
                "data.*multi_modal*",
                "*vision*",
                "*.limit_images",
            ),
        ),
        (
            _QUANTISED,
            ("*.qat", "*.qat.*", "*rollout.quantization*", "*.exp_avg*_dtype", "*.use_precision_aware_optimizer"),
        ),
        (_MTP, ("*.mtp", "*.mtp.*", "*speculative*")),
        (_DISTILLATION, ("distillation*",)),
        (_PROFILER, ("*profiler*", "*.trace.*", "ray_kwargs.timeline_json_file")),
        (
            _GENERATIVE,
            (
                "*reward_model.rollout.*",
                "*.enable_resource_pool",
                "*reward_model.n_gpus_per_node",
                "*reward_model.nnodes",
                "reward_model.reward_loop_*",
                "reward.reward_manager.module*",
                "reward.reward_manager.source",
            ),
        ),
        (
            _LOSS,
            (
                "*.policy_loss.dro_beta",
                "*pf_ppo*",
                "algorithm.rollout_correction.use_policy_gradient",
                "algorithm.rollout_correction.loss_type",
                "algorithm.rollout_correction.rollout_rs*",
            ),
        ),
        (
            _OPTIMIZER,
            (
                "*.optim.muon*",
                "*.optim.optimizer*",
                "*.optim.override_optimizer_config*",
                "*.optim.lr_wsd*",
                "*.optim.lr_decay_steps",
                "*.optim.lr_warmup_init",
                "*.optim.min_lr",
                "*.optim.num_cycles",
                "*.optim.weight_decay_incr_style",
                "*.optim.use_layer_wise*",
                "*.optim.main_grads_dtype",
                "*.optim.zero_indexed_step",
            ),
        ),
        (
            _MODEL_CODE,
            (
                "*.external_lib",
                "*.override_config",
                "*.override_config.*",
                "*.override_transformer_config*",
                "*.override_mcore_model_config*",
                "*.override_ddp_config*",
                "*.hf_config_path",
                "*trust_remote_code",
            ),
        ),
        (_TEMPLATE, ("*.custom_chat_template",)),
        (_CAP, ("data.train_max_samples",)),
        (
            _PLUGIN,
            ("data.custom_cls*", "data.datagen*", "data.sampler*", "trainer.checkpoint_callback_class"),
        ),
        (
            _ENGINE,
            (
                "*.engine_kwargs*",
                "*cudagraph_capture_sizes",
                "*.disaggregation*",
                "*prometheus*",
                "*.rollout.ignore_eos",
                "*.rollout.*expert_parallel_size",
                "*.rollout.seed",
                "*.rollout.scheduling_policy",
                "*.rollout.over_sample_rate",
                "*.rollout.use_fire_sampling",
                "*.rollout.router_config_path",
                "*.rollout.logprobs_mode",
                "*.rollout.skip*",
            ),
        ),
        ("skipped rollouts; rollout.source=replay trains on recorded ones", ("skip.*",)),
        ("a configuration of several files; convert what --cfg job prints of it", ("defaults", "hydra*")),
        (_HDFS, ("*hdfs*", "*.use_shm")),
        ("routing in files; actor.moe.replay_routing replays that of the rollout", ("*.router_replay.*_file",)),
        ("weights of rows by their share; choose algo.aggregation", ("*.loss_scale_factor",)),
        ("elastic clusters; use --resume after an interruption", ("trainer.esi_redundant_time",)),
    ),
    "LUFFY": by_name(
        (
            "this variant of the loss on demonstrations; see algo.off_policy",
            (
                "*.use_sft_reward",
                "*.off_policy_cliprange",
                "*.off_policy_normalize",
                "*.use_off_policy_clip",
                "*.use_ppo_kl_loss",
                "*.ppo_kl_loss_coef",
                "*.use_target_lst",
                "*.prefix_reward_strategy",
                "algorithm.surprisal_base",
                "trainer.add_full_target_when_none",
            ),
        ),
        (
            "batches collected by accuracy; algo.filter chooses groups",
            (
                "data.filter_accuracy",
                "data.accuracy_*_bound",
                "trainer.acc_rebatch",
                "trainer.rejection_sample_multiplier",
                "trainer.skip_by_step",
            ),
        ),
    ),
    "OpenRLHF": by_name(
        (_ASYNC, ("async_train", "async_queue_size", "*partial_rollout*", "train.async_*")),
        (_MULTI_TURN, ("agent_func_path", "train.agent_func_path", "rollout_tasks_per_gpu")),
        (_LORA, ("lora_*", "target_modules", "load_in_4bit", "ds.lora.*", "ds.load_in_4bit")),
        (
            _IMAGES,
            ("data.max_images_per_prompt", "data.image_key", "*freeze_visual_*"),
        ),
        (_PRETRAIN_MIX, ("ptx_coef",)),
        (_REWARD_NORM, ("normalize_reward", "reward.normalize_enable")),
        (_EMA, ("enable_ema", "ema_beta", "train.enable_ema", "train.ema_beta")),
        (_TEMPLATE, ("input_template", "data.input_template")),
        (_CAP, ("max_samples", "data.max_samples", "max_len", "data.max_len")),
        ("data hubs; download the data and name its files", ("use_ms", "*prompt_split", "eval_split", "eval.split")),
        (_OPTIMIZER, ("*.muon.*", "*.optim", "grad_accum_dtype", "ds.grad_accum_dtype")),
        (
            "this penalty or correction; see algo.reward and algo.correction",
            ("*stop_properly_penalty_coef", "*.kl.unbiased_gradient", "*.is_correction_gating", "*_correction_level"),
        ),
    ),
}
