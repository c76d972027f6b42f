"""What the tests of converted checkpoints run on every rank: the trainer's model, loaded and saved by Megatron."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.config.schema import ActorConfig, ModelConfig
from megarl.parallel.messages import Role, StoreResult
from megarl.types import Row
from tests.helpers.checkpoint_ranks import open_worker, train
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import load_worker


def load_converted(
    context: RankContext, actor: ActorConfig, model: ModelConfig, directory: str, files: Sequence[str]
) -> StoreResult:
    """Overwrite a model's weights with those of a torch_dist checkpoint, and write them as Hugging Face tensors."""
    worker = load_worker(context, actor, model)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from megarl.parallel.checkpoint import _METADATA, _chunk_key

    chunks = worker.roles[Role.ACTOR].chunks
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(torch.nan)
    wanted: dict[str, Any] = {
        _chunk_key(i): chunk.sharded_state_dict(metadata=dict(_METADATA)) for i, chunk in enumerate(chunks)
    }
    # Missing as well as superfluous keys are errors.
    state = dist_checkpointing.load(wanted, directory, strict=StrictHandling.RAISE_ALL)
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[_chunk_key(i)])
        for name, parameter in chunk.named_parameters():
            assert parameter.isfinite().all(), name
    return worker.store_weights(files, with_checksums=False)


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
    from megarl.parallel.checkpoint import end_writer

    train(worker, actor, rows, range(1))
    Path(directory).mkdir(exist_ok=True)
    worker.save_checkpoint(directory)
    assert worker.finish_checkpoint(wait=True)
    end_writer()
    worker.store_weights(files, with_checksums=False)
