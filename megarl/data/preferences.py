"""Data sets of preference pairs, tokenised and checked when they are opened."""

from array import array
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megarl.algos.preference import MARGIN
from megarl.data.chat import encode_conversations
from megarl.data.files import READ_ROWS, RowFiles
from megarl.data.ragged import RaggedTokens
from megarl.data.records import PREFERENCE_COLUMNS, PREFERENCE_SIDES, parse_preference
from megarl.errors import DataError
from megarl.types import Row, row_read_at_end


class PreferenceDataset:
    """Pairs by index, each side a whole chat as the tokenizer's template writes it.

    DataError for a bad row, and for a chat of more than `max_tokens`.
    """

    def __init__(self, paths: Sequence[str | Path], tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> None:
        files = RowFiles(paths, columns=PREFERENCE_COLUMNS, required=PREFERENCE_SIDES)
        self._sides = {side: RaggedTokens() for side in PREFERENCE_SIDES}
        self._margins = array("d")
        records = [(files.where(i), parse_preference(row, files.where(i))) for i, row in enumerate(files)]
        for start in range(0, len(records), READ_ROWS):
            chunk = records[start : start + READ_ROWS]
            self._margins.extend(record.margin for _, record in chunk)
            for side, stored in self._sides.items():
                encoded = encode_conversations(tokenizer, [getattr(record, side) for _, record in chunk])
                for (where, _), ids in zip(chunk, encoded, strict=True):
                    _require_length(len(ids), max_tokens, f"{where}: {side}")
                    stored.append(ids)

    def __len__(self) -> int:
        return len(self._margins)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """The chosen of the pairs with these indices, then the rejected in the same order."""
        return [
            row_read_at_end(f"pair:{i}", number, tokens[i], **{MARGIN: self._margins[i] if side == "chosen" else 0.0})
            for number, (side, tokens) in enumerate(self._sides.items())
            for i in indices
        ]


def _require_length(num_tokens: int, max_tokens: int, where: str) -> None:
    if num_tokens > max_tokens:
        raise DataError(
            f"{where}: the conversation has {num_tokens} tokens, data.max_prompt_tokens + rollout.max_response_tokens "
            f"is {max_tokens}; raise one of them or remove the row"
        )
