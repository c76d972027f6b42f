"""A rank that loads a model with adapters from a directory, computes with them, and writes them and a checkpoint."""

import multiprocessing
from collections.abc import Sequence

from megarl.types import FloatArray, Row
from megarl.types.messages import ForwardRequest, Head, LoadRequest, RoleSpec, StoreResult
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout


def load_and_write(
    context: RankContext,
    role: RoleSpec,
    rows: Sequence[Row],
    micro_batches: Sequence[Sequence[Sequence[int]]],
    file: str,
    checkpoint: str,
) -> tuple[dict[int, FloatArray], StoreResult]:
    """Outputs by row, on the reporting ranks alone, and what was written of each tensor."""
    worker = join_layout(context, role.layout)
    worker.load(LoadRequest(roles=(role,), seed=0))
    mine = micro_batches[worker.layout.dp_group.rank()]
    result = worker.forward(rows, mine, ForwardRequest(role=role.role, temperature=1.0, step=0))
    name = "logprobs" if role.head is Head.LM else "values"
    # Megatron forks a writer of checkpoints.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    worker.save_checkpoint(checkpoint, portable=True)
    worker.finish_checkpoint(wait=True)
    return dict(result.quantities[name]) if result else {}, worker.store_adapters(file, role=role.role)
