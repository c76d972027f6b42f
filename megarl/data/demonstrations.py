"""From the `target` of a prompt's row to the tokens that its samples may start with."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megarl.config.algo import DemonstrationConfig
from megarl.data.chat import encode_demonstration
from megarl.data.ragged import RaggedTokens
from megarl.data.records import parse_target, parse_target_probs
from megarl.errors import DataError
from megarl.types import Message

# Stands for a probability that the demonstrator did not give.
UNKNOWN_PROB = -1.0


class Demonstrations:
    """Demonstrations by the index of their prompt, encoded and checked when they are appended.

    A target is encoded as the policy would have written it, with the end token. One of more than `max_tokens` tokens
    is cut and gets no end token, as nothing ends there, or is not used (`on_long`). A row without a target has an
    empty demonstration.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, cfg: DemonstrationConfig) -> None:
        self._tokenizer, self._cfg = tokenizer, cfg
        self._tokens = RaggedTokens()
        # Demonstrations that are not empty, and those with probabilities.
        self.num_present = self.num_with_probs = 0

    def append(self, row: Mapping[str, Any], messages: Sequence[Message], where: str) -> None:
        """The demonstration of the next prompt. DataError names `where` and what is wrong."""
        target = parse_target(row, where)
        ids: list[int] = []
        if target is not None:
            ids = encode_demonstration(self._tokenizer, messages, target, where=where)
            probs = parse_target_probs(row, where)
            _require_length(probs, len(ids), where)
            self.num_with_probs += bool(probs)
        if len(ids) > self._cfg.max_tokens + 1:
            ids = ids[: self._cfg.max_tokens] if self._cfg.on_long == "cut" else []
        self._tokens.append(ids)
        self.num_present += bool(ids)

    def token_ids(self, index: int) -> tuple[int, ...]:
        """The demonstration of prompt `index`; empty if it has none."""
        return tuple(self._tokens[index].tolist())

    def probs(self, index: int, row: Mapping[str, Any], where: str) -> tuple[float, ...]:
        """The demonstrator's probabilities of `token_ids(index)`, -1 where unknown; empty if `row` has none."""
        probs = parse_target_probs(row, where)
        n = len(self._tokens[index])
        return (*probs, UNKNOWN_PROB)[:n] if probs else ()


def _require_length(probs: tuple[float, ...], num_tokens: int, where: str) -> None:
    """One probability per token of the target, and possibly one for the end token."""
    if probs and len(probs) not in (num_tokens - 1, num_tokens):
        raise DataError(
            f"{where}: target_probs has {len(probs)} entries, expected {num_tokens - 1}, one per token of the target, "
            f"or {num_tokens} with the end token; compute them with this model's tokenizer"
        )
