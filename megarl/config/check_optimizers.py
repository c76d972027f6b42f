"""Check that a run can offload, save and continue the states of its optimizers."""

import itertools

from megarl.config.batches import batch_counts, num_actor_steps
from megarl.config.optimizer import OptimizerConfig
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


def warmup_warnings(config: Config) -> list[str]:
    """Return a warning for each optimizer whose warm-up is shortened, since the run of RL ends before it."""
    if not (total := config.trainer.total_steps):
        return []
    per_step = batch_counts(config).optimizer_steps_per_step
    return [
        *warmup_warning(config.actor.optimizer, num_actor_steps(config, has_critic=True) * per_step, "actor"),
        *warmup_warning(config.critic.optimizer, total * per_step, "critic"),
    ]


def warmup_warning(optimizer: OptimizerConfig, num_steps: int, role: str) -> list[str]:
    """Return a warning if a warm-up is longer than the optimizer's `num_steps`; see `learning_rate`."""
    if optimizer.warmup_steps <= num_steps:
        return []
    return [
        f"{role}.optimizer.warmup_steps: got {optimizer.warmup_steps}, and the run has {num_steps} optimizer steps; "
        "its learning rate rises until the last one"
    ]
