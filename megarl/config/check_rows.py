"""Check that the longest rows fit into micro-batches and into the context of the engines."""

from megarl.config.batches import longest_row, max_path_terms, max_path_tokens, max_row_terms, max_row_tokens
from megarl.config.schema import Config, role_settings
from megarl.errors import ConfigError


def check_row_fits_micro_batch(config: Config) -> None:
    """Raise ConfigError unless the longest row fits into one micro-batch of every role."""
    longest = max_row_tokens(config)
    for role, settings in role_settings(config).items():
        why = f" ({max_row_terms(config)}), or the longest row fits no micro-batch; raise it or shorten the two"
        _require_room(role, settings.micro_batch_tokens, longest, why)


def check_row_fits_engine(config: Config) -> None:
    """Raise ConfigError unless the longest sequence fits into the engine's context."""
    limit, longest = config.rollout.engine.max_model_tokens, max_path_tokens(config)
    if limit is not None and limit < longest:
        raise ConfigError(
            f"rollout.engine.max_model_tokens: got {limit}, expected >= {longest} "
            f"({max_path_terms(config)}); raise it, shorten the two, or set it to null"
        )
    validated = config.data.max_prompt_tokens + (config.validation.max_response_tokens or 0)
    if limit is not None and limit < validated:
        raise ConfigError(
            f"rollout.engine.max_model_tokens: got {limit}, expected >= {validated} (data.max_prompt_tokens + "
            "validation.max_response_tokens); raise it, lower the latter, or set it to null"
        )


def check_sft_row_fits_micro_batch(config: Config) -> None:
    """Raise ConfigError unless the longest row of supervised fine-tuning fits into one micro-batch of the actor."""
    longest, terms = longest_row(config, sft=True)
    why = f" ({terms}), or the longest row fits no micro-batch; raise it or shorten rows"
    _require_room("actor", config.actor.micro_batch_tokens, longest, why)


def check_pair_fits_micro_batch(config: Config) -> None:
    """Raise ConfigError unless a micro-batch can hold both answers of the longest preference pair, which the loss
    compares.
    """
    why = (
        f", two conversations of up to {max_row_terms(config)} tokens and a place for each score; raise it or shorten "
        "the two"
    )
    _require_room("actor", config.actor.micro_batch_tokens, 2 * (max_row_tokens(config) + 1), why)


def check_responses_fit_micro_batch(config: Config) -> None:
    """Raise ConfigError unless one micro-batch of the actor holds the two longest responses with their prompts."""
    rows = f"two rows of up to {max_row_terms(config)} tokens"
    why = f", {rows}, as the loss of a pair needs both; raise it or shorten the two"
    _require_room("actor", config.actor.micro_batch_tokens, 2 * max_row_tokens(config), why)


def _require_room(role: str, num_tokens: int, least: int, why: str) -> None:
    if num_tokens < least:
        raise ConfigError(f"{role}.micro_batch_tokens: got {num_tokens}, expected >= {least}{why}")
