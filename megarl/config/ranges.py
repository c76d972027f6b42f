"""The range of every number in the configuration."""

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.range import AT_LEAST_0, AT_LEAST_1, FRACTION, POSITIVE, SHARE, Range
from megarl.config.ranges_algo import ALGO_RANGES
from megarl.config.ranges_rewards import ANY_NAME, REWARD_RANGES
from megarl.config.schema import Config
from megarl.errors import ConfigError

_LAYOUT: Mapping[str, Range] = {
    "tp": AT_LEAST_1,
    "pp": AT_LEAST_1,
    "cp": AT_LEAST_1,
    "dp": AT_LEAST_1,
    "ep": AT_LEAST_1,
    "etp": AT_LEAST_1,
    "virtual_pp": AT_LEAST_1,
    "first_stage_layers": AT_LEAST_1,
    "last_stage_layers": AT_LEAST_1,
}
_OPTIMIZER: Mapping[str, Range] = {
    "lr": POSITIVE,
    "betas": Range(holds=lambda x: 0 <= x < 1, expected="in [0, 1)"),
    "eps": POSITIVE,
    "weight_decay": AT_LEAST_0,
    "clip_grad_norm": Range(holds=lambda x: x > 0, expected="> 0 (1e9 never clips)"),
    "warmup_steps": AT_LEAST_0,
    "decay_frac": SHARE,
    "min_lr_frac": FRACTION,
}


def _under(section: str, ranges: Mapping[str, Range]) -> dict[str, Range]:
    return {f"{section}.{key}": allowed for key, allowed in ranges.items()}


# Every number of the schema; null, sections that are null, and lists are handled by `require_ranges`.
RANGES: Mapping[str, Range] = {
    **ALGO_RANGES,
    **REWARD_RANGES,
    "run.seed": AT_LEAST_0,
    "model.vocab_multiple": AT_LEAST_1,
    "data.max_prompt_tokens": AT_LEAST_1,
    **_under("actor.layout", _LAYOUT),
    **_under("actor.optimizer", _OPTIMIZER),
    "actor.moe.aux_loss_coef": AT_LEAST_0,
    "actor.micro_batch_tokens": AT_LEAST_1,
    "actor.head.memory_mib": AT_LEAST_0,
    "actor.head.chunk_tokens": AT_LEAST_1,
    **_under("reference.layout", _LAYOUT),
    "reference.micro_batch_tokens": AT_LEAST_1,
    **_under("critic.layout", _LAYOUT),
    **_under("critic.optimizer", _OPTIMIZER),
    "critic.micro_batch_tokens": AT_LEAST_1,
    "critic.value_clip": Range(holds=lambda x: x > 0, expected="> 0, or null for no clipping"),
    "critic.warmup_steps": AT_LEAST_0,
    **_under("reward_model.layout", _LAYOUT),
    "reward_model.micro_batch_tokens": AT_LEAST_1,
    "rollout.num_samples": AT_LEAST_1,
    "rollout.temperature": POSITIVE,
    "rollout.top_p": SHARE,
    "rollout.top_k": Range(holds=lambda x: x == -1 or x >= 1, expected=">= 1, or -1 for no limit"),
    "rollout.max_response_tokens": AT_LEAST_1,
    "rollout.timeout_s": POSITIVE,
    "rollout.max_engine_restarts": AT_LEAST_0,
    "rollout.engine.num_engines": AT_LEAST_1,
    "rollout.engine.tp": AT_LEAST_1,
    "rollout.engine.max_num_seqs": AT_LEAST_1,
    "rollout.engine.max_model_tokens": AT_LEAST_1,
    "rollout.engine.kv_cache_mib": AT_LEAST_1,
    "rollout.engine.gpu_memory_utilization": SHARE,
    "rollout.engine.block_size": AT_LEAST_1,
    "placement.trainer.num_nodes": AT_LEAST_1,
    "placement.trainer.devices_per_node": AT_LEAST_1,
    "placement.engines.num_nodes": AT_LEAST_1,
    "placement.engines.devices_per_node": AT_LEAST_1,
    "sync.delta_full_every": AT_LEAST_1,
    "trainer.total_steps": AT_LEAST_1,
    "trainer.prompts_per_step": AT_LEAST_1,
    "trainer.mini_batch_prompts": AT_LEAST_1,
    "trainer.num_epochs": AT_LEAST_1,
    "trainer.mismatch_gate_nats": POSITIVE,
    "validation.every_steps": Range(holds=lambda x: x >= 1, expected=">= 1 (data.val=[] skips validation)"),
    "validation.num_samples": AT_LEAST_1,
    "validation.temperature": Range(holds=lambda x: x > 0, expected="> 0 (validation.greedy=true is argmax)"),
    "validation.max_prompts": AT_LEAST_1,
    "sft.batch_size": AT_LEAST_1,
    "sft.total_steps": AT_LEAST_1,
    "train_reward.batch_size": AT_LEAST_1,
    "train_reward.total_steps": AT_LEAST_1,
    "train_reward.val_every_steps": AT_LEAST_1,
    "logging.rollout_every_steps": AT_LEAST_0,
    "logging.num_rollouts": AT_LEAST_1,
    "logging.peak_tflops": POSITIVE,
    "checkpoint.every_steps": AT_LEAST_0,
    "checkpoint.keep_last": AT_LEAST_1,
    "checkpoint.keep_best": AT_LEAST_0,
    "cluster.num_cpus": AT_LEAST_1,
    # Ray refuses a smaller object store.
    "cluster.object_store_mib": Range(holds=lambda x: x >= 75, expected=">= 75"),
    "cluster.start_timeout_s": POSITIVE,
    "cluster.collective_timeout_s": POSITIVE,
}


def require_ranges(config: Config) -> None:
    """The rule that every number lies in its range. Raises ConfigError."""
    for pattern, allowed in RANGES.items():
        for key, value in _values_at(config, pattern.split(".")):
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not allowed.holds(number):
                    raise ConfigError(f"{key}: got {number}, expected {allowed.expected}")


def _values_at(section: Any, names: list[str], path: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values that a pattern means; none where a section on the way is null or a mapping is empty."""
    if not names:
        yield path, section
    elif names[0] == ANY_NAME:
        for name, item in section.items():
            yield from _values_at(item, names[1:], f"{path}.{name}")
    elif section is not None:
        key = f"{path}.{names[0]}" if path else names[0]
        yield from _values_at(getattr(section, names[0]), names[1:], key)
