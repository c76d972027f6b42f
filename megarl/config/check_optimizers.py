"""Check that a run can offload, save and continue the states of its optimizers."""

import itertools

from megarl.config.schema import Config
from megarl.errors import ConfigError


def check_optimizers(config: Config) -> None:
    """Raise ConfigError for states of optimizers that a run could not offload, save or continue to the bit."""
    for role, optimizer in (("actor", config.actor.optimizer), ("critic", config.critic.optimizer)):
        key = f"{role}.optimizer"
        names = [name for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if getattr(optimizer, name) == "float8"]
        hindrances = {
            "run.deterministic": config.run.deterministic and "a checkpoint has it rounded again",
            "placement.offload": config.placement.offload and "Transformer Engine's tensors of it cannot be moved",
        }
        for name, (other, why) in itertools.product(names, hindrances.items()):
            if why:
                raise ConfigError(f"{key}.{name}: got float8 with {other}=true, but {why}; set it to bfloat16")
    if config.actor.optimizer.offload_fraction and config.critic.warmup_steps:
        raise ConfigError(
            "actor.optimizer.offload_fraction: cannot be saved before its first step, which critic.warmup_steps="
            f"{config.critic.warmup_steps} delays; set one of them to 0"
        )
