"""Define the sections of supervised training: fine-tuning on demonstrations, and preference pairs."""

from dataclasses import dataclass
from typing import Literal

from megarl.config.setting import AT_LEAST_1, AT_LEAST_2, POSITIVE, setting
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Configure supervised fine-tuning on demonstrations and chats (`megarl sft`), such as a warm start for RL."""

    train: tuple[str, ...] = ()  # Parquet or JSONL files of chats, or of prompts with a demonstration; see docs/sft.md.
    val: tuple[str, ...] = ()  # Files of held-out rows; []: no validation.
    # Trained tokens. all: every answer of the assistant whose turn does not say otherwise. last: the last of these.
    # each: as all, with a row of its own for each answer. every_token: the whole chat, whoever speaks.
    train_on: Literal["all", "last", "each", "every_token"] = "all"
    # Limit on the whole row; null: data.max_prompt_tokens before the first trained token and
    # rollout.max_response_tokens from there on.
    max_tokens: int | None = setting(None, AT_LEAST_2)
    # Rows over the limit. error: the run does not start. drop: they are left out. cut: their ends are,
    # and the rows that would keep no trained token. The latter two are counted and reported.
    on_long: Literal["error", "drop", "cut"] = "error"
    # Column with the chat, a list of {role, content} or {from, value}; null: messages or conversations.
    chat_key: str | None = None
    # Column with the answer to data.prompt_key; null: data.target_key, response or completion.
    answer_key: str | None = None
    batch_size: int = setting(32, AT_LEAST_1)  # Rows per optimizer step.
    total_steps: int = setting(1000, AT_LEAST_1)  # Number of optimizer steps.
    # Passes over the rows, which set total_steps to ⌊total_epochs · rows / batch_size⌋, or null.
    total_epochs: int | None = setting(None, AT_LEAST_1)
    # Steps between validations, in addition to those before the first step and after the last.
    val_every_steps: int = setting(100, AT_LEAST_1)

    def check(self, key: str) -> None:
        """Raise ConfigError without training data."""
        _require_files(key, self.train, "a.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsConfig:
    """Configure training on preference pairs."""

    train: tuple[str, ...] = ()  # Parquet or JSONL files of preference pairs.
    val: tuple[str, ...] = ()  # Files of held-out pairs; []: no validation.
    # Pairs over the length limits. error: the run does not start. drop: they are left out and counted.
    on_long: Literal["error", "drop"] = "error"
    batch_size: int = setting(32, AT_LEAST_1)  # Pairs per optimizer step.
    total_steps: int = setting(500, AT_LEAST_1)  # Number of optimizer steps.
    # Passes over the pairs, which set total_steps to ⌊total_epochs · pairs / batch_size⌋, or null.
    total_epochs: int | None = setting(None, AT_LEAST_1)
    # Steps between validations, in addition to those before the first step and after the last.
    val_every_steps: int = setting(100, AT_LEAST_1)

    def check(self, key: str) -> None:
        """Raise ConfigError without training data."""
        _require_files(key, self.train, "a.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRewardConfig(PairsConfig):
    """Configure reward-model training on preference pairs; it starts from model.path with the settings of `actor`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPreferenceConfig(PairsConfig):
    """Configure the training of a policy on preference pairs (`megarl train-preference`), with the settings of `actor`
    and, for the reference model, of `reference`.
    """

    objective: str = "dpo"  # Name of the loss: dpo, ipo, kto or orpo; see docs/sft.md.
    # dpo, ipo, kto: strength of the tie to the reference model, which smaller values loosen. orpo: weight of the term
    # of odds.
    beta: float = setting(0.1, POSITIVE)
    desirable_weight: float = setting(1.0, POSITIVE)  # kto: weight of chosen responses, the paper's λ_D.
    undesirable_weight: float = setting(1.0, POSITIVE)  # kto: weight of rejected responses, the paper's λ_U.

    def check(self, key: str) -> None:
        """Raise ConfigError without training data, and for batches in which kto has nothing to compare with."""
        PairsConfig.check(self, key)
        if self.objective == "kto" and self.batch_size == 1:
            raise ConfigError(
                f"{key}.batch_size: got 1, where no other pair lends the response that kto's KL is estimated with; "
                f"raise it, or choose another {key}.objective"
            )


def _require_files(key: str, files: tuple[str, ...], example: str) -> None:
    if not files:
        raise ConfigError(f"{key}.train: is empty; list parquet or JSONL files, as in {key}.train=[{example}]")
