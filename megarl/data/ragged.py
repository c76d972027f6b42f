"""Many token sequences in one flat array: 4 bytes a token instead of a Python object each."""

from array import array
from collections.abc import Sequence

import numpy as np

from megarl.types import IntArray


class RaggedTokens:
    """Append-only list of token sequences."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._ends = array("q", [0])

    def append(self, token_ids: Sequence[int]) -> None:
        self._tokens.extend(token_ids)
        self._ends.append(len(self._tokens))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> IntArray:
        """A copy of sequence `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        return np.asarray(self._tokens[self._ends[index] : self._ends[index + 1]], dtype=np.int64)
