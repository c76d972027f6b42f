"""Compute how many rows and optimizer steps a training step has, and in which steps the actor is trained."""

from dataclasses import dataclass

from megarl.config.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """The sizes of one training step, counted in rows. A row is one sample; configured batch sizes count prompts
    instead.
    """

    rows_per_step: int
    rows_per_optimizer_step: int
    optimizer_steps_per_step: int


def mini_batch_prompts(config: Config) -> int:
    """Return the number of prompts that one optimizer step trains on."""
    return config.trainer.mini_batch_prompts or config.trainer.prompts_per_step


def batch_counts(config: Config) -> BatchCounts:
    """Return the counts of a training step in which no filter (`algo.filter`) discards rows."""
    trainer, samples, mini = config.trainer, config.rollout.num_samples, mini_batch_prompts(config)
    return BatchCounts(
        rows_per_step=trainer.prompts_per_step * samples,
        rows_per_optimizer_step=mini * samples,
        optimizer_steps_per_step=trainer.num_epochs * (trainer.prompts_per_step // mini),
    )


def actor_learns(step: int, *, critic_warmup_steps: int) -> bool:
    """Return whether the actor is updated in `step`: it is from step `critic_warmup_steps` on. The first step is 1."""
    return step >= critic_warmup_steps


def num_actor_steps(config: Config, *, has_critic: bool) -> int:
    """Return the number of steps of the run in which the actor is updated."""
    waiting = max(config.critic.warmup_steps - 1, 0) if has_critic else 0
    return config.trainer.total_steps - waiting
