"""One Megatron rank: builds actor and reference, scores rows, updates the actor, writes its weights.

`PolicyWorker` is a plain synchronous class: Ray actors wrap it, tests call it in ordinary processes.
"""

import gc
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.schema import LayoutConfig
from megarl.parallel.messages import LoadRequest, Role, RowScores, StoreResult, UpdateRequest, UpdateResult
from megarl.types import Rows

if TYPE_CHECKING:
    from megarl.parallel.model import HeadRequest


class PolicyWorker:
    """One rank of the trainer. Heavy imports happen in `prepare`, so that constructing it is cheap."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def prepare(self) -> str:
        """Import what takes long and offer an address for the process group (rank 0's is used)."""
        from megarl.parallel.platform import platform

        platform().prepare()
        import megarl.parallel.passes  # noqa: F401

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return f"tcp://{_host_address()}:{port}"

    def join(self, layout: LayoutConfig, init_method: str, timeout_s: float) -> int:
        """Join the layout's process groups; returns this process's id."""
        from megarl.parallel.layout import initialize_layout

        self.layout = initialize_layout(layout, rank=self.rank, init_method=init_method, timeout_s=timeout_s)
        return os.getpid()

    def load(self, request: LoadRequest) -> None:
        """Build the models and read their weights; a later call starts a new run on the same processes."""
        from megarl.parallel.model import build_model
        from megarl.parallel.optimizer import build_optimizer, wrap_ddp
        from megarl.parallel.platform import platform
        from megarl.parallel.weights.families import read_model_spec

        self._forget_models()
        platform().seed(request.seed)
        self.config = request.actor
        self.spec = read_model_spec(request.model.path)
        self.actor = build_model(self.spec, request.model, self.layout)
        self.ddp = wrap_ddp(self.actor, request.actor.optimizer)
        self.optimizer = build_optimizer(self.ddp, request.actor.optimizer)
        self.reference = None
        if request.with_reference:
            self.reference = build_model(self.spec, request.model, self.layout)
            self.reference.requires_grad_(False)

    def _forget_models(self) -> None:
        """Free an earlier run's models before building new ones."""
        for name in ("actor", "ddp", "optimizer", "reference"):
            self.__dict__.pop(name, None)
        gc.collect()

    def score(
        self,
        rows: Rows,
        micro_batches: Sequence[Sequence[int]],
        *,
        role: Role,
        temperature: float,
        step: int,
    ) -> RowScores | None:
        """Score this replica's rows; only the rank that reports for the replica returns them."""
        from megarl.parallel.passes import score_rows

        model = self.actor if role == "actor" else self.reference
        assert model is not None, "the reference was not built"
        scores = score_rows(model, rows, micro_batches, self._head(temperature), step=step)
        return scores if self.layout.reports else None

    def update(self, rows: Rows, micro_batches: Sequence[Sequence[int]], request: UpdateRequest) -> UpdateResult | None:
        """One optimizer step on a mini-batch, of which this replica has `micro_batches`."""
        from megarl.parallel.optimizer import set_learning_rate
        from megarl.parallel.passes import accumulate_gradients

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        result = accumulate_gradients(
            self.ddp,
            rows,
            micro_batches,
            self._head(request.temperature, entropy_needs_grad=request.algorithm.entropy_needs_grad),
            algorithm=request.algorithm,
            state=request.state,
            denominators=request.denominators,
            dp_group=self.layout.dp_group,
            step=request.step,
        )
        set_learning_rate(self.optimizer, request.lr)
        grad_norm = self._optimizer_step(request.step)
        if not self.layout.reports:
            return None
        metrics = {**result.metrics, "actor/grad_norm": grad_norm, "actor/lr": request.lr}
        return UpdateResult(metrics=metrics, logprobs=result.logprobs)

    def _optimizer_step(self, step: int) -> float:
        from megarl.errors import NonFiniteError

        _, grad_norm, _ = self.optimizer.step()
        norm = float(grad_norm)
        if not abs(norm) < float("inf"):
            raise NonFiniteError(
                f"step {step}: gradient norm is {norm}; the weights of this process are spoiled: restart from "
                f"the last export with a lower actor.optimizer.lr"
            )
        return norm

    def store_weights(self, files: Sequence[str], *, with_checksums: bool) -> StoreResult:
        """Write the slices this rank owns into preallocated safetensors files (sync and export alike)."""
        from megarl.parallel.weights.slices import count_elements, slice_checksums, store_slices
        from megarl.safetensors_map import map_model

        store_slices(self.actor.slices(), map_model([Path(f) for f in files], writable=True))
        shapes = self.spec.expected_tensors()
        return StoreResult(
            num_elements=count_elements(self.actor.slices()),
            checksums=slice_checksums(self.actor.slices(), shapes) if with_checksums else {},
        )

    def close(self) -> None:
        """Leave the process group."""
        from megarl.parallel.layout import destroy_layout

        destroy_layout()

    def _head(self, temperature: float, *, entropy_needs_grad: bool = False) -> "HeadRequest":
        from megarl.parallel.model import HeadRequest

        return HeadRequest(
            temperature=temperature,
            chunk_tokens=self.config.head_chunk_tokens,
            entropy_needs_grad=entropy_needs_grad,
        )


def _host_address() -> str:
    """The address other hosts reach this one at; loopback where there is only one host."""
    return os.environ.get("MEGARL_HOST_ADDRESS", "127.0.0.1")
