"""Provide data sets of preference pairs, which are tokenised and checked when they are opened."""

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.algos.preference import MARGIN
from megarl.data.chat import encode_chats
from megarl.data.files import READ_ROWS, RowFiles
from megarl.data.records import PREFERENCE_COLUMNS, PREFERENCE_SIDES, parse_preference
from megarl.errors import DataError
from megarl.types import Row, row_read_at_end


class PreferenceDataset:
    """A data set of preference pairs. Each side of a pair is a whole chat, rendered with the chat template.

    Raises DataError for a malformed row, or a chat of more than `max_tokens` tokens.
    """

    def __init__(self, paths: Sequence[str | Path], tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> None:
        files = RowFiles(paths, columns=PREFERENCE_COLUMNS, required=PREFERENCE_SIDES)
        self._sides: dict[str, list[array[int]]] = {side: [] for side in PREFERENCE_SIDES}
        self._margins = array("d")
        records = [(files.where(i), parse_preference(row, files.where(i))) for i, row in enumerate(files)]
        for start in range(0, len(records), READ_ROWS):
            chunk = records[start : start + READ_ROWS]
            self._margins.extend(record.margin for _, record in chunk)
            for side, stored in self._sides.items():
                encoded = encode_chats(
                    tokenizer, [getattr(record, side) for _, record in chunk], add_generation_prompt=False
                )
                for (where, _), ids in zip(chunk, encoded, strict=True):
                    if len(ids) > max_tokens:
                        raise DataError(
                            f"{where}: {side}: the conversation has {len(ids)} tokens, data.max_prompt_tokens + "
                            f"rollout.max_response_tokens is {max_tokens}; raise one of them or remove the row"
                        )
                    stored.append(array("i", ids))

    def __len__(self) -> int:
        return len(self._margins)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Return the chosen chats of the pairs with these indices, then the rejected ones in the same order."""
        return [
            row_read_at_end(
                f"pair:{i}",
                number,
                np.asarray(tokens[i], dtype=np.int64),
                **{MARGIN: self._margins[i] if side == "chosen" else 0.0},
            )
            for number, (side, tokens) in enumerate(self._sides.items())
            for i in indices
        ]
