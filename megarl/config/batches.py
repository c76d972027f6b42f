"""Compute how many rows and optimizer steps a training step has, how long rows are, and when the actor is trained."""

from dataclasses import dataclass

from megarl.config.schema import Config, TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """The sizes of one training step, counted in rows. A row is one sample; configured batch sizes count prompts
    instead.
    """

    rows_per_step: int
    rows_per_optimizer_step: int
    optimizer_steps_per_step: int


def mini_batch_prompts(trainer: TrainerConfig) -> int:
    """Return the number of prompts that one optimizer step trains on."""
    return trainer.mini_batch_prompts or trainer.prompts_per_step


def batch_counts(config: Config) -> BatchCounts:
    """Return the counts of a training step in which no filter (`algo.filter`) discards rows."""
    trainer, samples, mini = config.trainer, config.rollout.num_samples, mini_batch_prompts(config.trainer)
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


def max_path_tokens(config: Config) -> int:
    """Return the number of tokens (prompt and response) of the longest sequence that a model reads."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def max_row_tokens(config: Config) -> int:
    """Return the number of tokens of the longest possible row, all branches of a conversation included."""
    return config.data.max_prompt_tokens + max(config.rollout.max_response_tokens, config.environment.max_tokens or 0)


def max_hinted_row_tokens(config: Config, max_positions: int) -> int:
    """Return the maximum length of a row with a hint, in a model with a context of `max_positions` tokens.

    With algo.cpo.mi_estimator=full_kl, a row and its copy with the hint must fit into one micro-batch together. A
    teacher that reads hints may have micro-batches of its own.
    """
    paired, room = config.algo.cpo.mi_estimator == "full_kl", config.actor.micro_batch_tokens
    if config.algo.distill.teacher == "hint":
        room = min(room, config.teacher.micro_batch_tokens or room)
    return min(room // (2 if paired else 1), max_positions)


def max_path_terms(config: Config) -> str:
    """Return the settings whose sum is the length of the longest sequence, as text for messages."""
    return (
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} + "
        f"rollout.max_response_tokens={config.rollout.max_response_tokens}"
    )


def max_row_terms(config: Config) -> str:
    """Return the settings whose sum is the length of the longest row, as text for messages."""
    if (config.environment.max_tokens or 0) <= config.rollout.max_response_tokens:
        return max_path_terms(config)
    prompt = f"data.max_prompt_tokens={config.data.max_prompt_tokens}"
    return f"{prompt} + environment.max_tokens={config.environment.max_tokens}"


def longest_row(config: Config, *, sft: bool) -> tuple[int, str]:
    """Return the length in tokens of the longest sequence, of `megarl sft` or of the other commands, and the settings
    that give it, as text for messages.
    """
    if sft and config.sft.max_tokens is not None:
        return config.sft.max_tokens, f"sft.max_tokens={config.sft.max_tokens}"
    return max_path_tokens(config), max_path_terms(config)
