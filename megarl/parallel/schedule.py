"""The learning-rate schedule, a pure function of the optimizer step."""

import math

from megarl.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Rate of optimizer step `step` (0-based) of `total_steps`.

    Linear warm-up to `lr` over `warmup_steps`; then constant; over the last `decay_frac` of the run the schedule
    falls, linearly or along a half cosine, to `lr · min_lr_frac`.
    """
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant":
        return config.lr * warmup
    decay_steps = max(1.0, config.decay_frac * total_steps)
    remaining = min(1.0, (total_steps - step) / decay_steps)
    shape = remaining if config.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * remaining))
    return config.lr * warmup * (config.min_lr_frac + (1.0 - config.min_lr_frac) * shape)
