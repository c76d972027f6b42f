"""Keep the rows of a pass in Ray's object store, in a shard for each data-parallel rank that no other one fetches."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import ray

from megarl.types import BoolArray, FloatArray, IdArray, Row
from megarl.types.arrays import joined
from megarl.types.messages import MicroBatchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShard:
    """The rows of a data-parallel rank in Ray's object store, from which only the rank's own processes fetch them."""

    ref: ray.ObjectRef

    def fetch(self) -> dict[int, Row]:
        """Return the rows by their index in the batch."""
        columns: _Columns = ray.get(self.ref)
        return columns.rows()


def put_rows(rows: Sequence[Row], plan: MicroBatchPlan) -> list[RowShard]:
    """Put the rows of a batch into Ray's object store, in a shard for each data-parallel rank of the plan."""
    return [
        RowShard(ref=ray.put(_Columns.of({i: rows[i] for members in micro_batches for i in members})))
        for micro_batches in plan.ranks
    ]


# The fields of a row that are not laid end to end: numbers, what few rows have, and arrays that are long enough by
# themselves.
_OWN = tuple(each.name for each in fields(Row) if each.name not in ("token_ids", "loss_mask", "quantities"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Rows end to end, by fields: Ray passes a few long arrays on in a fraction of the time that many short ones take.

    indices: those of the rows. own: of each row its fields in `_OWN`. ends: where each row's tokens end, in `token_ids`
    and in what covers responses.
    """

    indices: list[int]
    own: list[tuple[Any, ...]]
    ends: list[tuple[int, int]]
    token_ids: IdArray
    loss_mask: BoolArray
    quantities: Mapping[str, FloatArray]

    @classmethod
    def of(cls, by_index: Mapping[int, Row]) -> "_Columns":
        rows = list(by_index.values())
        counts = np.array([(row.num_tokens, row.num_response_tokens) for row in rows], dtype=np.int64)
        return cls(
            indices=list(by_index),
            own=list(map(operator.attrgetter(*_OWN), rows)),
            ends=counts.reshape(-1, 2).cumsum(axis=0).tolist(),
            token_ids=joined([row.token_ids for row in rows], np.int32),
            loss_mask=joined([row.loss_mask for row in rows], np.bool_),
            quantities={
                name: joined([row.quantities[name] for row in rows], np.float32)
                for name in (rows[0].quantities if rows else ())
            },
        )

    def rows(self) -> dict[int, Row]:
        """Return the rows by index; their arrays are views."""
        found, start, first = {}, 0, 0
        for i, own, (end, last) in zip(self.indices, self.own, self.ends, strict=True):
            found[i] = Row(
                token_ids=self.token_ids[start:end],
                loss_mask=self.loss_mask[first:last],
                quantities={name: values[first:last] for name, values in self.quantities.items()},
                **dict(zip(_OWN, own, strict=True)),
            )
            start, first = end, last
        return found
