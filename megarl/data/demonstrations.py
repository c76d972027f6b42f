"""Provide the data set of supervised fine-tuning: chats and demonstrations, tokenised and checked when it is opened."""

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.config.schema import SftConfig
from megarl.data.chat import encode_turns, long_prompt_error
from megarl.data.files import RowFiles
from megarl.data.records import DEMONSTRATION_COLUMNS, parse_demonstration
from megarl.errors import DataError
from megarl.types import Row


class SftDataset:
    """A data set of chats as rows whose loss mask marks the answers to imitate.

    The prompt of a row is all before its first imitated answer; its response goes on to the end of the last one. A row
    whose prompt or response exceeds its limit raises DataError; with `sft.on_long=drop` it is left out and counted in
    `num_dropped`.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        max_response_tokens: int,
        settings: SftConfig | None = None,
    ) -> None:
        settings = settings or SftConfig()
        self._tokens: list[array[int]] = []
        self._masks: list[bytes] = []
        self.num_dropped = 0
        files = RowFiles(paths, columns=DEMONSTRATION_COLUMNS)
        for i, row in enumerate(files):
            where = files.where(i)
            record = parse_demonstration(row, where)
            trained = record.trained[-1:] if settings.train_on == "last" else record.trained
            ids, mask = encode_turns(tokenizer, record.messages, trained, where=where)
            num_prompt_tokens = mask.index(True)
            num_response_tokens = len(ids) - num_prompt_tokens
            if num_prompt_tokens <= max_prompt_tokens and num_response_tokens <= max_response_tokens:
                self._tokens.append(array("i", ids))
                self._masks.append(bytes(mask))
            elif settings.on_long == "drop":
                self.num_dropped += 1
            elif num_prompt_tokens > max_prompt_tokens:
                raise long_prompt_error(where, num_prompt_tokens, max_prompt_tokens)
            else:
                raise DataError(
                    f"{where}: the demonstration has {num_response_tokens} tokens, rollout.max_response_tokens is "
                    f"{max_response_tokens}; raise it, remove the row, or set sft.on_long=drop"
                )
        if not self._tokens:
            raise DataError(
                f"all {self.num_dropped} rows have more tokens than data.max_prompt_tokens={max_prompt_tokens} or "
                f"rollout.max_response_tokens={max_response_tokens}; raise them"
            )

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Row:
        mask = np.frombuffer(self._masks[index], dtype=np.bool_)
        num_prompt_tokens = int(mask.argmax())
        return Row(
            uid=f"sft:{index}",
            sample_index=0,
            token_ids=np.asarray(self._tokens[index], dtype=np.int64),
            num_prompt_tokens=num_prompt_tokens,
            loss_mask=mask[num_prompt_tokens:].copy(),
        )
