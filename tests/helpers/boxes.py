"""Which elements of a tensor boxes cover."""

from collections.abc import Sequence

import numpy as np

from megarl.weights.boxes import Boxes, slices_of


def covered(shape: Sequence[int], boxes: Boxes) -> np.ndarray:
    """True where one of the boxes is, which must not overlap."""
    count = np.zeros(tuple(shape), dtype=np.int64)
    for box in boxes:
        count[slices_of(box)] += 1
    assert count.max(initial=0) <= 1
    return count.astype(bool)
