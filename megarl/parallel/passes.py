"""Run forward-only and forward-backward passes over micro-batches with Megatron's pipeline schedules."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from megarl.errors import NonFiniteError
from megarl.host.device.accelerators import FP8_RECIPES
from megarl.host.device.platform import platform
from megarl.host.stage import tell_stage
from megarl.parallel.head.differentiable import LossGradients
from megarl.parallel.head.distill import DistilledLogprobs
from megarl.parallel.head.logprobs import TokenLogprobs
from megarl.parallel.head.pairs import TokenPairs
from megarl.parallel.head.policy import HeadRequest, TokenStates, TopTokens
from megarl.parallel.model import PackedModel, TokenValues
from megarl.parallel.moe.router import MiniBatchLoad
from megarl.parallel.packing import Pack, PackAlignment, num_passed_on, pack_rows
from megarl.parallel.roles import Gradients, LoadedRole
from megarl.parallel.stages import KnownShapes
from megarl.parallel.teacher import TeacherBeside
from megarl.types import (
    FloatArray,
    ModelOutputs,
    PolicyOutputs,
    RowBatch,
    Rows,
    ValueOutputs,
    row_batch,
)
from megarl.types.messages import AccumulateRequest, ForwardResult, Role, StepRequest, UpdateResult

TokenOutputs: TypeAlias = TokenLogprobs | TokenPairs | TokenValues | TopTokens | TokenStates | DistilledLogprobs
MicroBatches: TypeAlias = Sequence[Sequence[int]]


def _run_schedule(
    chunks: Sequence[torch.nn.Module],
    rows: Rows,
    micro_batches: MicroBatches,
    request: HeadRequest,
    on_output: Callable[[PackedModel, Pack, Sequence[int], TokenOutputs], Any],
    *,
    forward_only: bool,
    loss_gradients: Callable[[Pack, Sequence[int]], LossGradients] | None = None,
    teacher: TeacherBeside | None = None,
    beside: PackedModel | None = None,
) -> None:
    """Run micro-batches through a rank's model chunks in Megatron's schedule; last-stage outputs go to `on_output`.

    teacher: computes each micro-batch too. beside: a model that packs have to suit as well; None: the teacher's.
    """
    model = _unwrap(chunks[0])
    other = teacher.model if teacher is not None else beside
    models = [model] if other is None else [model, other]
    shares = all(each.shares_prefixes for each in models)
    layout, device = model.layout, platform().device()
    alignment = PackAlignment(
        tp=layout.config.tp if layout.config.sequence_parallel else 1,
        cp=layout.config.cp,
        cp_rank=layout.cp_group.rank(),
        block=max(1 if m.config.fp8 is None else FP8_RECIPES[m.config.fp8_recipe].block for m in models),
    )

    started = itertools.count(1)

    def forward_step(batches: Iterator[Sequence[int]], chunk: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
        indices = next(batches)
        tell_stage(f"micro-batch {next(started)} of {len(micro_batches) * len(chunks)}")
        pack = pack_rows(
            [rows[i] for i in indices],
            alignment=alignment,
            device=device,
            plans_attention=any(each.plans_attention for each in models),
            shares_prefixes=shares,
            gathers_keys=any(each.gathers_keys for each in models),
            replay_routing=model.replays_routing,
        )
        gradients = None if loss_gradients is None else loss_gradients(pack, indices)
        taught = None if teacher is None else teacher.logits(pack, indices)
        answer = chunk(pack, request, gradients, taught)
        # With experts, Megatron reads the `device` of the output, so it must be a tensor.
        passed = answer if isinstance(answer, torch.Tensor) else torch.empty(0, device=device)
        return passed, lambda _, **__: on_output(_unwrap(chunk), pack, indices, answer)

    between_stages: dict[str, Any] = {}
    if layout.config.pp > 1:
        packs = ([rows[i] for i in indices] for indices in micro_batches)
        shapes = [(num_passed_on(pack, alignment, shares), 1, model.config.hidden_size) for pack in packs]
        known = KnownShapes(layout.pp_group, model.config, shapes, num_chunks=len(chunks))
        between_stages = {"p2p_communicator": known, "pg_collection": layout.schedule_groups}
    several = len(chunks) > 1
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks] if several else iter(micro_batches),
        model=list(chunks) if several else chunks[0],
        num_microbatches=len(micro_batches),
        # Only the divisibility by tensor and context parallelism matters: stages know the real shapes.
        seq_length=alignment.total_multiple * alignment.cp,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        **between_stages,
    )
    tell_stage("")


def _unwrap(chunk: torch.nn.Module) -> PackedModel:
    policy = chunk if isinstance(chunk, PackedModel) else chunk.module
    assert isinstance(policy, PackedModel)
    return policy


def _to_rows(values: torch.Tensor, rows: Rows, indices: Sequence[int]) -> dict[int, FloatArray]:
    host = values.detach().float().cpu().numpy()
    return {i: host[b, : rows[i].num_response_tokens] for b, i in enumerate(indices)}


# The names of quantities in messages; and, for roles without training settings of their own, the role whose settings
# apply.
_SPOKEN = {"logprobs": "log-probs"}
_TRAINED_AS = {Role.REFERENCE: Role.ACTOR, Role.TEACHER: Role.ACTOR, Role.REWARD: Role.ACTOR}


def _require_finite(name: str, values: torch.Tensor, rows: Rows, indices: Sequence[int], step: int, role: Role) -> None:
    """Raise NonFiniteError, naming the step and the row, if a model's output has NaN or infinity."""
    bad = ~torch.isfinite(values).all(1)
    if bad.any():
        row = rows[indices[int(bad.nonzero()[0])]]
        raise NonFiniteError(
            f"step {step}: {_SPOKEN.get(name, name)} of row {row.label} are not finite; the weights or inputs have "
            f"diverged: lower {_TRAINED_AS.get(role.kind, role)}.optimizer.lr, or start from an earlier checkpoint"
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
        for name, values in _by_name(out).items():
            complete = model.complete_rows(pack, values)
            _require_finite(name, complete, rows, indices, step, role)
            quantities.setdefault(name, {}).update(_to_rows(complete, rows, indices))

    _run_schedule(chunks, rows, micro_batches, request, collect, forward_only=True)
    return ForwardResult(quantities=quantities)


def accumulate_gradients(
    loaded: LoadedRole,
    rows: Rows,
    micro_batches: MicroBatches,
    request: AccumulateRequest,
    *,
    dp_group: dist.ProcessGroup,
    is_last: bool = True,
    teacher: LoadedRole | None = None,
) -> UpdateResult:
    """Run forward and backward of rows, which adds their gradients to those in Megatron's buffers.

    is_last: whether the optimizer step follows. Then the gradients of all replicas are summed up; on CUDA, while
    backward computes. Otherwise `optimizer_step` does it once, and a pass that fails on one replica ends on all, so
    that these can go on without its gradients and those before it. teacher: the model that the request compares with.
    """
    assert loaded.optimizer is not None, f"the {request.role} is frozen"
    if loaded.gradients is Gradients.NONE:
        for chunk in loaded.ddp:
            chunk.zero_grad_buffer()
        loaded.optimizer.zero_grad()
    # Nothing counts that an unfinished pass leaves.
    loaded.gradients = Gradients.NONE
    device, total = platform().device(), f"{request.role}/loss"
    before: dict[int, FloatArray] = {}
    sums: dict[str, float] = {total: 0.0}

    def loss_of(
        model: PackedModel, pack: Pack, indices: Sequence[int], out: TokenOutputs
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        complete = {name: model.complete_rows(pack, values) for name, values in _by_name(out).items()}
        primary = next(iter(complete))
        _require_finite(primary, complete[primary], rows, indices, request.step, request.role)
        if request.with_outputs:
            before.update(_to_rows(complete[primary], rows, indices))
        batch = row_batch([rows[i] for i in indices], device=device)
        parts = request.objective.loss(batch, _ROW_OUTPUTS[type(out)](**complete), request.state)
        loss = parts.total(request.denominators)
        if not torch.isfinite(loss):
            cause = _explain(batch, request.role)
            raise NonFiniteError(f"step {request.step}: loss of the {request.role} is {loss.item()}; {cause}")
        for name, share in {total: loss.item(), **parts.shares(request.denominators)}.items():
            sums[name] = sums.get(name, 0.0) + share
        # Megatron wants (loss, tokens, logs); the loss is final, so the token count is not used.
        return loss, torch.ones((), dtype=torch.int, device=device), {}

    experts, coef = loaded.model_spec.dims.experts, loaded.spec.settings.moe.aux_loss_coef
    load = MiniBatchLoad(loaded.chunks, experts, rows, micro_batches, aux_loss_coef=coef, dp_group=dp_group)

    def gradients_of(pack: Pack, indices: Sequence[int]) -> LossGradients:
        # The batch is built only when a head asks for it; on other stages and in other regimes none does.
        batch = functools.cache(lambda: row_batch([rows[i] for i in indices], device=device))
        return lambda *outputs: _loss_gradients(request, batch(), pack, outputs)

    objective = request.objective
    head = loaded.head_request(
        temperature=request.temperature,
        entropy_needs_grad=objective.entropy_needs_grad,
        token_local=objective.token_local,
        teaching=request.teaching,
    )
    beside = None if teacher is None else _teach(loaded, teacher, rows, micro_batches, request)
    in_chunk = gradients_of if objective.token_local else None
    failure: Exception | None = None
    try:
        with contextlib.nullcontext() if is_last else loaded.unreduced():
            _run_schedule(
                loaded.ddp,
                rows,
                micro_batches,
                head,
                loss_of,
                forward_only=False,
                loss_gradients=in_chunk,
                teacher=beside,
            )
    except Exception as error:  # the loss may be a user's
        if is_last:
            raise
        failure = error
    if not is_last:
        num_failed = torch.tensor(int(failure is not None), device=device)
        dist.all_reduce(num_failed, group=dp_group)
        if failure is not None:
            raise failure
        if num_failed:
            return UpdateResult(metrics={}, before={})
    loaded.gradients = Gradients.REDUCED if is_last else Gradients.OWN
    totals = torch.tensor([sums[name] for name in sorted(sums)], dtype=torch.float64, device=device)
    if dp_group.size() > 1:
        dist.all_reduce(totals, group=dp_group)
    metrics = dict(zip(sorted(sums), totals.tolist(), strict=True))
    # Metrics of a critic's experts get the role's name as prefix.
    prefix = "" if request.role is Role.ACTOR else f"{request.role}/"
    metrics |= {f"{prefix}{name}": value for name, value in load.metrics().items()}
    return UpdateResult(metrics=metrics, before=before)


def _teach(
    student: LoadedRole, teacher: LoadedRole, rows: Rows, micro_batches: MicroBatches, request: AccumulateRequest
) -> TeacherBeside:
    """Prepare a teacher to compute beside the student's update; with pipeline stages, run its passes."""
    assert request.teaching is not None
    asked = replace(teacher.head_request(temperature=request.temperature), states_only=True)
    own = student.chunks[0]
    beside = TeacherBeside(loaded=teacher, request=asked, shard=own.vocab_shard, common=request.teaching.common)
    if own.layout.config.pp > 1:
        _run_schedule(teacher.chunks, rows, micro_batches, asked, beside.keep, forward_only=True, beside=own)
    return beside


@torch.enable_grad()
def _loss_gradients(
    request: AccumulateRequest, batch: RowBatch, pack: Pack, outputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of a token-local loss with respect to [N] log-probs and entropies of this rank's labels and,
    with a teacher, to divergences from it.

    A token-local loss is a sum over tokens, so the labels of other context-parallel ranks are not needed.
    """
    differentiated = [values.detach().requires_grad_() for values in outputs]
    logprobs, entropy, *divergence = map(pack.scatter, differentiated)
    out = PolicyOutputs(logprobs=logprobs, entropy=entropy, divergence=divergence[0] if divergence else None)
    loss = request.objective.loss(batch, out, request.state).total(request.denominators)
    found: list[torch.Tensor | None] = list(torch.autograd.grad(loss, differentiated, allow_unused=True))
    if not request.objective.entropy_needs_grad:
        found[1] = None
    return tuple(found)


def optimizer_step(loaded: LoadedRole, request: StepRequest) -> float:
    """Sum the gradients over replicas unless that is done, scale and clip them, and take an optimizer step.

    Return the gradient norm before clipping.
    """
    assert loaded.optimizer is not None
    # It writes where the last update's weights may still be arriving.
    loaded.settle()
    if loaded.gradients is Gradients.OWN:
        loaded.reduce_gradients()
    if request.scale != 1.0:
        for chunk in loaded.ddp:
            chunk.scale_gradients(request.scale)
    settings = loaded.spec.settings.optimizer
    for group in loaded.optimizer.param_groups:
        group["lr"] = request.lr * group.get("lr_mult", 1.0)
        if "betas" in group:
            group["betas"] = request.betas or settings.betas
    clip = settings.clip_grad_norm if request.clip is None else request.clip
    for optimizer in getattr(loaded.optimizer, "chained_optimizers", [loaded.optimizer]):
        optimizer.config.clip_grad = clip
    loaded.gradients = Gradients.NONE
    _, grad_norm, _ = loaded.optimizer.step()
    for chunk in loaded.ddp:
        chunk.start_gathering()
    norm = float(grad_norm)
    if not math.isfinite(norm):
        raise NonFiniteError(
            f"step {request.step}: gradient norm of the {request.role} is {norm}; the weights of this process are "
            f"spoiled: restart from the last checkpoint with a lower learning rate"
        )
    return norm


# Token outputs of a head → the rows an objective sees.
_ROW_OUTPUTS: dict[type, Callable[..., ModelOutputs]] = {
    TokenLogprobs: PolicyOutputs,
    TokenValues: ValueOutputs,
    DistilledLogprobs: lambda logprobs, entropy, divergence, **others: PolicyOutputs(
        logprobs=logprobs, entropy=entropy, divergence=divergence, comparison=others
    ),
}


def _by_name(out: TokenOutputs) -> dict[str, torch.Tensor]:
    """Return a head's output tensors by name. The log-probs, or a critic's values, are always first."""
    return {field.name: getattr(out, field.name) for field in fields(out)}


def _explain(batch: RowBatch, role: Role) -> str:
    """Describe, for the error message, which row's which input (such as old log-probs) makes the loss non-finite."""
    for name, values in batch.quantities.items():
        bad = ~torch.isfinite(values).all(1)
        if bad.any():
            return f"{name} of row {batch.labels[int(bad.nonzero()[0])]} are not finite"
    cause = f"all quantities are finite; its micro-batch starts with row {batch.labels[0]}"
    return f"{cause}: lower {_TRAINED_AS.get(role, role)}.optimizer.lr"
