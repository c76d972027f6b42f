"""Check that rows (samples), micro-batches, mini-batches and optimizer steps fit together."""

from megarl.config.batches import batch_counts, mini_batch_prompts, num_actor_steps
from megarl.config.schema import (
    Config,
    OptimizerConfig,
    SftConfig,
    TrainPreferenceConfig,
    TrainRewardConfig,
    role_settings,
)
from megarl.errors import ConfigError


def max_row_tokens(config: Config) -> int:
    """Return the number of tokens (prompt and response) of the longest possible row."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def max_hinted_row_tokens(config: Config, max_positions: int) -> int:
    """Return the maximum length of a row with a hint, in a model with a context of `max_positions` tokens.

    With algo.cpo.mi_estimator=full_kl, a row and its copy with the hint must fit into one micro-batch together.
    """
    paired = config.algo.cpo.mi_estimator == "full_kl"
    return min(config.actor.micro_batch_tokens // (2 if paired else 1), max_positions)


def max_row_terms(config: Config) -> str:
    """Return the settings whose sum is the length of the longest row, as text for messages."""
    return (
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} + "
        f"rollout.max_response_tokens={config.rollout.max_response_tokens}"
    )


def check_row_fits_micro_batch(config: Config) -> None:
    """Raise ConfigError unless the longest row fits into one micro-batch of every role."""
    longest = max_row_tokens(config)
    for role, settings in role_settings(config).items():
        if settings.micro_batch_tokens < longest:
            raise ConfigError(
                f"{role}.micro_batch_tokens: got {settings.micro_batch_tokens}, expected >= {longest} "
                f"({max_row_terms(config)}), or the longest row fits no micro-batch; raise it or shorten the two"
            )


def longest_row(config: Config, *, sft: bool) -> tuple[int, str]:
    """Return the length in tokens of the longest row, of `megarl sft` or of the other commands, and the settings that
    give it, as text for messages.
    """
    if sft and config.sft.max_tokens is not None:
        return config.sft.max_tokens, f"sft.max_tokens={config.sft.max_tokens}"
    return max_row_tokens(config), max_row_terms(config)


def check_sft_row_fits_micro_batch(config: Config) -> None:
    """Raise ConfigError unless the longest row of supervised fine-tuning fits into one micro-batch of the actor."""
    longest, terms = longest_row(config, sft=True)
    if config.actor.micro_batch_tokens < longest:
        raise ConfigError(
            f"actor.micro_batch_tokens: got {config.actor.micro_batch_tokens}, expected >= {longest} ({terms}), or the "
            "longest row fits no micro-batch; raise it or shorten rows"
        )


def check_row_fits_engine(config: Config) -> None:
    """Raise ConfigError unless the longest row fits into the engine's context."""
    limit, longest = config.rollout.engine.max_model_tokens, max_row_tokens(config)
    if limit is not None and limit < longest:
        raise ConfigError(
            f"rollout.engine.max_model_tokens: got {limit}, expected >= {longest} "
            f"({max_row_terms(config)}); raise it, shorten the two, or set it to null"
        )
    validated = config.data.max_prompt_tokens + (config.validation.max_response_tokens or 0)
    if limit is not None and limit < validated:
        raise ConfigError(
            f"rollout.engine.max_model_tokens: got {limit}, expected >= {validated} (data.max_prompt_tokens + "
            "validation.max_response_tokens); raise it, lower the latter, or set it to null"
        )


def check_whole_mini_batches(config: Config) -> None:
    """Raise ConfigError unless the prompts of a step divide into whole mini-batches."""
    trainer = config.trainer
    if trainer.prompts_per_step % mini_batch_prompts(config):
        raise ConfigError(
            f"trainer.mini_batch_prompts: got {trainer.mini_batch_prompts}, which does not divide "
            f"trainer.prompts_per_step={trainer.prompts_per_step}; set it to a divisor, or to null"
        )


def check_pair_fits_micro_batch(config: Config) -> None:
    """Raise ConfigError unless a micro-batch can hold both answers of the longest preference pair, which the loss
    compares.
    """
    longest = 2 * (max_row_tokens(config) + 1)
    if config.actor.micro_batch_tokens < longest:
        raise ConfigError(
            f"actor.micro_batch_tokens: got {config.actor.micro_batch_tokens}, expected >= {longest}, two "
            f"conversations of up to {max_row_terms(config)} tokens and a place for each score; raise it or shorten "
            "the two"
        )


def check_responses_fit_micro_batch(config: Config) -> None:
    """Raise ConfigError unless one micro-batch of the actor holds the two longest responses with their prompts."""
    longest = 2 * max_row_tokens(config)
    if config.actor.micro_batch_tokens < longest:
        raise ConfigError(
            f"actor.micro_batch_tokens: got {config.actor.micro_batch_tokens}, expected >= {longest}, two rows of up "
            f"to {max_row_terms(config)} tokens, as the loss of a pair needs both; raise it or shorten the two"
        )


def check_train_outlasts_warmup(config: Config) -> None:
    """Raise ConfigError if actor or critic would have no optimizer step after its warm-up; total_steps=0 is allowed."""
    trainer, critic = config.trainer, config.critic
    if not trainer.total_steps:
        return
    if critic.warmup_steps > trainer.total_steps:
        raise ConfigError(
            f"critic.warmup_steps: got {critic.warmup_steps}, expected <= trainer.total_steps={trainer.total_steps}, "
            "or the actor never trains; shorten it or lengthen the run"
        )
    per_step = batch_counts(config).optimizer_steps_per_step
    _require_warmup_below(config.actor.optimizer, num_actor_steps(config, has_critic=True) * per_step, "actor")
    _require_warmup_below(critic.optimizer, trainer.total_steps * per_step, "critic")


def check_sft_outlasts_warmup(config: Config) -> None:
    """Raise ConfigError if supervised fine-tuning would have no optimizer step after the warm-up."""
    _require_steps_after_warmup(config, config.sft)


def check_train_reward_outlasts_warmup(config: Config) -> None:
    """Raise ConfigError if reward-model training would have no optimizer step after the warm-up."""
    _require_steps_after_warmup(config, config.train_reward)


def check_train_preference_outlasts_warmup(config: Config) -> None:
    """Raise ConfigError if training on preferences would have no optimizer step after the warm-up."""
    _require_steps_after_warmup(config, config.train_preference)


def _require_steps_after_warmup(config: Config, run: SftConfig | TrainRewardConfig | TrainPreferenceConfig) -> None:
    # With a length in epochs, the number of steps is known, and checked, once the data is open.
    if run.total_epochs is None:
        _require_warmup_below(config.actor.optimizer, run.total_steps, "actor")


def _require_warmup_below(optimizer: OptimizerConfig, num_steps: int, role: str) -> None:
    if optimizer.warmup_steps >= num_steps:
        raise ConfigError(
            f"{role}.optimizer.warmup_steps: got {optimizer.warmup_steps}, expected < {num_steps}, the run's optimizer "
            "steps, or the learning rate never arrives; shorten the warm-up or lengthen the run"
        )
