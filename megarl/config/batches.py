"""Compute how many rows and optimizer steps a training step has, how large rows are, and when the actor is trained."""

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.config.schema import Config, TrainerConfig

# Bytes of a token in a row: its id and its place in the loss mask; and of a number or an id beside it.
_TOKEN_BYTES, _NUMBER_BYTES = 4 + 1, 4
# Quantities of a token: a scoring pass returns log-probs and entropies; an update reads advantages, log-probs of the
# old policy and of the reference, and the weight of a correction; with CPO three more.
_NUM_SCORED, _NUM_READ, _NUM_READ_BY_CPO = 2, 4, 3
# By supervised command, its section and the rows of each of its examples.
_SUPERVISED: Mapping[str, tuple[str, int]] = {
    "sft": ("sft", 1),
    "train-reward": ("train_reward", 2),
    "train-preference": ("train_preference", 2),
}


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


def pass_bytes(config: Config, command: str = "train", routing_bytes: int = 0) -> tuple[str, int]:
    """Describe the rows of the largest pass of a command, and count its bytes if all rows have full length.

    routing_bytes: those of each token's experts, where rows name them.
    """
    row = longest_row(config, sft=True)[0] if command == "sft" else max_row_tokens(config)
    distill, num_recorded = config.algo.distill, config.rollout.head_tokens and config.rollout.head_tokens + 1
    # The teacher's likeliest tokens are an id and a log-prob each; log-ratios come beside its log-probs.
    top_k_bytes = 2 * _NUMBER_BYTES * (distill.asked_top_k or 0)
    head_bytes = 2 * _NUMBER_BYTES * num_recorded
    update = _TOKEN_BYTES + _NUMBER_BYTES * (_NUM_READ + 2 * distill.is_sampled) + top_k_bytes
    if command in _SUPERVISED:
        section, per_example = _SUPERVISED[command]
        rows = getattr(config, section).batch_size * per_example
        return f"{rows:,} rows of {row:,} tokens", rows * row * update
    if command != "train":
        return "no rows", 0
    cpo, samples = config.algo.cpo, config.rollout.num_samples
    extra_bytes = _NUMBER_BYTES * max(0, config.rollout.top_k) + routing_bytes
    rows, tokens = config.trainer.prompts_per_step * samples, row
    hinted, prompt_bytes = min(row + cpo.hint.max_tokens, config.actor.micro_batch_tokens), 0
    if cpo.method != "none":
        # In one pass with the plain rows come those with a hint, and perhaps those with another prompt's.
        tokens += (1 + cpo.shuffled_baseline) * hinted
        update += _NUMBER_BYTES * _NUM_READ_BY_CPO
    elif distill.teacher == "hint":
        tokens = max(tokens, (1 + distill.shuffled_baseline) * hinted)
        # The share of each token that counts, and the prompt that the teacher reads in the update.
        update += _NUMBER_BYTES
        prompt_bytes = _NUMBER_BYTES * hinted * (distill.mode == "exact")
    scored = rows * tokens * (_TOKEN_BYTES + _NUMBER_BYTES * _NUM_SCORED + extra_bytes + top_k_bytes)
    updated = mini_batch_prompts(config.trainer) * samples * (row * (update + extra_bytes + head_bytes) + prompt_bytes)
    return f"{rows:,} rows of {row:,} tokens", max(scored, updated)
