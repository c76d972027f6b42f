"""What the tests of converted checkpoints run on every rank: the trainer's model, loaded and saved by Megatron."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.config.schema import ActorConfig, ModelConfig
from megarl.parallel.worker import RankWorker
from megarl.types import FloatArray, Row
from megarl.types.messages import Role
from tests.helpers.checkpoint_ranks import open_worker, train
from tests.helpers.measure import dense_logits
from tests.helpers.rank_pool import RankContext


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """A model, its converted checkpoint `dist`, rows for its logits, and where to save and export it again."""

    actor: ActorConfig
    model: ModelConfig
    rows: Sequence[Row]
    micro_batches: Sequence[Sequence[Sequence[int]]]
    dist: str
    saved: str
    exported: Sequence[str]


def through_the_trainer(context: RankContext, case: RoundTrip) -> dict[int, FloatArray]:
    """Load the converted checkpoint, save and export; logits by row of what was loaded."""
    worker = open_worker(context, case.actor, case.model)
    load_over_nan(worker.roles[Role.ACTOR].chunks, case.dist)
    logits = dense_logits(worker, case.rows, case.micro_batches[worker.layout.dp_group.rank()])
    save(worker, case.saved)
    worker.store_weights(case.exported, with_checksums=False)
    return logits


def load_over_nan(chunks: Sequence[torch.nn.Module], directory: str) -> None:
    """Overwrite all weights by NaN, and then with those of a torch_dist checkpoint."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from megarl.parallel.checkpoint import _PORTABLE

    with torch.no_grad():
        for tensor in itertools.chain.from_iterable(map(weights, chunks)):
            tensor.fill_(torch.nan)
    wanted: dict[str, Any] = {
        f"model{i}": chunk.sharded_state_dict(metadata=dict(_PORTABLE)) for i, chunk in enumerate(chunks)
    }
    # Missing as well as superfluous keys are errors.
    state = dist_checkpointing.load(wanted, directory, strict=StrictHandling.RAISE_ALL)
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{i}"])
        assert all(tensor.isfinite().all() for tensor in weights(chunk))


def weights(chunk: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and biases of routers."""
    yield from chunk.parameters()
    yield from (buffer for name, buffer in chunk.named_buffers() if name.endswith("expert_bias"))


def save(worker: RankWorker, directory: str) -> None:
    """The trainer's checkpoint, complete on return."""
    from megarl.parallel.checkpoint import end_writer

    Path(directory).mkdir(exist_ok=True)
    worker.save_checkpoint(directory, portable=False)
    assert worker.finish_checkpoint(wait=True)
    end_writer()


def train_and_save(
    context: RankContext,
    actor: ActorConfig,
    model: ModelConfig,
    rows: Sequence[Row],
    directory: str,
    files: Sequence[str],
) -> None:
    """A step of training, the trainer's checkpoint, and its export."""
    worker = open_worker(context, actor, model)
    train(worker, actor, rows, range(1))
    save(worker, directory)
    worker.store_weights(files, with_checksums=False)
