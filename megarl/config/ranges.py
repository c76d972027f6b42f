"""The range of every number in the configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from megarl.config.schema import Config
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A condition on a single number, and how messages put it."""

    holds: Callable[[float], bool]
    expected: str


_AT_LEAST_0 = Range(holds=lambda x: x >= 0, expected=">= 0")
_AT_LEAST_1 = Range(holds=lambda x: x >= 1, expected=">= 1")
_POSITIVE = Range(holds=lambda x: x > 0, expected="> 0")
_SHARE = Range(holds=lambda x: 0 < x <= 1, expected="in (0, 1]")

# Every number of the schema; null and lists are handled by `require_ranges`.
RANGES: Mapping[str, Range] = {
    "run.seed": _AT_LEAST_0,
    "model.vocab_multiple": _AT_LEAST_1,
    "data.max_prompt_tokens": _AT_LEAST_1,
    "algo.policy_loss.clip_low": Range(holds=lambda x: 0 < x < 1, expected="in (0, 1)"),
    "algo.policy_loss.clip_high": _POSITIVE,
    "algo.policy_loss.dual_clip": Range(holds=lambda x: x > 1, expected="> 1, or null for no bound"),
    "algo.kl.coef": _AT_LEAST_0,
    "algo.kl.target_nats": _POSITIVE,
    "algo.kl.horizon": _POSITIVE,
    "algo.entropy_coef": _AT_LEAST_0,
    "algo.aggregation_horizon_tokens": _AT_LEAST_1,
    "actor.layout.tp": _AT_LEAST_1,
    "actor.layout.pp": _AT_LEAST_1,
    "actor.layout.cp": _AT_LEAST_1,
    "actor.layout.dp": _AT_LEAST_1,
    "actor.layout.virtual_pp": _AT_LEAST_1,
    "actor.layout.first_stage_layers": _AT_LEAST_1,
    "actor.layout.last_stage_layers": _AT_LEAST_1,
    "actor.optimizer.lr": _POSITIVE,
    "actor.optimizer.betas": Range(holds=lambda x: 0 <= x < 1, expected="in [0, 1)"),
    "actor.optimizer.eps": _POSITIVE,
    "actor.optimizer.weight_decay": _AT_LEAST_0,
    "actor.optimizer.clip_grad_norm": Range(holds=lambda x: x > 0, expected="> 0 (1e9 never clips)"),
    "actor.optimizer.warmup_steps": _AT_LEAST_0,
    "actor.optimizer.decay_frac": _SHARE,
    "actor.optimizer.min_lr_frac": Range(holds=lambda x: 0 <= x <= 1, expected="in [0, 1]"),
    "actor.micro_batch_tokens": _AT_LEAST_1,
    "actor.head_chunk_tokens": _AT_LEAST_1,
    "rollout.num_samples": _AT_LEAST_1,
    "rollout.temperature": _POSITIVE,
    "rollout.top_p": _SHARE,
    "rollout.top_k": Range(holds=lambda x: x == -1 or x >= 1, expected=">= 1, or -1 for no limit"),
    "rollout.max_response_tokens": _AT_LEAST_1,
    "rollout.timeout_s": _POSITIVE,
    "rollout.engine.num_engines": _AT_LEAST_1,
    "rollout.engine.tp": _AT_LEAST_1,
    "rollout.engine.max_num_seqs": _AT_LEAST_1,
    "rollout.engine.max_model_tokens": _AT_LEAST_1,
    "rollout.engine.kv_cache_mib": _AT_LEAST_1,
    "rollout.engine.gpu_memory_utilization": _SHARE,
    "rollout.engine.block_size": _AT_LEAST_1,
    "placement.trainer.num_nodes": _AT_LEAST_1,
    "placement.trainer.devices_per_node": _AT_LEAST_1,
    "placement.engines.num_nodes": _AT_LEAST_1,
    "placement.engines.devices_per_node": _AT_LEAST_1,
    "trainer.total_steps": _AT_LEAST_1,
    "trainer.prompts_per_step": _AT_LEAST_1,
    "trainer.mini_batch_prompts": _AT_LEAST_1,
    "trainer.num_epochs": _AT_LEAST_1,
    "trainer.mismatch_gate_nats": _POSITIVE,
    "validation.every_steps": Range(holds=lambda x: x >= 1, expected=">= 1 (data.val=[] skips validation)"),
    "validation.num_samples": _AT_LEAST_1,
    "validation.temperature": Range(holds=lambda x: x > 0, expected="> 0 (validation.greedy=true is argmax)"),
    "validation.max_prompts": _AT_LEAST_1,
    "sft.batch_size": _AT_LEAST_1,
    "sft.total_steps": _AT_LEAST_1,
    "logging.rollout_every_steps": _AT_LEAST_0,
    "logging.num_rollouts": _AT_LEAST_1,
    "logging.peak_tflops": _POSITIVE,
    "checkpoint.every_steps": _AT_LEAST_0,
    "checkpoint.keep_last": _AT_LEAST_1,
    "checkpoint.keep_best": _AT_LEAST_0,
    "cluster.num_cpus": _AT_LEAST_1,
    # Ray refuses a smaller object store.
    "cluster.object_store_mib": Range(holds=lambda x: x >= 75, expected=">= 75"),
    "cluster.start_timeout_s": _POSITIVE,
    "cluster.collective_timeout_s": _POSITIVE,
}


def require_ranges(config: Config) -> None:
    """The rule that every number lies in its range. Raises ConfigError."""
    for key, allowed in RANGES.items():
        value = attrgetter(key)(config)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not allowed.holds(number):
                raise ConfigError(f"{key}: got {number}, expected {allowed.expected}")
