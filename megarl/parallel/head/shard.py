"""Which rows of the vocabulary a tensor-parallel rank holds."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

NOT_OWNED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """Rows [start, start + size) of the true vocabulary on this rank; padded rows are excluded by `size`."""

    group: dist.ProcessGroup
    start: int
    size: int

    def local_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Labels as rows of this shard, −1 where another rank owns them."""
        local = labels - self.start
        return local.where((local >= 0) & (local < self.size), NOT_OWNED)


def vocab_shard(group: dist.ProcessGroup, padded_rows_per_rank: int, vocab_size: int) -> VocabShard:
    """The shard of this rank when the padded vocabulary is split evenly over `group`."""
    start = group.rank() * padded_rows_per_rank
    return VocabShard(group=group, start=start, size=max(0, min(padded_rows_per_rank, vocab_size - start)))
