"""List names of algorithm options in verl, its CPO, PPO-critic and LUFFY forks, and OpenRLHF, for `aliases`."""

from megarl.config.aliases_roles import Entries

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_SPLIT_STRATEGY = "strategies and their names are in docs/algorithms.md"

VERL_ALGO: Entries = {
    "algorithm.gamma": ("algo.advantage.gamma",),
    "algorithm.lam": ("algo.advantage.lam",),
    "algorithm.lam_actor": ("algo.advantage.lam",),
    "algorithm.lam_critic": ("algo.advantage.lam_critic",),
    "algorithm.filter_groups.metric": ("algo.filter.by", "acc is correct"),
    "algorithm.filter_groups.enable": ("algo.filter.mean_score", "bounds of a group's mean score"),
    "algorithm.filter_groups.max_num_gen_batches": ("algo.filter.max_refills",),
    "reward_model.overlong_buffer.len": ("algo.reward.overlong_buffer_tokens",),
    "reward_model.overlong_buffer.penalty_factor": ("algo.reward.overlong_factor",),
    f"{_ACTOR}.policy_loss.loss_mode": ("algo.policy_loss.name",),
}

PPO_CRITIC: Entries = {
    "algorithm.reward_source": ("algo.reward.source", "rule_based is rule"),
    "algorithm.reward_mask_ratio": ("algo.reward.mask.ratio",),
    "algorithm.reward_mask_type": ("algo.reward.mask.kind", "fixed_ratio is fixed"),
    "algorithm.reward_mask_flip_adv_when_masked": ("algo.reward.mask.flip",),
}

CPO: Entries = {
    name: (f"algo.cpo.{key}", *note)
    for section in ("algorithm", _ACTOR)
    for name, key, *note in (
        (f"{section}.wrap_method", "method"),
        (f"{section}.cpo_lambda", "ratio_clamp"),
        (f"{section}.pos_alpha", "pos_alpha"),
        (f"{section}.neg_alpha", "neg_alpha"),
        (f"{section}.mi_alpha", "mi_alpha"),
        (f"{section}.kl_alpha", "kl_alpha"),
        (f"{section}.gold_as_hint", "hint.source", "true is solution, false is answer"),
    )
} | {
    "algorithm.adv_estimator=cpo": ("", "set use.algo=cpo, or another file of configs/algo"),
    f"{_ACTOR}.vocab_size": ("", "it is the model's"),
}

LUFFY: Entries = {
    f"{_ACTOR}.use_off_policy_loss": ("algo.off_policy.loss", "true is luffy"),
    f"{_ACTOR}.use_sft_multitask_loss": ("algo.off_policy.loss", "true is sft"),
    f"{_ACTOR}.sft_loss_coef": ("algo.off_policy.sft_coef",),
    f"{_ACTOR}.off_policy_reshape": ("algo.off_policy.reshape",),
    f"{_ACTOR}.off_policy_reshape_weight": ("algo.off_policy.reshape_weight",),
    f"{_ACTOR}.off_policy_reshape_pow_exp": ("algo.off_policy.reshape_exponent",),
    f"{_ACTOR}.on_policy_reshape": ("algo.off_policy.on_policy_reshape",),
    f"{_ACTOR}.on_policy_reshape_weight": ("algo.off_policy.on_policy_reshape_weight",),
    f"{_ACTOR}.on_policy_reshape_pow_exp": ("algo.off_policy.on_policy_reshape_exponent",),
    f"{_ACTOR}.off_policy_max_clip": ("algo.off_policy.max_clip",),
    f"{_ACTOR}.off_policy_min_clip": ("algo.off_policy.min_clip",),
    f"{_ACTOR}.all_max_clip": ("algo.off_policy.drop_above",),
    f"{_ACTOR}.clip_upper_bound": ("algo.off_policy.clip_upper_bound",),
    f"{_ACTOR}.loss_remove_clip": ("algo.off_policy.remove_clip",),
    f"{_ACTOR}.loss_remove_token_mean": ("algo.aggregation", "set it to dr_grpo"),
    f"{_ROLLOUT}.prefix_strategy": ("algo.demonstrations.strategy", _SPLIT_STRATEGY),
    f"{_ROLLOUT}.prefix_share_across_samples": ("algo.demonstrations.shared",),
    f"{_ROLLOUT}.prefix_steps": ("algo.demonstrations.decay_steps",),
    f"{_ROLLOUT}.prefix_linear_max_ratio": ("algo.demonstrations.max_ratio",),
    f"{_ROLLOUT}.min_prefix_ratio": ("algo.demonstrations.min_ratio",),
    f"{_ROLLOUT}.max_prefix_ratio": ("algo.demonstrations.max_ratio",),
    f"{_ROLLOUT}.max_prefix_len": ("algo.demonstrations.max_tokens",),
    f"{_ROLLOUT}.n_prefix": ("algo.demonstrations.num_prefixed",),
    "algorithm.grpo_use_std": ("algo.advantage.norm_by_std",),
    "data.sample_target_ratio": ("algo.demonstrations.keep_frac",),
    "data.filter_targets": ("algo.demonstrations.on_long", "true is drop"),
    "trainer.rejection_sample": ("algo.filter.uniform_scores", "the scores whose groups go, as in [0.0, 1.0]"),
    "trainer.skip_valid_mask": ("algo.filter.uniform_scores", "true is []"),
}

OPENRLHF_ALGO: Entries = {
    "enable_vllm_is_correction": ("algo.correction.name", "tis, icepop, seq_mask_tis or reinforce_pro; false is none"),
    "vllm_is_correction_type": ("algo.correction.name",),
    "vllm_is_truncated_threshold": ("algo.correction.low algo.correction.high",),
    "reward_clip_range": ("algo.reward.clip",),
    "dynamic_filtering": ("algo.filter.mean_score", "bounds of a group's mean score"),
    "dynamic_filtering_reward_range": ("algo.filter.mean_score", "of scores with algo.filter.by=score"),
    "overlong_buffer_len": ("algo.reward.overlong_buffer_tokens",),
    "overlong_penalty_factor": ("algo.reward.overlong_factor",),
    "uniform_scale": ("algo.advantage.uniform_scale",),
    "lambd": ("algo.advantage.lam",),
    "gamma": ("algo.advantage.gamma",),
    "dual_clip": ("algo.policy_loss.dual_clip",),
}
