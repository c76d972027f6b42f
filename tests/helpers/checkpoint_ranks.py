"""What the tests of dist checkpoints run on every rank: a few SFT steps around a save or a load."""

import multiprocessing
import pickle
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algos.objectives import SftAlgorithm
from megarl.config.schema import ActorConfig, ModelConfig
from megarl.data.packing import plan_micro_batches
from megarl.parallel.worker import RankWorker
from megarl.types import Row
from megarl.types.messages import LoadRequest, Role, RoleSpec, UpdateRequest
from tests.helpers.hostile_pickles import ATTACKS, Touches, replace_object
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout


def open_worker(context: RankContext, actor: ActorConfig, model: ModelConfig) -> RankWorker:
    """A worker that trains the model, in a process that may start others: those that write checkpoints."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    worker = join_layout(context, actor.layout)
    roles = (RoleSpec(role=Role.ACTOR, model=model, settings=actor),)
    worker.load(LoadRequest(roles=roles, seed=0))
    return worker


def train(worker: RankWorker, actor: ActorConfig, rows: Sequence[Row], steps: range) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step, on ranks that report; a step sees its own four rows."""
    algorithm, history = SftAlgorithm(), []
    for step in steps:
        batch = [rows[(4 * step + i) % len(rows)] for i in range(4)]
        layout = actor.layout
        plan = plan_micro_batches(
            [row.num_tokens for row in batch],
            layout.dp,
            actor.micro_batch_tokens,
            multiple=layout.pp if layout.virtual_pp > 1 else 1,
        )
        request = UpdateRequest(
            step=step,
            objective=algorithm,
            state=algorithm.initial_state(),
            denominators=algorithm.denominators(batch),
            temperature=1.0,
            lr=actor.optimizer.lr,
        )
        result = worker.update(batch, plan[layout.dp_rank_of(worker.rank)], request)
        if result is not None:
            history.append((result.metrics["actor/loss"], result.metrics["actor/grad_norm"]))
    return history


def train_save_train(
    context: RankContext,
    actor: ActorConfig,
    model: ModelConfig,
    rows: Sequence[Row],
    directory: str,
    start: int = 3,
    *,
    portable: bool = False,
) -> list[tuple[float, float]]:
    """`start` steps, a save that the next three overlap with, and those steps' history."""
    worker = open_worker(context, actor, model)
    from megarl.parallel.checkpoint import end_writer

    train(worker, actor, rows, range(start))
    Path(directory).mkdir(exist_ok=True)
    worker.save_checkpoint(directory, portable=portable)
    history = train(worker, actor, rows, range(start, start + 3))
    assert worker.finish_checkpoint(wait=True)
    end_writer()
    return history


def save_with_file_limit(
    context: RankContext, actor: ActorConfig, model: ModelConfig, directory: str, max_bytes: int
) -> None:
    """A save on a file system that takes no file over `max_bytes`."""
    worker = open_worker(context, actor, model)
    from megarl.parallel.checkpoint import end_writer

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limits[1]))
    try:
        worker.save_checkpoint(directory, portable=False)
        worker.finish_checkpoint(wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        end_writer()


def save_with_slow_writer(
    context: RankContext, actor: ActorConfig, model: ModelConfig, directory: str, *, limit_s: float, writing_s: float
) -> bool:
    """A save whose last rank writes for longer than collectives may take; whether it is complete."""
    worker = open_worker(context, actor, model)
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from megarl.parallel.checkpoint import end_writer

    write = FileSystemWriterAsync.write_preloaded_data

    def write_slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(writing_s)
        return write(*args, **kwargs)

    if context.rank == context.world_size - 1:
        FileSystemWriterAsync.write_preloaded_data = staticmethod(write_slowly)
    try:
        worker.save_checkpoint(directory, portable=False)
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), torch.distributed.group.WORLD)
        return worker.finish_checkpoint(wait=True)
    finally:
        FileSystemWriterAsync.write_preloaded_data = staticmethod(write)
        end_writer()


def count_gathered(
    context: RankContext, actor: ActorConfig, model: ModelConfig, directory: str, *, portable: bool
) -> tuple[int, int]:
    """Parameters on this rank; bytes of optimizer state that a save gathers on it, its own part included."""
    worker = open_worker(context, actor, model)
    from megarl.parallel.checkpoint import end_writer

    received = 0

    def counted(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal received
            lists = [arg for arg in args if isinstance(arg, list)]
            received += sum(part.nbytes for parts in lists for part in parts)
            return collective(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "gather"):
            patch.setattr(torch.distributed, name, counted(getattr(torch.distributed, name)))
        worker.save_checkpoint(directory, portable=portable)
    assert worker.finish_checkpoint(wait=True)
    end_writer()
    (chunk,) = worker.roles[Role.ACTOR].chunks
    return sum(parameter.numel() for parameter in chunk.parameters()), received


def load_train(
    context: RankContext,
    actor: ActorConfig,
    model: ModelConfig,
    rows: Sequence[Row],
    directory: str,
    *,
    same_layout: bool,
    start: int = 3,
) -> list[tuple[float, float]]:
    """Three steps from a checkpoint that was taken after `start`."""
    worker = open_worker(context, actor, model)
    worker.load_checkpoint(directory, same_layout={Role.ACTOR} if same_layout else ())
    return train(worker, actor, rows, range(start, start + 3))


def load_attacked(
    context: RankContext, actor: ActorConfig, model: ModelConfig, directory: str, mark: Path
) -> dict[str, str]:
    """Loads of a checkpoint after each of the attacks, and the errors that they end with.

    The last one is of a tensor that is data, but that the layers of Transformer Engine unpickle.
    """
    worker = open_worker(context, actor, model)
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megarl.parallel.checkpoint import end_writer

    saved = Path(directory, "saved")
    saved.mkdir()
    worker.save_checkpoint(str(saved), portable=True)
    assert worker.finish_checkpoint(wait=True)
    end_writer()

    def unpickle(_: ColumnParallelLinear, state: torch.Tensor | None) -> None:
        if state is not None:
            pickle.loads(state.numpy().tobytes())

    def spoil_extra_states(role: Path, mark: Path) -> None:
        pickled = torch.frombuffer(bytearray(pickle.dumps(Touches(mark))), dtype=torch.uint8)
        replace_object(role, [pickled], key="_extra_state")

    errors = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ColumnParallelLinear, "set_extra_state", unpickle)
        for name, spoil in {**ATTACKS, "extra states": spoil_extra_states}.items():
            copy = Path(shutil.copytree(saved, Path(directory, name)))
            spoil(copy / "actor", mark)
            try:
                worker.load_checkpoint(str(copy), same_layout={Role.ACTOR})
                errors[name] = ""
            except Exception as error:  # of torch, of Megatron or of megarl
                errors[name] = str(error)
    return errors
