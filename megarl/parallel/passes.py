"""Run forward-only and forward-backward passes over micro-batches with Megatron's pipeline schedules, whose stages
exchange activations and gradients without telling each other their shapes first.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import TypeAlias

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func, get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.errors import NonFiniteError
from megarl.host.device.platform import platform
from megarl.host.stage import tell_stage
from megarl.parallel.head.differentiable import LossGradients
from megarl.parallel.head.distill import DistilledLogprobs
from megarl.parallel.head.logprobs import TokenLogprobs
from megarl.parallel.head.pairs import TokenPairs
from megarl.parallel.head.policy import HeadRequest, TokenSquares, TokenStates, TopTokens
from megarl.parallel.model import PackedModel, TokenValues
from megarl.parallel.packing import Pack, num_passed_on
from megarl.parallel.teacher import TeacherBeside, alignment_of, pack_for
from megarl.types import (
    FloatArray,
    Rows,
)
from megarl.types.messages import ForwardResult, Role

Shape: TypeAlias = tuple[int, ...]


class KnownShapes(P2PCommunicator):
    """Megatron's exchange between stages, for micro-batches that differ in length but are known to every stage.

    Megatron would send a shape before each tensor, for which host and device wait. Here a stage looks up what arrives:
    in both directions, micro-batches keep the order of the schedule.

    shapes: of the hidden states that a stage passes on, by micro-batch. num_chunks: model chunks of a stage.
    """

    def __init__(
        self, pp_group: dist.ProcessGroup, config: TransformerConfig, shapes: Sequence[Shape], *, num_chunks: int
    ) -> None:
        super().__init__(pp_group, config)
        stage, last, together = pp_group.rank(), pp_group.size() - 1, config.microbatch_group_size_per_vp_stage
        # The order of backward is the same with chunks counted from the last.
        order = get_schedule_table(len(shapes), num_chunks, together if num_chunks > 1 else len(shapes))
        # At both ends of the pipeline, the first chunk of a pass gets nothing from another stage.
        self._from_previous = iter([shapes[i] for i, chunk in order if stage > 0 or chunk > 0])
        self._from_next = iter([shapes[i] for i, chunk in order if stage < last or chunk > 0])

    def _communicate_shapes(
        self, tensor_send_next: object, tensor_send_prev: object, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        return next(self._from_previous) if recv_prev else None, next(self._from_next) if recv_next else None


TokenOutputs: TypeAlias = (
    TokenLogprobs | TokenPairs | TokenValues | TokenSquares | TopTokens | TokenStates | DistilledLogprobs
)
MicroBatches: TypeAlias = Sequence[Sequence[int]]


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    rows: Rows,
    micro_batches: MicroBatches,
    request: HeadRequest,
    on_output: Callable[[PackedModel, Pack, Sequence[int], TokenOutputs], object],
    *,
    forward_only: bool,
    loss_gradients: Callable[[Pack, Sequence[int]], LossGradients] | None = None,
    teacher: TeacherBeside | None = None,
    beside: PackedModel | None = None,
) -> None:
    """Run micro-batches through a rank's model chunks in Megatron's schedule; last-stage outputs go to `on_output`.

    teacher: computes each micro-batch too. beside: a further model that packs have to suit.
    """
    same_packs = [] if teacher is None or teacher.taught is not None else [teacher.model]
    models = [unwrapped(chunks[0]), *same_packs, *([beside] if beside else [])]
    model = models[0]
    layout, device = model.layout, platform().device()
    started = itertools.count(1)

    def forward_step(batches: Iterator[Sequence[int]], chunk: torch.nn.Module) -> tuple[object, Callable[..., object]]:
        indices = next(batches)
        tell_stage(f"micro-batch {next(started)} of {len(micro_batches) * len(chunks)}")
        pack = pack_for(models, [rows[i] for i in indices])
        gradients = None if loss_gradients is None else loss_gradients(pack, indices)
        answer = chunk(pack, request, gradients, None if teacher is None else teacher.logits(pack, indices))
        # With experts, Megatron reads the `device` of the output, so it must be a tensor.
        passed = answer if isinstance(answer, torch.Tensor) else torch.empty(0, device=device)
        return passed, lambda _, **__: on_output(unwrapped(chunk), pack, indices, answer)

    between_stages: dict[str, object] = {}
    alignment, shares = alignment_of(models), all(each.shares_prefixes for each in models)
    if layout.config.pp > 1:
        packs = ([rows[i] for i in indices] for indices in micro_batches)
        shapes = [(num_passed_on(pack, alignment, shares), 1, model.config.hidden_size) for pack in packs]
        known = KnownShapes(layout.pp_group, model.config, shapes, num_chunks=len(chunks))
        between_stages = {"p2p_communicator": known, "pg_collection": layout.schedule_groups}
    iterators = [iter(micro_batches) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        # Only the divisibility by tensor and context parallelism matters: stages know the real shapes.
        seq_length=alignment.total_multiple * alignment.cp,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        **between_stages,
    )
    tell_stage("")


def unwrapped(chunk: torch.nn.Module) -> PackedModel:
    """Return a model chunk without what accumulates its gradients."""
    policy = chunk if isinstance(chunk, PackedModel) else chunk.module
    assert isinstance(policy, PackedModel)
    return policy


def to_rows(values: torch.Tensor, rows: Rows, indices: Sequence[int]) -> dict[int, FloatArray]:
    host = values.detach().float().cpu().numpy()
    return {i: host[b, : rows[i].num_response_tokens] for b, i in enumerate(indices)}


# The names of quantities in messages; and, for roles without training settings of their own, the role whose settings
# apply.
_SPOKEN = {"logprobs": "log-probs"}
TRAINED_AS = {Role.REFERENCE: Role.ACTOR, Role.TEACHER: Role.ACTOR, Role.REWARD: Role.ACTOR}


def require_finite(name: str, values: torch.Tensor, rows: Rows, indices: Sequence[int], step: int, role: Role) -> None:
    """Raise NonFiniteError, naming the step and the row, if a model's output has NaN or infinity."""
    bad = ~torch.isfinite(values).all(1)
    if bad.any():
        row = rows[indices[int(bad.nonzero()[0])]]
        raise NonFiniteError(
            f"step {step}: {_SPOKEN.get(name, name)} of row {row.label} are not finite; the weights or inputs have "
            f"diverged: lower {TRAINED_AS.get(role.kind, role)}.optimizer.lr, or start from an earlier checkpoint"
        )


@torch.no_grad()
def forward_rows(
    chunks: Sequence[torch.nn.Module],
    rows: Rows,
    micro_batches: MicroBatches,
    request: HeadRequest,
    *,
    role: Role,
    step: int,
) -> ForwardResult:
    """Compute log-probs or values, without gradients, of the rows whose indices `micro_batches` lists."""
    quantities: dict[str, dict[int, FloatArray]] = {}

    def collect(model: PackedModel, pack: Pack, indices: Sequence[int], out: TokenOutputs) -> None:
        for name, values in by_name(out).items():
            complete = model.complete_rows(pack, values)
            require_finite(name, complete, rows, indices, step, role)
            quantities.setdefault(name, {}).update(to_rows(complete, rows, indices))

    run_schedule(chunks, rows, micro_batches, request, collect, forward_only=True)
    return ForwardResult(quantities=quantities)


def by_name(out: TokenOutputs) -> dict[str, torch.Tensor]:
    """Return a head's output tensors by name. The log-probs, or a critic's values, are always first."""
    return {field.name: getattr(out, field.name) for field in fields(out)}
