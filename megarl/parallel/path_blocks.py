"""Plan which blocks of attention scores FlexAttention computes for a pack whose rows share prefixes.

Where scores are needed is planned on the host, in blocks of 128 queries and 128 keys; of the blocks that some path
needs and some does not, the kernel asks for each score whether it does.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from megarl.types.arrays import ordering_key

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Queries, and keys, of a block of scores.
BLOCK = 128


class PathBlocks:
    """The tokens of a pack as a tree, whose paths attention follows, and the blocks of scores that they need.

    number: [T] int32 places of tokens in an order in which those behind a token follow it; last: [T] int32 the highest
    of them. A query sees a key whose range, from its number to the last behind it, has the query's number. positions:
    [T] int32 in a row. seen: [B, B] how many queries of a block see keys of a block, summed over these keys.
    """

    def __init__(
        self, number: torch.Tensor, last: torch.Tensor, positions: torch.Tensor, seen: npt.NDArray[np.float32]
    ) -> None:
        self.number, self.last, self.positions = number, last, positions
        # 2: all scores of a block are needed; 1: some; 0: none.
        needed = (seen > 0).astype(np.int8) + (seen == BLOCK * BLOCK)
        self.needed = torch.from_numpy(needed).to(number.device)
        self._masks: dict[int | None, BlockMask] = {}

    def mask(self, window: int | None) -> "BlockMask":
        """Return the mask for layers in which a token attends to so many positions of its row; None: to all before."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> "BlockMask":
        # Imported only where it is used: it loads torch's compiler.
        from torch.nn.attention.flex_attention import BlockMask

        number, last, positions, needed = self.number, self.last, self.positions, self.needed

        def sees(_: object, __: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (number[key] <= number[query]) & (number[query] <= last[key])

        mask = sees
        if window is not None:
            # The kernel takes tensors alone.
            before = positions - window

            def sees_within(_: object, __: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
                return sees(_, __, query, key) & (before[query] < positions[key])

            mask = sees_within
            # No key of a block lies farther back than from its first position to the last position of the queries.
            padding = -len(positions) % BLOCK
            lowest, highest = (
                torch.nn.functional.pad(positions, (0, padding), value=value).view(-1, BLOCK) for value in (2**30, -1)
            )
            lowest, highest = lowest.amin(1), highest.amax(1)
            near = lowest[:, None] - highest < window
            wholly_near = highest[:, None] - lowest < window
            needed = needed.clamp(max=1) * near + (needed == 2) * (near & wholly_near)
        some, every = ((needed == kind)[None, None] for kind in (1, 2))
        return BlockMask.from_kv_blocks(
            *_ordered(some),
            *_ordered(every),
            BLOCK_SIZE=BLOCK,
            mask_mod=mask,
            seq_lengths=(len(number), len(number)),
        )


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each row of a table of blocks, how many are wanted, and their columns before those of the others."""
    return blocks.sum(-1, dtype=torch.int32), blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).int()


def plan_blocks(
    sequences: Sequence[npt.NDArray[np.int64]], lengths: npt.NDArray[np.int64], device: torch.device
) -> PathBlocks:
    """Plan the blocks for sequences of a pack, given as indices into it, whose own parts have these lengths."""
    total = int(lengths.sum())
    number, last, positions = np.full(total, -1, np.int32), np.zeros(total, np.int32), np.zeros(total, np.int32)
    count = 0
    # In this order a sequence adds its end to the tree.
    for path in sorted(sequences, key=ordering_key):
        new = path[number[path] < 0]
        number[new] = np.arange(count, count + len(new))
        count += len(new)
        last[path], positions[path] = count - 1, np.arange(len(path))
    num_blocks = -(-total // BLOCK)
    own, before = (np.zeros((len(sequences), num_blocks), np.float32) for _ in range(2))
    for i, (path, length) in enumerate(zip(sequences, lengths, strict=True)):
        for counts, tokens in ((own, path[len(path) - length :]), (before, path[: len(path) - length])):
            counts[i] = np.bincount(tokens // BLOCK, minlength=num_blocks)
    seen = own.T @ before + np.tril(own.T @ own, -1) + np.diag((own * (own + 1) / 2).sum(0))
    on_device = [torch.from_numpy(each).to(device) for each in (number, last, positions)]
    return PathBlocks(on_device[0], on_device[1], on_device[2], seen)
