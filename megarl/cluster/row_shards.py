"""Keep the rows of a pass in Ray's object store, in a shard for each data-parallel rank that no other one fetches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import ray

from megarl.types import BoolArray, ExpertArray, FloatArray, IdArray, LikelyTokens, NucleusArray, Row
from megarl.types.arrays import joined
from megarl.types.forks import Fork
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Rows end to end, by fields: Ray passes a few long arrays on in a fraction of the time that many short ones take.

    heads: each row's index, uid, sample index, and numbers of prompt tokens and of uncounted ones. ends: where each
    row's tokens end, in `token_ids` and in what covers responses.
    """

    heads: list[tuple[int, str, int, int, int]]
    ends: list[tuple[int, int]]
    token_ids: IdArray
    loss_mask: BoolArray
    quantities: Mapping[str, FloatArray]
    # Long enough by themselves.
    routed_experts: list[ExpertArray | None]
    nuclei: list[NucleusArray | None]
    forks: list[tuple[Fork, ...]]
    likely: list[LikelyTokens | None]
    hinted_prompts: list[IdArray | None]
    # Few rows have any.
    labels: list[IdArray | None]

    @classmethod
    def of(cls, by_index: Mapping[int, Row]) -> "_Columns":
        rows = list(by_index.values())
        counts = np.array([(row.num_tokens, row.num_response_tokens) for row in rows], dtype=np.int64)
        return cls(
            heads=[
                (i, row.uid, row.sample_index, row.num_prompt_tokens, row.num_uncounted) for i, row in by_index.items()
            ],
            ends=counts.reshape(-1, 2).cumsum(axis=0).tolist(),
            token_ids=joined([row.token_ids for row in rows], np.int32),
            loss_mask=joined([row.loss_mask for row in rows], np.bool_),
            quantities={
                name: joined([row.quantities[name] for row in rows], np.float32)
                for name in (rows[0].quantities if rows else ())
            },
            routed_experts=[row.routed_experts for row in rows],
            nuclei=[row.nucleus for row in rows],
            forks=[row.forks for row in rows],
            likely=[row.likely for row in rows],
            hinted_prompts=[row.hinted_prompt for row in rows],
            labels=[row.labels for row in rows],
        )

    def rows(self) -> dict[int, Row]:
        """Return the rows by index; their arrays are views."""
        found, start, first = {}, 0, 0
        for place, ((i, uid, sample_index, num_prompt_tokens, num_uncounted), (end, last)) in enumerate(
            zip(self.heads, self.ends, strict=True)
        ):
            found[i] = Row(
                uid=uid,
                sample_index=sample_index,
                token_ids=self.token_ids[start:end],
                num_prompt_tokens=num_prompt_tokens,
                loss_mask=self.loss_mask[first:last],
                quantities={name: values[first:last] for name, values in self.quantities.items()},
                routed_experts=self.routed_experts[place],
                nucleus=self.nuclei[place],
                forks=self.forks[place],
                likely=self.likely[place],
                hinted_prompt=self.hinted_prompts[place],
                labels=self.labels[place],
                num_uncounted=num_uncounted,
            )
            start, first = end, last
        return found
