"""Save and load a rank's part of a checkpoint: roles that change in Megatron's torch_dist format, RNG states in files.

A portable checkpoint does not depend on the parallel layout: tp=1 × pp=2 can load what tp=2 × dp=2 saved, with
optimizer state. Writing it gathers that state; other checkpoints have it as it is sharded, so that only the number of
replicas (dp) may change. Weights can always be read under any layout. Checkpoints do not depend on which roles (actor,
critic) share processes either: every role has its own directory. A process's RNG states are saved once for every role
that it hosts, in a file with the role's name.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from multiprocessing.managers import SyncManager
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata

from megarl.errors import StorageError, WorkerError
from megarl.host.device.platform import platform
from megarl.host.writing import problem, room, storage_cause, writing
from megarl.parallel.adapters import adapter_states
from megarl.parallel.backend import accepted
from megarl.parallel.roles import LoadedRole
from megarl.types.messages import Role
from megarl.weights.dist_index import read_metadata
from megarl.weights.rules import TOWER

# The versions of which a checkpoint has copies, and since when they are known, in its metadata.
_VERSIONS = "earlier_versions"
# How long to wait before asking again whether all ranks have written a checkpoint.
_POLL_S = 0.2
# How the distributed optimizer's state is written; Megatron's default cannot be saved in 0.16.1.
_COMMON = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
# Every rank writes its own shard, without any communication. Readable under any number of replicas.
_SHARDED = {**_COMMON, "distrib_optim_sharding_type": "dp_reshardable"}
# The shards of a parameter are gathered on the host of its first replica. By default Megatron gathers them on every
# rank, which takes 12 bytes per parameter of the model from the host for each of them.
_PORTABLE = {
    **_COMMON,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}


class RankCheckpoints:
    """A rank's writer and reader of checkpoints of its roles that change. All ranks must call it in the same order.

    A forked process writes a snapshot of the state while training continues. Only one checkpoint is written at a time.
    """

    def __init__(self, roles: Sequence[LoadedRole], *, rank: int) -> None:
        self._rank, self._directory = rank, Path()
        self._rng_files = {role.spec.role: f"rng_{role.spec.role}_{rank:05d}.pt" for role in roles}
        self._changing = {role.spec.role.value: role for role in roles if role.spec.changes}
        # A persistent writer would need a CUDA device.
        self._writes = AsyncCallsQueue(persistent=False)

    def start_save(self, directory: Path, *, portable: bool) -> None:
        """Start writing a checkpoint into an empty directory; it is complete once `finish_save` returns True.

        portable: make it readable under any layout, instead of only those that differ in the number of replicas.
        """
        metadata, self._directory = _PORTABLE if portable else _SHARDED, directory
        states = {
            "host": torch.get_rng_state(),
            "device": platform().generator().get_state(),
            "tracker": get_cuda_rng_tracker().get_states(),
        }
        for file in self._rng_files.values():
            # Through Python's file, whose errors say what the storage refused.
            with writing(directory / file), (directory / file).open("wb") as stream:
                torch.save(states, stream)
        for name, role in self._changing.items():
            role.settle()
            for each in () if role.optimizer is None else role.optimizer.chained_optimizers:
                _initialize(each)
            with _failures_raised(directory / name, "write", self._rank):
                (directory / name).mkdir(exist_ok=True)
                kept = {}
                if role.versions is not None:
                    kept[_VERSIONS] = (role.versions.since, sorted(role.versions.copies))
                request = dist_checkpointing.save(
                    _states(role, metadata),
                    str(directory / name),
                    sharded_strategy=TorchDistSaveShardedStrategy(
                        "torch_dist", 1, thread_count=platform().checkpoint_writers
                    ),
                    async_sharded_save=True,
                    content_metadata={**metadata, **kept},
                    # Megatron's own writer; the other one is NVIDIA's package for resiliency.
                    **accepted(dist_checkpointing.save, async_strategy="mcore"),
                )
            self._writes.schedule_async_request(request)

    def finish_save(self, *, wait: bool) -> bool:
        """Return whether the checkpoint is complete; if `wait`, wait for it. Raise WorkerError if a writer failed."""
        while True:
            # Megarl waits between short collectives: in Megatron's own wait, ranks that have nothing left to write
            # would sit in one collective, whose time limit the slowest writer may exceed.
            with _failures_raised(self._directory, "write", self._rank):
                self._writes.maybe_finalize_async_calls(blocking=False)
            # The same on all ranks, who have agreed on it.
            if (complete := self._writes.get_num_unfinalized_calls() == 0) or not wait:
                return complete
            time.sleep(_POLL_S)

    def load(self, directory: Path, *, same_layout: Collection[Role], weights_only: bool) -> None:
        """Restore weights and optimizer states, and RNG states if a role of this rank is in `same_layout`.

        same_layout: the roles whose layout is the same as when they were saved. weights_only: leave the optimizers as
        they are; weights are readable under any layout. Nothing but data is unpickled.
        """
        # Also for the calls within torch and Megatron, and whatever the user's environment says.
        os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
        os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
        for name, role in self._changing.items():
            role.settle()
            with _failures_raised(directory / name, "read", self._rank):
                metadata = serialization.load_content_metadata(str(directory / name))
                saved = metadata.pop(_VERSIONS, None)
                if role.versions is not None:
                    # Copies of an earlier run in these processes are of no use.
                    role.versions.since, numbers = saved or (None, ())
                    role.versions.copies = {number: role.versions.empty() for number in numbers}
                state = _states(role, metadata, is_loading=True, weights_only=weights_only)
                is_part = weights_only or (saved is not None and role.versions is None)
                strict = StrictHandling.RAISE_UNEXPECTED if is_part else StrictHandling.RAISE_ALL
                state = dist_checkpointing.load(state, str(directory / name), strict=strict)
            for prefix, copies in _copies(role).items():
                for i, values in enumerate(copies):
                    for key, value in values.items():
                        value.copy_(state[f"{prefix}model{i}"][key])
            if role.average is not None:
                role.average.write()
                continue
            if role.versions is not None:
                role.versions.trim()
            for i, chunk in enumerate(role.chunks):
                # Transformer Engine would unpickle the extra states, which none of megarl's recipes needs.
                weights = {key: None if "_extra_state" in key else each for key, each in state[f"model{i}"].items()}
                is_whole = role.adapters is None and chunk.spec.tower is None
                missing, unknown = chunk.load_state_dict(weights, strict=is_whole)
                trained = {name for name, parameter in chunk.named_parameters() if parameter.requires_grad}
                assert trained.isdisjoint(missing)
                assert not unknown
            if weights_only or role.optimizer is None:
                continue
            # The main parameters are leaves that require gradients.
            with torch.no_grad():
                role.optimizer.load_state_dict(state["optimizer"])
        file = next((file for role, file in self._rng_files.items() if role in same_layout), None)
        if file is not None:
            states = torch.load(directory / file, weights_only=True)
            platform().generator().set_state(states["device"])
            torch.set_rng_state(states["host"])
            get_cuda_rng_tracker().set_states(states["tracker"])


class _Reader(FileSystemReader):
    """A reader of checkpoints for Megatron that does not run what their metadata names."""

    def __init__(self, directory: str | os.PathLike[str], cache_metadata: bool = False, **_: object) -> None:
        super().__init__(directory)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Read the metadata once. Raises DataError if it is more than data."""
        if self._metadata is None:
            self._metadata = read_metadata(Path(self.path))
        return self._metadata


# Megatron makes its readers by this name, and takes none from outside; since 0.19 in both modules.
torch_strategies._get_filesystem_reader = serialization._get_filesystem_reader = _Reader


@contextlib.contextmanager
def _failures_raised(path: Path, doing: str, rank: int) -> Iterator[None]:
    """Name the rank, the path and what the storage says where ranks cannot `doing` (read, write) a checkpoint.

    Raises:
        StorageError: the storage refused.
        WorkerError: something else is wrong. torch's CheckpointException is one that `except Exception` does not catch.
    """
    try:
        yield
    except CheckpointException as error:
        causes = {each: cause for each, (cause, _) in error.failures.items()}
        for each, cause in causes.items():
            if (refusal := storage_cause(cause)) is not None:
                message = f"rank {each} cannot {doing} {path}: {problem(refusal, path)}"
                raise StorageError(message) from None
        listed = "; ".join(f"rank {each}: {cause}" for each, cause in causes.items())
        raise WorkerError(
            f"cannot {doing} {path}: {listed}; {room(path)}; free space there, or check the health of this storage"
        ) from None
    except (OSError, RuntimeError) as error:
        if (refusal := storage_cause(error)) is None:
            raise
        raise StorageError(f"rank {rank} cannot {doing} {path}: {problem(refusal, path)}") from error


@functools.cache
def _result_server() -> SyncManager:
    """Start the helper process that collects what this rank's checkpoint writers have written."""
    return multiprocessing.get_context("spawn").Manager()


# Megatron has one queue for all saves of a process, and takes what came first for the save that began first. Where the
# writer of a later role is done sooner, each role's metadata would list the other's tensors, and neither be readable.
filesystem_async._get_write_results_queue = lambda *_: _result_server().Queue()


def end_writer() -> None:
    """End the helper process that collects results of Megatron's checkpoint writers; it would outlive this process."""
    if _result_server.cache_info().currsize:
        _result_server().shutdown()
        _result_server.cache_clear()


def _states(
    role: LoadedRole, metadata: Mapping[str, object], *, is_loading: bool = False, weights_only: bool = False
) -> dict[str, object]:
    """Describe this rank's shards of all that changes of a role: an average, or weights, earlier versions of these, and
    the optimizer's state.
    """
    states: dict[str, object] = {} if role.average is not None else _chunk_states(role, metadata)
    for prefix, copies in _copies(role).items():
        states |= _copy_states(role, copies, metadata, prefix)
    if role.optimizer is None or weights_only:
        return states
    return states | {"optimizer": _optimizer_state(role, role.optimizer, metadata, is_loading=is_loading)}


def _copies(role: LoadedRole) -> "dict[str, Sequence[Mapping[str, torch.Tensor]]]":
    """Return what a role has for its parameters, by model chunk and name, beside them: an average, earlier versions."""
    if role.average is not None:
        return {"": role.average.values}
    versions = {} if role.versions is None else role.versions.copies
    return {f"version{number}.": copies for number, copies in versions.items()}


def _copy_states(
    role: LoadedRole, copies: Sequence[Mapping[str, torch.Tensor]], metadata: Mapping[str, object], prefix: str
) -> dict[str, object]:
    """Describe this rank's shards of such copies, by model chunk: each as that of its parameter."""
    states: dict[str, object] = {}
    for i, (chunk, values) in enumerate(zip(role.chunks, copies, strict=True)):
        described = (
            chunk.sharded_state_dict(metadata=dict(metadata))
            if role.adapters is None
            else adapter_states(chunk, role.adapters)
        )
        parameters = dict(chunk.named_parameters())
        found = get_param_id_to_sharded_param_map(described, [parameters[name] for name in values])
        states[f"{prefix}model{i}"] = {
            name: make_sharded_optimizer_tensor(found[number], value, prefix.removesuffix(".") or "average")
            for number, (name, value) in enumerate(values.items())
        }
    return states


def _chunk_states(role: LoadedRole, metadata: Mapping[str, object]) -> dict[str, object]:
    """Describe this rank's shards of what is trained of a role's weights, by model chunk."""
    states = dict[str, object]()
    for i, chunk in enumerate(role.chunks):
        # Megatron adds process groups to the copy.
        state = chunk.sharded_state_dict(metadata=dict(metadata))
        # A frozen part of a tower is read from the model's files.
        tower = () if chunk.spec.tower is None else chunk.spec.tower.trained_names
        state = {name: each for name, each in state.items() if name in tower or not name.startswith(TOWER)}
        if role.adapters is not None:
            trained = {name for name, parameter in chunk.named_parameters() if parameter.requires_grad}
            state = {name: each for name, each in state.items() if name in trained}
            state |= adapter_states(chunk, role.adapters)
            assert trained == state.keys(), f"a checkpoint would lack {sorted(trained ^ state.keys())[:3]}"
        states[f"model{i}"] = state
    return states


def _initialize(optimizer: MegatronOptimizer) -> None:
    """Give an optimizer that has not stepped its initial state, without which Megatron cannot save it."""
    for group in optimizer.optimizer.param_groups:
        # Adam's, as opposed to Muon's.
        if "betas" in group:
            group.setdefault("step", 0)
    if optimizer.config.optimizer_cpu_offload:
        # The state begins with the first step, before which `check_optimizers` lets nothing be saved.
        return
    if not optimizer.config.use_precision_aware_optimizer:
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        return
    # Megatron's own function leaves out an argument that Transformer Engine requires: whether main parameters are kept
    # as what bfloat16 lacks of them.
    for parameter in (p for group in optimizer.optimizer.param_groups for p in group["params"]):
        if not optimizer.optimizer.state[parameter]:
            optimizer.optimizer.initialize_state(parameter, False)


def _optimizer_state(
    role: LoadedRole, optimizer: MegatronOptimizer, metadata: Mapping[str, object], *, is_loading: bool = False
) -> object:
    """Describe this rank's shards of a role's optimizer state, or what it reads of them (`is_loading`).

    Megatron gathers the state of a buffer without the padding between its buckets, which a tied embedding on two stages
    or overlapped gradients make, but looks for each parameter where it lies with the padding.
    """
    weights = _chunk_states(role, metadata)
    with contextlib.ExitStack() as stack:
        for buffer in (each for ddp in role.ddp for each in (*ddp.buffers, *ddp.expert_parallel_buffers)):
            stack.callback(setattr, buffer, "param_index_map", buffer.param_index_map)
            padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
            before = [0, *itertools.accumulate(padding)]
            buffer.param_index_map = {
                parameter: (start - before[bucket], end - before[bucket], bucket)
                for parameter, (start, end, bucket) in buffer.param_index_map.items()
            }
        return optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=dict(metadata))
