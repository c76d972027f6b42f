"""Rows of a batch in Ray's object store."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from megarl.types import Row

ROWS_PER_SHARD = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShards:
    """Rows of a batch in Ray's object store, in shards, so that a rank fetches only those it works on."""

    refs: tuple[Any, ...]
    rows_per_shard: int

    def fetch(self, micro_batches: Iterable[Iterable[int]]) -> dict[int, Row]:
        """The rows that some micro-batches name, by their index in the batch."""
        wanted = sorted({i for batch in micro_batches for i in batch})
        shards = sorted({i // self.rows_per_shard for i in wanted})
        loaded = dict(zip(shards, ray.get([self.refs[s] for s in shards]), strict=True))
        return {i: loaded[i // self.rows_per_shard][i % self.rows_per_shard] for i in wanted}


def put_rows(rows: Sequence[Row]) -> RowShards:
    """Place rows in the object store."""
    starts = range(0, len(rows), ROWS_PER_SHARD)
    refs = tuple(ray.put(list(rows[start : start + ROWS_PER_SHARD])) for start in starts)
    return RowShards(refs=refs, rows_per_shard=ROWS_PER_SHARD)
