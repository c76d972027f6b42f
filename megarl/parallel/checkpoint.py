"""Save and load a rank's part of a checkpoint: trained roles in Megatron's torch_dist format, RNG states in files.

Checkpoints do not depend on the parallel layout: tp=1 × pp=2 can load what tp=2 × dp=2 saved, with optimizer state.
They do not depend on which roles (actor, critic) share processes either: every role has its own directory. A process's
RNG states are saved once for every role that it hosts, in a file with the role's name.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint import CheckpointException

from megarl.device.platform import platform
from megarl.errors import WorkerError
from megarl.parallel.roles import LoadedRole
from megarl.types.messages import Role

# Megatron's default for the distributed optimizer cannot be saved in 0.16.1.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


class RankCheckpoints:
    """A rank's writer and reader of checkpoints of its trained roles. All ranks must call it in the same order.

    A forked process writes a snapshot of the state while training continues. Only one checkpoint is written at a time.
    """

    def __init__(self, roles: Sequence[LoadedRole], *, rank: int) -> None:
        self._rng_files = {role.spec.role: f"rng_{role.spec.role}_{rank:05d}.pt" for role in roles}
        self._trained = {role.spec.role.value: (role, role.optimizer) for role in roles if role.optimizer is not None}
        # A persistent writer would need a CUDA device.
        self._writes = AsyncCallsQueue(persistent=False)

    def start_save(self, directory: Path) -> None:
        """Start writing a checkpoint into an empty directory; it is complete once `finish_save` returns True."""
        states = {
            "host": torch.get_rng_state(),
            "device": platform().generator().get_state(),
            "tracker": get_cuda_rng_tracker().get_states(),
        }
        for file in self._rng_files.values():
            torch.save(states, directory / file)
        for name, (role, optimizer) in self._trained.items():
            # Megatron cannot save an optimizer without state, so one that has not stepped gets its initial zeros.
            for adam in (each.optimizer for each in optimizer.chained_optimizers):
                for group in adam.param_groups:
                    group.setdefault("step", 0)
                    for parameter in (p for p in group["params"] if not adam.state[p]):
                        adam.state[parameter] = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            (directory / name).mkdir(exist_ok=True)
            with _failures_raised(f"writing {directory / name}"):
                request = dist_checkpointing.save(
                    _sharded_state(role, optimizer, is_loading=False),
                    str(directory / name),
                    sharded_strategy=TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
                    async_sharded_save=True,
                    content_metadata=dict(_METADATA),
                )
            self._writes.schedule_async_request(request)

    def finish_save(self, *, wait: bool) -> bool:
        """Return whether the checkpoint is complete; if `wait`, wait for it. Raise WorkerError if a writer failed."""
        with _failures_raised("writing a checkpoint"):
            self._writes.maybe_finalize_async_calls(blocking=wait)
        return self._writes.get_num_unfinalized_calls() == 0

    def load(self, directory: Path, *, same_layout: Collection[Role]) -> None:
        """Restore weights and optimizer states, and RNG states if a role of this rank is in `same_layout`.

        same_layout: the roles whose layout is the same as when they were saved.
        """
        for name, (role, optimizer) in self._trained.items():
            with _failures_raised(f"reading {directory / name}"):
                state = dist_checkpointing.load(
                    _sharded_state(role, optimizer, is_loading=True),
                    str(directory / name),
                    strict=StrictHandling.RAISE_ALL,
                )
            for i, chunk in enumerate(role.chunks):
                chunk.load_state_dict(state[f"model{i}"])
            # The main parameters are leaves that require gradients.
            with torch.no_grad():
                optimizer.load_state_dict(state["optimizer"])
        file = next((file for role, file in self._rng_files.items() if role in same_layout), None)
        if file is not None:
            states = torch.load(directory / file, weights_only=True)
            platform().generator().set_state(states["device"])
            torch.set_rng_state(states["host"])
            get_cuda_rng_tracker().set_states(states["tracker"])


@contextlib.contextmanager
def _failures_raised(doing: str) -> Iterator[None]:
    """Turn torch's CheckpointException, which `except Exception` does not catch, into a WorkerError."""
    try:
        yield
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())
        raise WorkerError(f"{doing} failed: {causes}; check the free space and the health of this storage") from None


def end_writer() -> None:
    """End the helper process that collects results of Megatron's checkpoint writers; it would outlive this process."""
    if filesystem_async._results_queue is not None:
        filesystem_async._results_queue._manager.shutdown()
        filesystem_async._results_queue = None


def _sharded_state(role: LoadedRole, optimizer: MegatronOptimizer, *, is_loading: bool) -> dict[str, Any]:
    # A copy: Megatron adds the process group that it finds.
    metadata = dict(_METADATA)
    chunks: Mapping[str, Any] = {
        f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(role.chunks)
    }
    state = optimizer.sharded_state_dict(dict(chunks), is_loading=is_loading, metadata=metadata)
    return {**chunks, "optimizer": state}
