"""Keep the rows of a batch in Ray's object store, in shards, so that a rank fetches only what it needs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import ray

from megarl.types import Row

ROWS_PER_SHARD = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShards:
    """A batch's rows (one sample each) in Ray's object store, in shards; a rank fetches only the shards it needs."""

    refs: tuple[ray.ObjectRef, ...]
    rows_per_shard: int

    def fetch(self, micro_batches: Iterable[Iterable[int]]) -> dict[int, Row]:
        """Fetch the rows of the given micro-batches, and return them by their index in the batch."""
        wanted = sorted({i for batch in micro_batches for i in batch})
        shards = sorted({i // self.rows_per_shard for i in wanted})
        loaded = dict(zip(shards, ray.get([self.refs[s] for s in shards]), strict=True))
        return {i: loaded[i // self.rows_per_shard][i % self.rows_per_shard] for i in wanted}


def put_rows(rows: Sequence[Row]) -> RowShards:
    """Put the rows of a batch into Ray's object store, in shards of `ROWS_PER_SHARD` rows."""
    starts = range(0, len(rows), ROWS_PER_SHARD)
    refs = tuple(ray.put(list(rows[start : start + ROWS_PER_SHARD])) for start in starts)
    return RowShards(refs=refs, rows_per_shard=ROWS_PER_SHARD)
