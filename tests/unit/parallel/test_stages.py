"""Pipeline stages know the shapes that arrive, in the order of the schedule."""

from collections.abc import Callable

import pytest

from tests.helpers.rank_parts import arriving
from tests.helpers.rank_pool import RankPool


@pytest.mark.parametrize(
    ("num_chunks", "num_batches", "from_previous", "from_next"),
    [
        # Two stages: the first gets no input from another, the last no gradient.
        (1, 3, ([], [0, 1, 2]), ([0, 1, 2], [])),
        # Of two chunks each: by groups of two micro-batches, first through the first chunks, then through the others.
        # From the last stage, the first gets the input of its second chunk.
        (2, 4, ([0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 2, 3]), ([0, 1, 0, 1, 2, 3, 2, 3], [0, 1, 2, 3])),
    ],
)
def test_the_order_by_hand(
    rank_pool: Callable[[int], RankPool],
    num_chunks: int,
    num_batches: int,
    from_previous: tuple[list[int], list[int]],
    from_next: tuple[list[int], list[int]],
) -> None:
    """Without a message: no stage is told what it can look up."""
    found = rank_pool(2).run(arriving, num_chunks, num_batches)
    assert found == list(zip(from_previous, from_next, strict=True))
