"""Data sets of prompts (`Prompt`) and of demonstrations (`Row`), tokenised once, when they are opened.

Every row is read and checked then, so that a bad row stops a run before it costs anything.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.config.algo import DemonstrationConfig
from megarl.data.chat import encode_demonstration, encode_prompts, long_prompt_error
from megarl.data.demonstrations import Demonstrations
from megarl.data.files import READ_ROWS, RowFiles
from megarl.data.ragged import RaggedTokens
from megarl.data.records import (
    DEMONSTRATION_COLUMNS,
    PROMPT_COLUMNS,
    TARGET_COLUMNS,
    parse_demonstration,
    parse_prompt,
)
from megarl.errors import DataError
from megarl.types import Prompt, Row

OnLongPrompt = Literal["error", "drop"]
T = TypeVar("T")


class PromptDataset:
    """Prompts by index. A prompt's uid is its data source and its place in the files, before any is dropped.

    A prompt over `max_prompt_tokens` is a DataError; with `on_long_prompt="drop"` `num_dropped` counts it.
    With `demonstrations` prompts carry those of the files; a DataError if no file has any.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        on_long_prompt: OnLongPrompt = "error",
        demonstrations: DemonstrationConfig | None = None,
    ) -> None:
        columns = PROMPT_COLUMNS if demonstrations is None else (*PROMPT_COLUMNS, *TARGET_COLUMNS)
        self._files = RowFiles(paths, columns=columns, required=("prompt", "reward_model"))
        self._demonstrations = None if demonstrations is None else Demonstrations(tokenizer, demonstrations)
        self._tokens = RaggedTokens()
        self._kept = array("q")
        sources: set[str] = set()
        rows = ((i, row, parse_prompt(row, self._files.where(i))) for i, row in enumerate(self._files))
        for chunk in _chunks(rows):
            sources.update(record.data_source for *_, record in chunk)
            prompts = encode_prompts(tokenizer, [record.messages for *_, record in chunk])
            for (index, row, record), ids in zip(chunk, prompts, strict=True):
                if len(ids) <= max_prompt_tokens:
                    self._tokens.append(ids)
                    self._kept.append(index)
                    if self._demonstrations is not None:
                        self._demonstrations.append(row, record.messages, self._files.where(index))
                elif on_long_prompt == "error":
                    raise long_prompt_error(self._files.where(index), len(ids), max_prompt_tokens)
        self.data_sources = frozenset(sources)
        self.num_dropped = len(self._files) - len(self._kept)
        # Usable prompts of each file, in the order of `paths`.
        self.num_prompts_by_file = self._files.counts(self._kept)
        if not self._kept:
            raise DataError(
                f"all {self.num_dropped} prompts have more tokens than data.max_prompt_tokens="
                f"{max_prompt_tokens}; raise it"
            )
        if self._demonstrations is not None and not self._demonstrations.num_present:
            raise DataError(
                f"none of the {len(self)} prompts has a usable target, but algo.demonstrations.strategy asks for "
                f"demonstrations; add the column target, raise algo.demonstrations.max_tokens, or set strategy=none"
            )

    @property
    def num_target_probs(self) -> int:
        """Prompts whose demonstration has the demonstrator's probabilities."""
        return 0 if self._demonstrations is None else self._demonstrations.num_with_probs

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Prompt:
        place = self._kept[index]
        row, where, stored = self._files[place], self._files.where(place), self._demonstrations
        record = parse_prompt(row, where)
        return Prompt(
            uid=f"{record.data_source}:{place}",
            token_ids=tuple(self._tokens[index].tolist()),
            data_source=record.data_source,
            ground_truth=record.ground_truth,
            extra_info=record.extra_info,
            messages=record.messages,
            demonstration_ids=stored.token_ids(index) if stored else (),
            demonstration_probs=stored.probs(index, row, where) if stored else (),
        )


class SftDataset:
    """Demonstrations by index, as rows with loss on the response. DataError for a row over either limit."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        max_response_tokens: int,
    ) -> None:
        self._tokens = RaggedTokens()
        self._num_prompt_tokens = array("i")
        files = RowFiles(paths, columns=DEMONSTRATION_COLUMNS, required=DEMONSTRATION_COLUMNS)
        rows = ((files.where(i), parse_demonstration(row, files.where(i))) for i, row in enumerate(files))
        for chunk in _chunks(rows):
            prompts = encode_prompts(tokenizer, [record.messages for _, record in chunk])
            for (where, record), prompt in zip(chunk, prompts, strict=True):
                if len(prompt) > max_prompt_tokens:
                    raise long_prompt_error(where, len(prompt), max_prompt_tokens)
                response = encode_demonstration(tokenizer, record.messages, record.target, where=where)
                if len(response) > max_response_tokens:
                    raise DataError(
                        f"{where}: the demonstration has {len(response)} tokens, "
                        f"rollout.max_response_tokens is {max_response_tokens}; raise it or remove the row"
                    )
                self._tokens.append([*prompt, *response])
                self._num_prompt_tokens.append(len(prompt))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Row:
        token_ids = self._tokens[index]
        num_prompt_tokens = self._num_prompt_tokens[index]
        return Row(
            uid=f"sft:{index}",
            sample_index=0,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            loss_mask=np.ones(len(token_ids) - num_prompt_tokens, dtype=np.bool_),
        )


def _chunks(items: Iterator[T]) -> Iterator[list[T]]:
    while chunk := list(islice(items, READ_ROWS)):
        yield chunk
