"""Run one Megatron rank: build models, compute log-probs or values of rows, take optimizer steps, send and store
weights.

`RankWorker` is a plain synchronous class, which Ray actors wrap and tests call in ordinary processes.
"""

import contextlib
import gc
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.plugins import activate
from megarl.config.schema import LayoutConfig
from megarl.errors import StorageError
from megarl.host.writing import writing
from megarl.parallel.communicators import Communicators
from megarl.types import Row, Rows
from megarl.types.messages import (
    AccumulateRequest,
    ForwardRequest,
    ForwardResult,
    LoadRequest,
    Part,
    Role,
    StepRequest,
    StoreResult,
    UpdateRequest,
    UpdateResult,
)

if TYPE_CHECKING:
    import torch

    from megarl.parallel.roles import LoadedRole
    from megarl.parallel.teacher import TeacherBeside
    from megarl.sync.transport.transports import ProcessPlan
    from megarl.types.passes import PassPlace
    from megarl.weights.boxes import Boxes


class RankWorker:
    """One rank of the trainer. Constructing it is cheap, because heavy modules are imported only in `prepare`."""

    def __init__(self, rank: int) -> None:
        self.rank, self.communicators = rank, Communicators()

    def prepare(self) -> None:
        """Import heavy modules, after setting what CUDA reads in this process."""
        from megarl.host.device.platform import platform
        from megarl.parallel.backend import prepare_megatron

        for name, value in platform().rank_environment.items():
            os.environ.setdefault(name, value)
        prepare_megatron()
        import megarl.parallel.updates  # noqa: F401

    def offer_rendezvous(self) -> str:
        """Return the address of a new store, in which the ranks of this one's layout can find each other."""
        from megarl.host.listeners import LOOPBACK
        from megarl.host.store import offer_store

        # Other hosts reach this one at MEGARL_HOST_ADDRESS; where it is not set, there is only one host.
        self.rendezvous, address = offer_store(os.environ.get("MEGARL_HOST_ADDRESS", LOOPBACK))
        return address

    def join(self, layout: LayoutConfig, rendezvous: str, timeout_s: float) -> int:
        """Join the process groups of a parallel layout, and return this process's id."""
        from megarl.host.store import connect_store
        from megarl.parallel.layout import initialize_layout

        store = connect_store(rendezvous, world_size=layout.world_size, timeout_s=timeout_s)
        self.layout = initialize_layout(layout, rank=self.rank, store=store, timeout_s=timeout_s)
        return os.getpid()

    def load(self, request: LoadRequest) -> None:
        """Build the models and read their weights. A later call starts a new run in the same processes."""
        import torch
        from megatron.core import tensor_parallel

        from megarl.parallel.backend import make_batch_invariant
        from megarl.parallel.checkpoint import RankCheckpoints
        from megarl.parallel.offload import Offloader
        from megarl.parallel.roles import load_role

        self.communicators.resume()
        activate(request.plugins)
        # An earlier run's models are freed before new ones are built.
        for name in ("roles", "offloaders", "checkpoints", "kept"):
            self.__dict__.pop(name, None)
        gc.collect()
        torch.manual_seed(request.seed)
        tensor_parallel.model_parallel_cuda_manual_seed(request.seed)
        # cuBLAS reads it when it is first used. torch warns of operations that have no deterministic algorithm.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Transformer Engine reads it when it builds attention.
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = str(int(not request.deterministic))
        torch.use_deterministic_algorithms(request.deterministic, warn_only=True)
        self.suspends_nccl = request.suspends_nccl
        if request.batch_invariant:
            make_batch_invariant()
        self.roles: dict[Role, LoadedRole] = {}
        self.kept: dict[int, TeacherBeside] = {}
        for spec in sorted(request.roles, key=lambda spec: spec.base_of is not None):
            base = None if spec.base_of is None else self.roles[spec.base_of]
            if base is not None and not spec.has_memory:
                self.roles[spec.role] = base.without_adapters(spec)
                continue
            self.roles[spec.role] = load_role(
                spec, self.layout, seed=request.seed, batch_invariant=request.batch_invariant, base=base
            )
        self.offloaders = {role: Offloader(loaded) for role, loaded in self.roles.items() if loaded.spec.has_memory}
        self.checkpoints = RankCheckpoints(list(self.roles.values()), rank=self.rank)

    def forward(
        self, rows: Rows, micro_batches: Sequence[Sequence[int]], request: ForwardRequest
    ) -> ForwardResult | None:
        """Compute log-probs or values of this replica's rows. Return them on the replica's reporting rank only."""
        from megarl.parallel.adapters import without_adapters
        from megarl.parallel.passes import forward_rows
        from megarl.parallel.updates import keep_policy

        loaded = self._role(request.role, Part.PARAMS)
        if request.keeps is not None:
            # Number 0 forgets the step before.
            self.kept = {} if request.keeps == 0 else self.kept
            self.kept[request.keeps] = keep_policy(loaded, rows, micro_batches, request, others=self.kept)
            return None
        head = loaded.head_request(
            temperature=request.temperature,
            paired=request.paired,
            top_k=request.top_k,
            common=request.common,
            squares=request.squares,
        )
        with contextlib.nullcontext() if loaded.spec.has_memory else without_adapters(loaded.chunks):
            result = forward_rows(loaded.chunks, rows, micro_batches, head, role=request.role, step=request.step)
        return result if self.layout.reports else None

    def record_pass(self, row: Row, temperature: float) -> "dict[PassPlace, torch.Tensor]":
        """Return the tensors of the actor's pass over a row; see `record_row`."""
        from megarl.parallel.pass_hooks import record_row

        return record_row(self._role(Role.ACTOR, Part.PARAMS), row, temperature)

    def accumulate(
        self, rows: Rows, micro_batches: Sequence[Sequence[int]], request: AccumulateRequest, *, is_last: bool = False
    ) -> UpdateResult | None:
        """Add the gradient on this replica's rows to those that `apply` takes. Return the result on reporting ranks.

        is_last: whether `apply` follows, so that the gradients of all replicas can be summed up in this pass.
        """
        from megarl.parallel.updates import accumulate_gradients

        loaded = self._role(request.role, Part.PARAMS, Part.GRADS)
        group, teaching = self.layout.dp_group, request.teaching
        teacher: LoadedRole | TeacherBeside | None = None
        if teaching is not None and teaching.role is not None:
            teacher = self._role(teaching.role, Part.PARAMS) if teaching.kept is None else self.kept[teaching.kept]
        result = accumulate_gradients(
            loaded, rows, micro_batches, request, dp_group=group, is_last=is_last, teacher=teacher
        )
        return result if self.layout.reports else None

    def apply(self, request: StepRequest) -> dict[str, float]:
        """Take an optimizer step with the accumulated gradients, and return its metrics. Averages follow the actor."""
        return dict(self._apply(request).metrics)

    def _apply(self, request: StepRequest) -> UpdateResult:
        from megarl.parallel.updates import optimizer_step

        loaded = self._role(request.role, *Part)
        result = optimizer_step(loaded, request)
        metrics = dict(result.metrics)
        for role, other in self.roles.items():
            is_due = request.step % other.spec.update_every == 0
            if other.average is not None and request.role is Role.ACTOR and is_due:
                self._role(role, Part.PARAMS)
                loaded.settle()
                other.average.follow(loaded.chunks)
                if role.kind is Role.TEACHER:
                    metrics["distill/teacher_distance"] = other.average.distance(loaded.chunks)
        return replace(result, metrics=metrics)

    def discard(self, role: Role) -> None:
        """Forget the gradients that were accumulated since the role's last optimizer step."""
        from megarl.parallel.roles import Gradients

        self.roles[role].gradients = Gradients.NONE

    def update(self, rows: Rows, micro_batches: Sequence[Sequence[int]], request: UpdateRequest) -> UpdateResult | None:
        """Take one optimizer step. `micro_batches` are this data-parallel replica's share of the mini-batch."""
        result = self.accumulate(rows, micro_batches, request, is_last=True)
        own = self._apply(request.optimizer_step)
        if result is None:
            return None
        metrics = {**result.metrics, **own.metrics}
        return replace(own, metrics=metrics, before=result.before, divergences=result.divergences)

    def store_weights(
        self, files: Sequence[str], *, with_checksums: bool, role: Role = Role.ACTOR, gradients: bool = False
    ) -> StoreResult:
        """Write the slices of Hugging Face tensors that this rank owns, or the accumulated `gradients` of these, into
        preallocated safetensors files.
        """
        from megarl.parallel.building import model_slices
        from megarl.weights.safetensors_map import map_model
        from megarl.weights.slices import count_elements, slice_checksums, store_slices

        loaded = self._role(role, Part.PARAMS)
        stored = loaded.summed_gradients() if gradients else loaded.weights()
        store_slices(stored, map_model([Path(f) for f in files], writable=True))
        checksums: dict[str, int] = {}
        if with_checksums:
            checksums = slice_checksums(loaded.weights(), loaded.expected_tensors())
        return StoreResult(num_elements=count_elements(model_slices(loaded.chunks)), checksums=checksums)

    def store_adapters(self, file: str, *, role: Role = Role.ACTOR) -> StoreResult:
        """Write the slices of a role's adapters that this rank owns into a preallocated file of PEFT's."""
        from megarl.parallel.adapters import trained_slices
        from megarl.weights.peft_files import PREFIX
        from megarl.weights.safetensors_map import map_tensors
        from megarl.weights.slices import count_elements, store_slices

        loaded = self._role(role, Part.PARAMS)
        assert loaded.adapters is not None, f"the {role} has no adapters"
        slices = list(trained_slices(loaded.chunks, loaded.adapters))
        target = map_tensors(Path(file), writable=True)
        store_slices(slices, {name.removeprefix(PREFIX): tensor for name, tensor in target.items()})
        return StoreResult(num_elements=count_elements(slices), checksums={})

    def offer_sync_rendezvous(self, host: str) -> str:
        """Open the store by which trainer ranks and engine workers set up a weight sync, and return its address.

        host: the address at which all of them reach this process.
        """
        from megarl.host.store import offer_store

        self.rendezvous_store, address = offer_store(host)
        return address

    def held_weights(self) -> "dict[str, Boxes]":
        """Return the boxes (rectangular parts) that this rank holds of each of the actor's tensors that are sent."""
        from megarl.sync.transport.ends import holding_of

        spec, slices, _ = self._role(Role.ACTOR, Part.PARAMS).sent()
        return holding_of(slices, spec.expected_tensors(by_expert=True))

    def open_bridge(self, share: "ProcessPlan") -> None:
        """Join the weight sync from trainer to engines as a sending rank."""
        from megarl.host.device.platform import platform
        from megarl.sync.transport.ends import BridgeSender
        from megarl.sync.transport.routed import RoutedSender

        self.bridge_wire = RoutedSender(share, platform().device())
        self.bridge = BridgeSender(share, self.bridge_wire)

    def largest_weights(self) -> dict[str, float]:
        """Return max |x| of this rank's part of each actor tensor that is sent in float8, to choose its scale."""
        return self.bridge.largest(self._role(Role.ACTOR, Part.PARAMS).weights(by_expert=True))

    def send_over_bridge(
        self, transfer: int, *, with_checksums: bool, scales: Mapping[str, float], full: bool
    ) -> dict[int, dict[str, int]]:
        """Send this rank's share of the actor's weights or adapters to engine workers, as the sync plan prescribes."""
        _, slices, merger = self._role(Role.ACTOR, Part.PARAMS).sent()
        return self.bridge.send(
            slices, transfer, with_checksums=with_checksums, scales=scales, full=full, merger=merger
        )

    def close_bridge(self) -> None:
        """Remove this rank's shared-memory segments of the weight sync, and close its connections."""
        self.bridge_wire.close()

    def save_checkpoint(self, directory: str, *, portable: bool) -> None:
        """Start writing the trained roles and RNG states in the background. Training may continue meanwhile.

        portable: make the optimizers' states readable under any layout; see `parallel.checkpoint`.
        """
        self.checkpoints.start_save(Path(directory), portable=portable)

    def finish_checkpoint(self, *, wait: bool) -> bool:
        """Return whether all ranks have written the current checkpoint; if `wait`, wait until they have."""
        with self.communicators.awake():
            return self.checkpoints.finish_save(wait=wait)

    def load_checkpoint(self, directory: str, *, same_layout: Collection[Role], weights_only: bool = False) -> None:
        """Restore weights, optimizer states (unless `weights_only`) and RNG states from a complete checkpoint.

        same_layout: the roles that have the layout they were saved under. RNG states are restored only if this rank
        hosts one.
        """
        self.checkpoints.load(Path(directory), same_layout=same_layout, weights_only=weights_only)

    def offload(self, role: Role, parts: Sequence[Part]) -> int:
        """Move parts of a role's memory to the host, and return the bytes freed on this rank's device."""
        released = self.offloaders[role].offload(parts)
        if self.suspends_nccl and all(offloader.is_empty for offloader in self.offloaders.values()):
            self.communicators.suspend()
        return released

    def onload(self, role: Role, parts: Sequence[Part]) -> None:
        """Move parts of a role's memory from the host back to the device."""
        self.communicators.resume()
        self.offloaders[role].onload(parts)

    def start_profile(self) -> None:
        """Start torch's profiler, which records the work of this process on host and device."""
        import torch

        self.profiler = torch.profiler.profile()
        self.profiler.start()

    def stop_profile(self, directory: str) -> str:
        """Stop the profiler, and write its trace to DIRECTORY/rank_N.json.gz; return why the storage refuses it."""
        self.profiler.stop()
        path = Path(directory) / f"rank_{self.rank}.json.gz"
        try:
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self.profiler.export_chrome_trace(str(path))
        except StorageError as error:
            return str(error)
        finally:
            del self.profiler
        return ""

    def _role(self, role: Role, *needed: Part) -> "LoadedRole":
        """Return a role's model, after checking that the `needed` parts of its memory are on the device."""
        assert role in self.roles, f"this rank hosts {sorted(self.roles)}, not the {role}"
        spec = self.roles[role].spec
        for each in spec.memory:
            self.offloaders[each].require(*(needed if each is role else (Part.PARAMS,)))
        if Part.GRADS not in needed:
            # An update's layers wait for what each of them needs; others read all weights at once.
            self.roles[role].settle()
        return self.roles[role]

    def close(self) -> None:
        """End helper processes, and destroy the process groups."""
        from megarl.parallel.checkpoint import end_writer
        from megarl.parallel.layout import destroy_layout

        end_writer()
        self.communicators.resume()
        destroy_layout()
