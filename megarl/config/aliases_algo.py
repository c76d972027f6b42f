"""List algorithm options of verl, its forks (CPO, PPO-critic, LUFFY) and OpenRLHF, which `aliases` looks up."""

from functools import partial

from megarl.config import translate
from megarl.config.aliases_roles import Entries
from megarl.config.translate import UNSET

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_SPLIT_STRATEGY = "strategies and their names are in docs/algorithms.md"

VERL_ALGO: Entries = {
    "algorithm.gamma": ("algo.advantage.gamma",),
    "algorithm.lam": ("algo.advantage.lam",),
    "algorithm.lam_actor": ("algo.advantage.lam",),
    "algorithm.lam_critic": ("algo.advantage.lam_critic",),
    "algorithm.filter_groups.metric": (
        "algo.filter.by",
        "acc is correct",
        translate.choose({"acc": "correct", "seq_reward": "reward", "seq_final_reward": "reward", "score": "reward"}),
    ),
    "algorithm.filter_groups.enable": (
        "algo.filter.mean_score",
        "bounds of a group's mean score",
        translate.filter_groups,
    ),
    "algorithm.filter_groups.max_num_gen_batches": (
        "algo.filter.max_refills",
        "batches besides the first",
        translate.refills,
    ),
    f"{_ACTOR}.policy_loss.loss_mode": (
        "algo.policy_loss.name algo.aggregation",
        "vanilla is ppo_clip, gpg is reinforce, and geo_mean is gmpo; gspo, geo_mean and sapo are means of rows",
        translate.choose(
            {
                "vanilla": ("ppo_clip", UNSET),
                "cispo": ("cispo", UNSET),
                "gpg": ("reinforce", UNSET),
                "gspo": ("gspo", "seq-mean-token-mean"),
                "geo_mean": ("gmpo", "seq-mean-token-mean"),
                "sapo": ("sapo", "seq-mean-token-mean"),
                "clip_cov": ("clip_cov", UNSET),
                "kl_cov": ("kl_cov", UNSET),
            }
        ),
    ),
    f"{_ACTOR}.policy_loss.clip_cov_ratio": (
        "algo.policy_loss.cov_share",
        "tokens are chosen once per step, of all its rows",
        partial(translate.of_loss, loss="clip_cov"),
    ),
    f"{_ACTOR}.policy_loss.clip_cov_lb": ("algo.policy_loss.cov_low",),
    f"{_ACTOR}.policy_loss.clip_cov_ub": ("algo.policy_loss.cov_high",),
    f"{_ACTOR}.policy_loss.kl_cov_ratio": (
        "algo.policy_loss.cov_share",
        "tokens are chosen once per step, of all its rows",
        partial(translate.of_loss, loss="kl_cov"),
    ),
    f"{_ACTOR}.policy_loss.ppo_kl_coef": ("algo.policy_loss.cov_kl_coef",),
    f"{_ACTOR}.tau_pos": ("algo.policy_loss.tau_pos",),
    f"{_ACTOR}.tau_neg": ("algo.policy_loss.tau_neg",),
} | {
    f"{section}.{name}": entry
    for section in (
        "reward_model.overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
        "custom_reward_function.overlong_buffer",
    )
    for name, entry in (
        ("enable", ("algo.reward.overlong_buffer_tokens", "its length, or null", lambda *_: UNSET)),
        (
            "len",
            ("algo.reward.overlong_buffer_tokens", "", partial(translate.overlong, switch=f"{section}.enable")),
        ),
        ("penalty_factor", ("algo.reward.overlong_factor",)),
    )
}

PPO_CRITIC: Entries = {
    "algorithm.reward_source": (
        "algo.reward.source",
        "rule_based is rule",
        translate.choose({"rule_based": "rule", "critic": "critic"}),
    ),
    "algorithm.reward_mask_ratio": ("algo.reward.mask.ratio",),
    "algorithm.reward_mask_type": (
        "algo.reward.mask.kind",
        "fixed_ratio is fixed",
        translate.choose({"fixed_ratio": "fixed", "bernoulli": "bernoulli"}),
    ),
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
        (
            f"{section}.gold_as_hint",
            "hint.source",
            "true is solution, false is answer",
            translate.choose({True: "solution", False: "answer"}),
        ),
    )
} | {
    "algorithm.adv_estimator=cpo": ("", "set use.algo=cpo, or another file of configs/algo"),
    f"{_ACTOR}.vocab_size": ("", "it is the model's"),
}

LUFFY: Entries = {
    f"{_ACTOR}.adaptive_temperature_clip": ("algo.entropy.max_coef", "", translate.unless_off),
    f"{_ACTOR}.adaptive_temperature_target_entropy": ("algo.entropy.target_nats",),
    f"{_ACTOR}.alpha_lr": ("algo.entropy.lr",),
    f"{_ACTOR}.use_adaptive_temperature": (
        "algo.entropy.controller",
        "true is learned",
        translate.choose({True: "learned", False: UNSET}),
    ),
    f"{_ACTOR}.use_adaptive_temperature_fixed": (
        "algo.entropy.controller",
        "true is proportional",
        translate.choose({True: "proportional", False: UNSET}),
    ),
    f"{_ACTOR}.use_off_policy_probs": ("algo.off_policy.target_probs",),
    f"{_ACTOR}.use_sft_prefix_reward": (
        "algo.off_policy.prefix_reward",
        "true is actor_rollout_ref.actor.sft_prefix_reward_weight",
        lambda value, options: options.get(f"{_ACTOR}.sft_prefix_reward_weight", 1.0) if value else UNSET,
    ),
    f"{_ROLLOUT}.n_val": ("validation.num_samples",),
    f"{_ROLLOUT}.prefix_linear_max_var": ("algo.demonstrations.variance",),
    f"{_ROLLOUT}.prefix_reward_weight_alpha": ("algo.off_policy.demonstration_weight",),
    f"{_ROLLOUT}.prefix_reward_weight_beta": ("algo.off_policy.policy_weight",),
    f"{_ROLLOUT}.val_temperature": ("validation.temperature", "", translate.sampled_validation),
    "data.add_tgt_acc_upper_bound": (
        "algo.demonstrations.max_group_accuracy",
        "with data.add_tgt_with_acc",
        lambda value, options: value if options.get("data.add_tgt_with_acc") else UNSET,
    ),
    "data.add_tgt_with_acc": (
        "algo.demonstrations.max_group_accuracy",
        "true is data.add_tgt_acc_upper_bound",
        lambda value, options: options.get("data.add_tgt_acc_upper_bound", 0.5) if value else UNSET,
    ),
    "data.disable_truncation_advantage": ("algo.off_policy.drop_truncated",),
    f"{_ACTOR}.use_off_policy_loss": ("algo.off_policy.loss", "true is luffy", translate.off_policy_loss),
    f"{_ACTOR}.use_sft_multitask_loss": (
        "algo.off_policy.loss",
        "true is sft",
        translate.choose({True: "sft", False: UNSET}),
    ),
    f"{_ACTOR}.sft_loss_coef": ("algo.off_policy.sft_coef",),
    f"{_ACTOR}.off_policy_reshape": ("algo.off_policy.reshape",),
    f"{_ACTOR}.off_policy_reshape_weight": ("algo.off_policy.reshape_weight",),
    f"{_ACTOR}.off_policy_reshape_pow_exp": ("algo.off_policy.reshape_exponent",),
    f"{_ACTOR}.on_policy_reshape": ("algo.off_policy.on_policy_reshape",),
    f"{_ACTOR}.on_policy_reshape_weight": ("algo.off_policy.on_policy_reshape_weight",),
    f"{_ACTOR}.on_policy_reshape_pow_exp": ("algo.off_policy.on_policy_reshape_exponent",),
    f"{_ACTOR}.off_policy_max_clip": ("algo.off_policy.max_clip", "", translate.unless_off),
    f"{_ACTOR}.off_policy_min_clip": ("algo.off_policy.min_clip", "", translate.unless_off),
    f"{_ACTOR}.all_max_clip": ("algo.off_policy.drop_above", "", translate.unless_off),
    f"{_ACTOR}.clip_upper_bound": ("algo.off_policy.clip_upper_bound",),
    f"{_ACTOR}.loss_remove_clip": ("algo.off_policy.remove_clip",),
    f"{_ACTOR}.loss_remove_token_mean": (
        "algo.aggregation",
        "set it to dr_grpo",
        translate.choose({True: "dr_grpo", False: UNSET}),
    ),
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
    "data.filter_targets": (
        "algo.demonstrations.on_long",
        "true is drop",
        translate.choose({True: "drop", False: "cut"}),
    ),
    "trainer.rejection_sample": (
        "algo.filter.uniform_scores",
        "the scores whose groups go, as in [0.0, 1.0]",
        translate.choose({True: [0.0, 1.0], False: UNSET}),
    ),
    "trainer.skip_valid_mask": ("algo.filter.uniform_scores", "true is []", translate.choose({True: [], False: UNSET})),
}

OPENRLHF_ALGO: Entries = {
    "enable_vllm_is_correction": (
        "algo.correction.name algo.correction.low algo.correction.high",
        "tis, icepop, seq_mask_tis or reinforce_pro; false is none",
        translate.is_correction,
    ),
    "vllm_is_correction_type": ("algo.correction.name", "", lambda *_: UNSET),
    "vllm_is_truncated_threshold": ("algo.correction.low algo.correction.high", "", lambda *_: UNSET),
    "reward_clip_range": ("algo.reward.clip",),
    "dynamic_filtering": (
        "algo.filter.mean_score algo.filter.by algo.filter.max_refills",
        "bounds of a group's mean score; refills have a limit here",
        translate.dynamic_filtering,
    ),
    "dynamic_filtering_reward_range": (
        "algo.filter.mean_score",
        "of scores with algo.filter.by=score",
        lambda *_: UNSET,
    ),
    "overlong_buffer_len": (
        "algo.reward.overlong_buffer_tokens",
        "",
        lambda value, _: None if value is None else int(value),
    ),
    "overlong_penalty_factor": ("algo.reward.overlong_factor",),
    "uniform_scale": ("algo.advantage.uniform_scale",),
    "lambd": ("algo.advantage.lam",),
    "gamma": ("algo.advantage.gamma",),
    "dual_clip": ("algo.policy_loss.dual_clip",),
}
