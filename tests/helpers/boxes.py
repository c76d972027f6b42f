"""Which elements of a tensor boxes cover, and how many bytes of them a plan has a receiver get."""

from collections.abc import Sequence

import numpy as np

from megarl.sync.plan.build import Plan
from megarl.weights.boxes import Boxes, slices_of


def covered(shape: Sequence[int], boxes: Boxes) -> np.ndarray:
    """True where one of the boxes is, which must not overlap."""
    count = np.zeros(tuple(shape), dtype=np.int64)
    for box in boxes:
        count[slices_of(box)] += 1
    assert count.max(initial=0) <= 1
    return count.astype(bool)


def received_bytes(plan: Plan, receiver: int, *, local: bool = False) -> int:
    """Over the wire, or with `local` from ranks that share the receiver's memory."""
    return sum(message.num_bytes for message in plan.of_receiver(receiver) if message.local == local)
