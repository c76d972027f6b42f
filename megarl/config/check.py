"""Check a configuration beyond its types: ranges, relations between keys, and fit to the model's dimensions.

Each rule is a function that raises ConfigError. Tuples at the end of the module list the rules of each kind of run.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import TypeAlias

from megarl.config.check_batches import (
    check_pair_fits_micro_batch,
    check_responses_fit_micro_batch,
    check_row_fits_engine,
    check_row_fits_micro_batch,
    check_sft_outlasts_warmup,
    check_sft_row_fits_micro_batch,
    check_train_outlasts_warmup,
    check_train_preference_outlasts_warmup,
    check_train_reward_outlasts_warmup,
    check_whole_mini_batches,
    longest_row,
)
from megarl.config.check_engine import check_engine_arguments, check_engine_model, check_quantization, check_speculation
from megarl.config.check_experts import check_expert_width, check_experts, check_moe_settings, check_replayed_routing
from megarl.config.check_keep_best import check_scores_for_keep_best, check_supervised_scores_for_keep_best
from megarl.config.check_kernels import check_batch_invariance, check_kernels
from megarl.config.check_layout import check_layout, check_role_layouts, check_stages, check_tp, model_dimension
from megarl.config.check_names import check_names
from megarl.config.check_placement import (
    check_engine_tp,
    check_engines,
    check_schedule,
    check_sync,
    check_trainer_nodes,
)
from megarl.config.check_rewards import check_group_scores, check_policy_judges, check_rewards, judges
from megarl.config.plugins import use_plugins
from megarl.config.schema import Config, RewardModelConfig, role_settings
from megarl.config.setting import require_ranges
from megarl.errors import ConfigError
from megarl.host.device.platform import platform
from megarl.texts.masking import require_unmasked

Rule: TypeAlias = Callable[[Config], None]


def check_config(config: Config) -> None:
    """Check the rules common to all kinds of training. Raises ConfigError, whose message says what to change."""
    _apply((*COMMON_RULES, *ROW_RULES), config)


def check_train(config: Config) -> None:
    """Check the rules of RL training, which include those of `check_config`. Raises ConfigError."""
    _apply((*COMMON_RULES, *TRAIN_RULES), config)


def check_sft(config: Config) -> None:
    """Check the rules of supervised fine-tuning, which include those of `check_config`. Raises ConfigError."""
    _apply((*COMMON_RULES, *SFT_RULES), config)


def check_train_reward(config: Config) -> None:
    """Check the rules of reward-model training, which include those of `check_config`. Raises ConfigError."""
    _apply((*COMMON_RULES, *TRAIN_REWARD_RULES), config)


def check_train_preference(config: Config) -> None:
    """Apply the rules of `check_config` and those of training on preference pairs. Raises ConfigError."""
    _apply((*COMMON_RULES, *TRAIN_PREFERENCE_RULES), config)


def check_eval(config: Config) -> None:
    """Check the rules of an evaluation, which uses engines but does not train. Raises ConfigError."""
    _apply(EVAL_RULES, config)


def check_serve_reward(config: Config) -> None:
    """Check the rules of a reward service, which has no model and no data. Raises ConfigError."""
    _apply(SERVE_RULES, config)


def check_model(config: Config, hf_config: Mapping[str, object], role: str = "actor", *, for_sft: bool = False) -> None:
    """Check a configuration against the config.json of a role's model, given as a mapping. Raises ConfigError."""
    layout = role_settings(config)[role].layout
    check_tp(layout, hf_config, role)
    check_stages(layout, hf_config, f"{role}.layout")
    check_experts(layout, hf_config, role)
    if role == "actor":
        check_moe_settings(config, hf_config)
        check_engine_tp(config, hf_config)
        check_engine_model(config, hf_config, on_cpu=platform().name == "cpu")
        check_expert_width(config, hf_config, platform().expert_width_multiple)
    _require_positions(hf_config, role, *longest_row(config, sft=for_sft))


def _apply(rules: tuple[Rule, ...], config: Config) -> None:
    require_unmasked(asdict(config))
    use_plugins(config.algo.plugins)
    for rule in rules:
        rule(config)


# --- every kind of run


def _require_model_path(config: Config) -> None:
    if not config.model.path:
        raise ConfigError("model.path: is empty; set it to a directory with config.json and *.safetensors")


def _require_sound_layout(config: Config) -> None:
    check_layout(config.actor.layout, "actor.layout")


def _require_ipc(config: Config) -> None:
    here = platform()
    if config.sync.cuda_ipc and not here.has_ipc:
        raise ConfigError(
            f"sync.cuda_ipc: got true, but processes cannot share a device's memory on {here.name}; set "
            f"sync.cuda_ipc=false"
        )


def _require_known_routing(config: Config) -> None:
    check_replayed_routing(config, captured=platform().name == "cuda")


def _require_dtype_of_layers(config: Config) -> None:
    here = platform()
    if config.model.dtype == "float32" and here.name == "cuda" and find_spec("transformer_engine") is not None:
        raise ConfigError(
            "model.dtype: got float32, but Transformer Engine has no attention for packed sequences in float32; set "
            "model.dtype=bfloat16"
        )


def _require_joined_cluster(config: Config) -> None:
    cluster = config.cluster
    if cluster.hosts and cluster.address is None:
        raise ConfigError(
            "cluster.hosts: is set, but without cluster.address Ray is started on this host alone; set "
            "cluster.address=HOST:PORT, or remove it"
        )


# --- RL training


def _require_train_data(config: Config) -> None:
    if not config.data.train:
        raise ConfigError("data.train: is empty; list parquet or JSONL files, as in data.train=[a.parquet]")


def _require_sound_validation(config: Config) -> None:
    validation = config.validation
    if config.trainer.total_steps == 0 and not config.data.val:
        raise ConfigError(
            "trainer.total_steps: got 0, which only validates, but data.val is empty; set data.val, or take more steps"
        )
    if any(k > validation.num_samples for k in validation.pass_at):
        raise ConfigError(
            f"validation.pass_at: got {list(validation.pass_at)}, expected at most validation.num_samples="
            f"{validation.num_samples}; raise that, or lower these"
        )


def _require_profile_within_run(config: Config) -> None:
    if (steps := config.logging.profile_steps) is None:
        return
    if not 1 <= steps[0] <= steps[1] <= config.trainer.total_steps:
        raise ConfigError(
            f"logging.profile_steps: got {list(steps)}, expected first and last step with "
            f"1 <= first <= last <= trainer.total_steps={config.trainer.total_steps}"
        )


def _require_sound_rollout(config: Config) -> None:
    rollout = config.rollout
    if rollout.top_p != 1 and rollout.top_k == -1:
        raise ConfigError(
            f"rollout.top_p: got {rollout.top_p}, but rollout.top_k=-1 does not limit the number of tokens that it "
            "leaves to sample from, which training records for every token; set rollout.top_k, as in "
            "rollout.top_k=100, or rollout.top_p=1.0"
        )
    if rollout.top_k == 1:
        raise ConfigError(
            "rollout.top_k: got 1, which leaves nothing to choose, so no token has a gradient; set it to at least 2, "
            "or to -1"
        )
    if rollout.top_k != -1 and config.algo.cpo.method != "none":
        raise ConfigError(
            f"rollout.top_k: got {rollout.top_k}, but algo.cpo.method={config.algo.cpo.method} compares log-probs over "
            "the whole vocabulary; set rollout.top_k=-1 and rollout.top_p=1.0"
        )
    if config.rollout.source != "vllm" and not config.rollout.replay_dir:
        raise ConfigError(
            f"rollout.replay_dir: is not set, but rollout.source={config.rollout.source}; "
            "set it to the records directory of an earlier run with rollout.record=true"
        )


def _require_reward_model(config: Config) -> None:
    if judges(config.rewards, "model") and config.reward_model.model_path is None:
        raise ConfigError(
            f"reward_model.model_path: is not set, but rewards.manager={config.rewards.manager} asks a reward model; "
            "set it to a directory with score.weight, such as RUN/export of megarl train-reward, or change the manager"
        )


# --- supervised warm start


def _require_sft_data(config: Config) -> None:
    if not config.sft.train:
        raise ConfigError("sft.train: is empty; list parquet or JSONL files, as in sft.train=[a.parquet]")


# --- reward model training


def _require_pairs_alone(config: Config) -> None:
    if not config.train_reward.train:
        raise ConfigError(
            "train_reward.train: is empty; list parquet or JSONL files, as in train_reward.train=[a.jsonl]"
        )
    if config.reward_model != RewardModelConfig():
        raise ConfigError(
            "reward_model: is for runs that are judged by a reward model; train-reward trains model.path with the "
            "settings of actor: set those, and leave reward_model out"
        )


# --- policies on preference pairs


def _require_preference_data(config: Config) -> None:
    settings = config.train_preference
    if not settings.train:
        raise ConfigError(
            "train_preference.train: is empty; list parquet or JSONL files, as in train_preference.train=[a.jsonl]"
        )
    if settings.objective == "kto" and settings.batch_size == 1:
        raise ConfigError(
            "train_preference.batch_size: got 1, where no other pair lends the response that kto's KL is estimated "
            "with; raise it, or choose another train_preference.objective"
        )


def _require_other_hints(config: Config) -> None:
    if config.algo.cpo.shuffled_baseline and config.trainer.prompts_per_step == 1:
        raise ConfigError(
            "algo.cpo.shuffled_baseline: got true with trainer.prompts_per_step=1, where no other prompt lends its "
            "hint and CPO would change nothing; raise prompts_per_step, or set it to false"
        )


# Ranges come first: later rules divide by these numbers.
COMMON_RULES: tuple[Rule, ...] = (
    require_ranges,
    check_names,
    _require_model_path,
    _require_sound_layout,
    _require_dtype_of_layers,
    check_kernels,
    check_batch_invariance,
    check_trainer_nodes,
    _require_joined_cluster,
)
ROW_RULES: tuple[Rule, ...] = (check_row_fits_micro_batch, check_row_fits_engine)
TRAIN_RULES: tuple[Rule, ...] = (
    *ROW_RULES,
    _require_train_data,
    _require_profile_within_run,
    _require_sound_validation,
    check_scores_for_keep_best,
    _require_sound_rollout,
    check_rewards,
    check_group_scores,
    check_policy_judges,
    _require_other_hints,
    check_role_layouts,
    check_whole_mini_batches,
    _require_reward_model,
    _require_known_routing,
    check_train_outlasts_warmup,
    check_engines,
    check_engine_arguments,
    check_speculation,
    check_quantization,
    check_schedule,
    check_sync,
    _require_ipc,
)
SFT_RULES: tuple[Rule, ...] = (
    _require_sft_data,
    partial(check_supervised_scores_for_keep_best, name="sft"),
    check_sft_row_fits_micro_batch,
    check_sft_outlasts_warmup,
)
TRAIN_REWARD_RULES: tuple[Rule, ...] = (
    *ROW_RULES,
    _require_pairs_alone,
    partial(check_supervised_scores_for_keep_best, name="train_reward"),
    check_pair_fits_micro_batch,
    check_train_reward_outlasts_warmup,
)
TRAIN_PREFERENCE_RULES: tuple[Rule, ...] = (
    *ROW_RULES,
    _require_preference_data,
    partial(check_supervised_scores_for_keep_best, name="train_preference"),
    check_responses_fit_micro_batch,
    check_role_layouts,
    check_train_preference_outlasts_warmup,
)
EVAL_RULES: tuple[Rule, ...] = (
    require_ranges,
    check_names,
    _require_sound_layout,
    check_batch_invariance,
    check_rewards,
    check_row_fits_engine,
    check_trainer_nodes,
    check_engines,
    check_engine_arguments,
    check_speculation,
    check_sync,
    _require_ipc,
    _require_joined_cluster,
)
# Rules for the part of a configuration that `megarl serve-reward` reads.
SERVE_RULES: tuple[Rule, ...] = (require_ranges, check_rewards)


def _require_positions(hf_config: Mapping[str, object], role: str, longest: int, terms: str) -> None:
    limit = model_dimension(hf_config, "max_position_embeddings", role)
    if limit < longest:
        whose = "the model" if role == "actor" else f"the {role}"
        total, remedy = (f"{terms} = {longest}", "shorten one of the two") if " + " in terms else (terms, "lower it")
        raise ConfigError(f"{total}, but {whose} has max_position_embeddings={limit}; {remedy}")


# The commands that train, and the check of a configuration for each.
TRAINING_CHECKS: Mapping[str, Callable[[Config], None]] = {
    "train": check_train,
    "sft": check_sft,
    "train-reward": check_train_reward,
    "train-preference": check_train_preference,
}
