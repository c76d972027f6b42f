"""What a configuration must satisfy beyond its types: ranges, relations of keys, the model's dimensions.

Each rule is a function that raises ConfigError, and a member of one of the lists below.
"""

from collections.abc import Callable, Mapping
from math import gcd
from typing import TypeAlias

from megarl.config.check_layout import check_layout, check_stages
from megarl.config.check_placement import check_engine_tp, check_engines, check_trainer_nodes
from megarl.config.ranges import require_ranges
from megarl.config.schema import Config
from megarl.errors import ConfigError

Rule: TypeAlias = Callable[[Config], None]


def check_config(config: Config) -> None:
    """Rules of every kind of run. Raises ConfigError with the remedy."""
    _apply(COMMON_RULES, config)


def check_train(config: Config) -> None:
    """`check_config`, and what RL training needs."""
    _apply((*COMMON_RULES, *TRAIN_RULES), config)


def check_sft(config: Config) -> None:
    """`check_config`, and what a supervised warm start needs."""
    _apply((*COMMON_RULES, *SFT_RULES), config)


def check_model(config: Config, hf_config: Mapping[str, object]) -> None:
    """Rules that need the model's config.json, given as a mapping."""
    _require_tp_divides(config, hf_config)
    check_stages(config.actor.layout, hf_config, "actor.layout")
    check_engine_tp(config, hf_config)
    _require_positions(config, hf_config)


def _apply(rules: tuple[Rule, ...], config: Config) -> None:
    for rule in rules:
        rule(config)


# --- every kind of run


def _require_model_path(config: Config) -> None:
    if not config.model.path:
        raise ConfigError("model.path: is empty; set it to a directory with config.json and *.safetensors")


def _require_sound_layouts(config: Config) -> None:
    check_layout(config.actor.layout, "actor.layout")


def _max_row_tokens(config: Config) -> int:
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def _max_row_terms(config: Config) -> str:
    return (
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} + "
        f"rollout.max_response_tokens={config.rollout.max_response_tokens}"
    )


def _require_row_fits_micro_batch(config: Config) -> None:
    longest = _max_row_tokens(config)
    if config.actor.micro_batch_tokens < longest:
        raise ConfigError(
            f"actor.micro_batch_tokens: got {config.actor.micro_batch_tokens}, expected >= {longest} "
            f"({_max_row_terms(config)}), or the longest row fits no micro-batch; raise it or shorten the two"
        )


def _require_row_fits_engine(config: Config) -> None:
    limit, longest = config.rollout.engine.max_model_tokens, _max_row_tokens(config)
    if limit is not None and limit < longest:
        raise ConfigError(
            f"rollout.engine.max_model_tokens: got {limit}, expected >= {longest} "
            f"({_max_row_terms(config)}); raise it, shorten the two, or set it to null"
        )


# --- RL training


def _require_train_data(config: Config) -> None:
    if not config.data.train:
        raise ConfigError("data.train: is empty; list parquet or JSONL files, as in data.train=[a.parquet]")


def _require_positive_weights(config: Config) -> None:
    for i, entry in enumerate(config.data.train):
        if not isinstance(entry, str) and entry.weight <= 0:
            raise ConfigError(f"data.train[{i}].weight: got {entry.weight}, expected > 0; leave the file out instead")


def _require_profile_within_run(config: Config) -> None:
    if (steps := config.logging.profile_steps) is None:
        return
    if not 1 <= steps[0] <= steps[1] <= config.trainer.total_steps:
        raise ConfigError(
            f"logging.profile_steps: got {list(steps)}, expected first and last step with "
            f"1 <= first <= last <= trainer.total_steps={config.trainer.total_steps}"
        )


def _require_scores_for_keep_best(config: Config) -> None:
    checkpoint, validation = config.checkpoint, config.validation
    if checkpoint.keep_best == 0:
        return
    if not config.data.val:
        raise ConfigError(
            f"checkpoint.keep_best: got {checkpoint.keep_best}, but data.val is empty, so no checkpoint has a score; "
            "set data.val, or checkpoint.keep_best=0"
        )
    if checkpoint.every_steps % validation.every_steps:
        raise ConfigError(
            f"checkpoint.every_steps: got {checkpoint.every_steps}, expected a multiple of validation.every_steps="
            f"{validation.every_steps}, or checkpoints have no score to keep the best by; change either, or set "
            "checkpoint.keep_best=0"
        )
    if checkpoint.best_metric == "val/test_score_greedy" and not validation.greedy:
        raise ConfigError(
            "checkpoint.best_metric: got 'val/test_score_greedy', but validation.greedy=false; set it to true, or "
            "checkpoint.best_metric=val/test_score"
        )


def _require_untruncated_sampling(config: Config) -> None:
    rollout = config.rollout
    if rollout.top_p != 1:
        raise ConfigError(
            f"rollout.top_p: got {rollout.top_p}; truncated sampling breaks importance ratios; set rollout.top_p=1.0"
        )
    if rollout.top_k != -1:
        raise ConfigError(
            f"rollout.top_k: got {rollout.top_k}; truncated sampling breaks importance ratios; set rollout.top_k=-1"
        )


def _mini_batch_prompts(config: Config) -> int:
    return config.trainer.mini_batch_prompts or config.trainer.prompts_per_step


def _require_whole_mini_batches(config: Config) -> None:
    trainer = config.trainer
    if trainer.prompts_per_step % _mini_batch_prompts(config):
        raise ConfigError(
            f"trainer.mini_batch_prompts: got {trainer.mini_batch_prompts}, which does not divide "
            f"trainer.prompts_per_step={trainer.prompts_per_step}; set it to a divisor, or to null"
        )


def _require_dp_divides_rows(config: Config) -> None:
    dp, prompts, samples = config.actor.layout.dp, _mini_batch_prompts(config), config.rollout.num_samples
    if prompts * samples % dp:
        raise ConfigError(
            f"actor.layout.dp: got {dp}, which does not divide the {prompts * samples} rows of an optimizer "
            f"step ({prompts} prompts × rollout.num_samples={samples}); change dp, rollout.num_samples, "
            "trainer.mini_batch_prompts or trainer.prompts_per_step"
        )


def _require_replay_dir(config: Config) -> None:
    if config.rollout.source == "replay" and not config.rollout.replay_dir:
        raise ConfigError(
            "rollout.replay_dir: is not set, but rollout.source=replay; "
            "set it to the records directory of an earlier run with rollout.record=true"
        )


def _require_group_for_grpo(config: Config) -> None:
    if config.algo.advantage.estimator == "grpo" and config.rollout.num_samples < 2:
        raise ConfigError(
            f"rollout.num_samples: got {config.rollout.num_samples}, expected >= 2: the grpo estimator "
            "compares the samples of one prompt; raise it or choose another algo.advantage.estimator"
        )


def _num_optimizer_steps(config: Config) -> int:
    trainer = config.trainer
    per_pass = trainer.prompts_per_step // _mini_batch_prompts(config)
    return trainer.total_steps * trainer.num_epochs * per_pass


def _require_train_outlasts_warmup(config: Config) -> None:
    _require_warmup_below(config, _num_optimizer_steps(config))


def _require_warmup_below(config: Config, num_steps: int) -> None:
    warmup_steps = config.actor.optimizer.warmup_steps
    if warmup_steps >= num_steps:
        raise ConfigError(
            f"actor.optimizer.warmup_steps: got {warmup_steps}, expected < {num_steps}, the run's optimizer "
            "steps, or the learning rate never arrives; shorten the warm-up or lengthen the run"
        )


# --- supervised warm start


def _require_sft_data(config: Config) -> None:
    if not config.sft.train:
        raise ConfigError("sft.train: is empty; list parquet or JSONL files, as in sft.train=[a.parquet]")


def _require_dp_divides_sft_batch(config: Config) -> None:
    dp, batch_size = config.actor.layout.dp, config.sft.batch_size
    if batch_size % dp:
        raise ConfigError(
            f"sft.batch_size: got {batch_size}, expected a multiple of actor.layout.dp={dp}; change either"
        )


def _require_sft_outlasts_warmup(config: Config) -> None:
    _require_warmup_below(config, config.sft.total_steps)


# Ranges come first: later rules divide by these numbers.
COMMON_RULES: tuple[Rule, ...] = (
    require_ranges,
    _require_model_path,
    _require_sound_layouts,
    _require_row_fits_micro_batch,
    _require_row_fits_engine,
    check_trainer_nodes,
)
TRAIN_RULES: tuple[Rule, ...] = (
    _require_train_data,
    _require_positive_weights,
    _require_profile_within_run,
    _require_scores_for_keep_best,
    _require_untruncated_sampling,
    _require_whole_mini_batches,
    _require_dp_divides_rows,
    _require_replay_dir,
    _require_group_for_grpo,
    _require_train_outlasts_warmup,
    check_engines,
)
SFT_RULES: tuple[Rule, ...] = (
    _require_sft_data,
    _require_dp_divides_sft_batch,
    _require_sft_outlasts_warmup,
)


# --- the model's dimensions


def _dimension(hf_config: Mapping[str, object], name: str) -> int:
    value = hf_config.get(name)
    if type(value) is not int or value < 1:
        raise ConfigError(f"model.path: config.json has {name}={value!r}, expected a positive int; is it a causal LM?")
    return value


def _require_tp_divides(config: Config, hf_config: Mapping[str, object]) -> None:
    tp = config.actor.layout.tp
    names = ["num_attention_heads", "num_key_value_heads", "intermediate_size"]
    if hf_config.get("num_key_value_heads") is None:  # as many as query heads
        names.remove("num_key_value_heads")
    dimensions = {name: _dimension(hf_config, name) for name in names}
    undivided = [f"{name}={size}" for name, size in dimensions.items() if size % tp]
    if undivided:
        common = gcd(*dimensions.values())
        valid = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ConfigError(
            f"actor.layout.tp: got {tp}, which does not divide the model's {' and '.join(undivided)}; "
            f"valid values: {valid}"
        )


def _require_positions(config: Config, hf_config: Mapping[str, object]) -> None:
    limit, longest = _dimension(hf_config, "max_position_embeddings"), _max_row_tokens(config)
    if limit < longest:
        raise ConfigError(
            f"{_max_row_terms(config)} = {longest}, but the model has max_position_embeddings={limit}; "
            "shorten one of the two"
        )
