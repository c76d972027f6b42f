"""Stand for ranks of many hosts where the driver alone is measured."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray

from megarl.cluster.remotes import Location
from megarl.cluster.row_shards import RowShard
from megarl.types import Row
from megarl.types.messages import ForwardRequest, ForwardResult, UpdateRequest, UpdateResult


class InstantRanks:
    """An actor in the place of ranks of many hosts: it fetches the rows of each, and answers at once."""

    def __init__(self) -> None:
        self._fetched = 0

    def locate(self) -> Location:
        return Location(host=ray.get_runtime_context().get_node_id(), address="", device_ids=(), pid=os.getpid())

    def lost_workers(self) -> list[int]:
        return []

    def call(self, method: Callable[..., Any], *args: Any) -> int:
        """Return the bytes of rows that were fetched."""
        return self._fetched

    def forward(
        self, shard: RowShard, micro_batches: Sequence[Sequence[int]], request: ForwardRequest
    ) -> ForwardResult:
        logprobs = self._numbers(shard)
        return ForwardResult(quantities={"logprobs": logprobs, "entropy": dict(logprobs)})

    def update(self, shard: RowShard, micro_batches: Sequence[Sequence[int]], request: UpdateRequest) -> UpdateResult:
        logprobs = self._numbers(shard)
        return UpdateResult(metrics={"actor/grad_norm": 1.0}, before=logprobs if request.with_outputs else {})

    def _numbers(self, shard: RowShard) -> dict[int, np.ndarray]:
        rows: dict[int, Row] = shard.fetch()
        for row in rows.values():
            self._fetched += sum(a.nbytes for a in (row.token_ids, row.loss_mask, *row.quantities.values()))
        return {i: np.full(row.num_response_tokens, -0.5, np.float32) for i, row in rows.items()}

    def fetched_bytes(self) -> int:
        return self._fetched
