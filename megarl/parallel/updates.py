"""Accumulate the gradients of an objective over micro-batches, and take optimizer steps with them."""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from megarl.errors import NonFiniteError
from megarl.host.device.platform import platform
from megarl.parallel.head.differentiable import LossGradients
from megarl.parallel.head.distill import DistilledLogprobs
from megarl.parallel.head.logprobs import TokenLogprobs
from megarl.parallel.model import PackedModel, TokenValues
from megarl.parallel.moe.router import MiniBatchLoad
from megarl.parallel.movement import sample_weights, update_ratios
from megarl.parallel.packing import Pack
from megarl.parallel.passes import (
    TRAINED_AS,
    MicroBatches,
    TokenOutputs,
    by_name,
    require_finite,
    run_schedule,
    to_rows,
)
from megarl.parallel.roles import Gradients, LoadedRole
from megarl.parallel.teacher import TeacherBeside
from megarl.types import FloatArray, ModelOutputs, PolicyOutputs, RowBatch, Rows, ValueOutputs, row_batch
from megarl.types.messages import AccumulateRequest, ForwardRequest, Role, StepRequest, UpdateResult

# Token outputs of a head → the rows an objective sees.
_ROW_OUTPUTS: dict[type, Callable[..., ModelOutputs]] = {
    TokenLogprobs: PolicyOutputs,
    TokenValues: ValueOutputs,
    DistilledLogprobs: lambda logprobs, entropy, divergence, **others: PolicyOutputs(
        logprobs=logprobs, entropy=entropy, divergence=divergence, comparison=others
    ),
}


@dataclass(slots=True, kw_only=True)
class _Losses:
    """The losses of a request's micro-batches, as the schedule asks for them.

    sums: of the loss and of metrics, each divided by its denominator. before, divergences: the outputs of rows, if the
    request asks.
    """

    request: AccumulateRequest
    rows: Rows
    device: torch.device = field(default_factory=lambda: platform().device())
    sums: dict[str, float] = field(default_factory=dict)
    before: dict[int, FloatArray] = field(default_factory=dict)
    divergences: dict[int, FloatArray] = field(default_factory=dict)

    def __call__(
        self, model: PackedModel, pack: Pack, indices: Sequence[int], out: TokenOutputs
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
        """Compute the loss of a micro-batch from what the head found."""
        request, rows = self.request, self.rows
        complete = {name: model.complete_rows(pack, values) for name, values in by_name(out).items()}
        primary = next(iter(complete))
        require_finite(primary, complete[primary], rows, indices, request.step, request.role)
        batch = row_batch([rows[i] for i in indices], device=self.device)
        if request.with_outputs:
            # Not of what environments said.
            found = torch.where(batch.loss_mask, complete[primary], 0.0)
            self.before.update(to_rows(found, rows, indices))
            if "divergence" in complete and request.teaching is not None and request.teaching.measure is None:
                self.divergences.update(to_rows(complete["divergence"], rows, indices))
        parts = request.objective.loss(batch, _ROW_OUTPUTS[type(out)](**complete), request.state)
        loss = _differentiable(parts.total(request.denominators), request.role)
        if not torch.isfinite(loss):
            cause = _explain(batch, request.role)
            raise NonFiniteError(f"step {request.step}: loss of the {request.role} is {loss.item()}; {cause}")
        for name, share in {self._name: loss.item(), **parts.shares(request.denominators)}.items():
            self.sums[name] = self.sums.get(name, 0.0) + share
        # Megatron wants (loss, tokens, logs); the loss is final, so the token count is not used. It frees no views.
        return loss if loss._base is None else loss.clone(), torch.ones((), dtype=torch.int, device=self.device), {}

    def gradients(self, pack: Pack, indices: Sequence[int]) -> LossGradients:
        """Return what computes the gradients of a token-local loss from a micro-batch's outputs."""
        # The batch is built only when a head asks for it; on other stages and in other memory modes none does.
        batch = functools.cache(lambda: row_batch([self.rows[i] for i in indices], device=self.device))
        return lambda *outputs: _loss_gradients(self.request, batch(), pack, outputs)

    def total(self, dp_group: dist.ProcessGroup) -> dict[str, float]:
        """Add up the sums of all replicas, by name."""
        sums = {self._name: 0.0, **self.sums}
        totals = torch.tensor([sums[name] for name in sorted(sums)], dtype=torch.float64, device=self.device)
        if dp_group.size() > 1:
            dist.all_reduce(totals, group=dp_group)
        return dict(zip(sorted(sums), totals.tolist(), strict=True))

    @property
    def _name(self) -> str:
        return f"{self.request.role}/loss"


def accumulate_gradients(
    loaded: LoadedRole,
    rows: Rows,
    micro_batches: MicroBatches,
    request: AccumulateRequest,
    *,
    dp_group: dist.ProcessGroup,
    is_last: bool = True,
    teacher: LoadedRole | TeacherBeside | None = None,
) -> UpdateResult:
    """Run forward and backward of rows, which adds their gradients to those in Megatron's buffers.

    is_last: whether the optimizer step follows. Then the gradients of all replicas are summed up; on CUDA, while
    backward computes. Otherwise `optimizer_step` does it once, and a pass that fails on one replica ends on all, so
    that these can go on without its gradients and those before it. teacher: the model that the request compares with,
    or what was kept of it.
    """
    assert loaded.optimizer is not None, f"the {request.role} is frozen"
    if loaded.gradients is Gradients.NONE:
        for chunk in loaded.ddp:
            chunk.zero_grad_buffer()
        loaded.optimizer.zero_grad()
    # Nothing counts that an unfinished pass leaves.
    loaded.gradients = Gradients.NONE
    losses = _Losses(request=request, rows=rows)
    experts, coef = loaded.model_spec.dims.experts, loaded.spec.settings.moe.aux_loss_coef
    load = MiniBatchLoad(loaded.chunks, experts, rows, micro_batches, aux_loss_coef=coef, dp_group=dp_group)
    objective = request.objective
    head = loaded.head_request(
        temperature=request.temperature,
        entropy_needs_grad=objective.entropy_needs_grad,
        token_local=objective.token_local,
        teaching=request.teaching,
    )
    beside = None if teacher is None else _teach(loaded, teacher, rows, micro_batches, request)
    in_chunk = losses.gradients if objective.token_local else None
    run = functools.partial(run_schedule, loaded.ddp, rows, micro_batches, head, losses, forward_only=False)
    failure: Exception | None = None
    try:
        with contextlib.nullcontext() if is_last else loaded.unreduced():
            run(loss_gradients=in_chunk, teacher=beside)
    except Exception as error:  # the loss may be a user's
        if is_last:
            raise
        failure = error
    if not is_last:
        num_failed = torch.tensor(int(failure is not None), device=losses.device)
        dist.all_reduce(num_failed, group=dp_group)
        if failure is not None:
            raise failure
        if num_failed:
            return UpdateResult(metrics={}, before={})
    loaded.gradients = Gradients.REDUCED if is_last else Gradients.OWN
    # Metrics of a critic's experts get the role's name as prefix.
    prefix = "" if request.role is Role.ACTOR else f"{request.role}/"
    metrics = losses.total(dp_group) | {f"{prefix}{name}": value for name, value in load.metrics().items()}
    return UpdateResult(metrics=metrics, before=losses.before, divergences=losses.divergences)


def _teach(
    student: LoadedRole,
    teacher: LoadedRole | TeacherBeside,
    rows: Rows,
    micro_batches: MicroBatches,
    request: AccumulateRequest,
) -> TeacherBeside:
    """Prepare a teacher to compute beside the student's update; with pipeline stages, run its passes."""
    assert request.teaching is not None
    if isinstance(teacher, TeacherBeside):
        device = platform().device()
        weight = None if teacher.weight is None else teacher.weight.to(device)
        others = {number: each.to(device) for number, each in teacher.others.items()}
        return replace(teacher, measure=request.teaching.measure, weight=weight, others=others)
    asked = replace(teacher.head_request(temperature=request.temperature), states_only=True)
    own, taught = student.chunks[0], None
    if request.teaching.reads_hints:
        taught = {i: rows[i].as_taught for indices in micro_batches for i in indices}
    beside = TeacherBeside(
        loaded=teacher, request=asked, shard=own.vocab_shard, common=request.teaching.common, taught=taught
    )
    if own.layout.config.pp > 1:
        read, packed_for = (rows, own) if taught is None else (taught, None)
        with torch.no_grad(), beside.as_teacher():
            run_schedule(teacher.chunks, read, micro_batches, asked, beside.keep, forward_only=True, beside=packed_for)
    return beside


@torch.no_grad()
def keep_policy(
    loaded: LoadedRole,
    rows: Rows,
    micro_batches: MicroBatches,
    request: ForwardRequest,
    *,
    others: Mapping[int, TeacherBeside],
) -> TeacherBeside:
    """Return, on the host, what gives the policy's distribution at labels after it has moved on: hidden states and the
    output weight; for tokens with the request's lags, of the version that sampled them. The micro-batches are those of
    the update that will ask for it. others: what was kept in this step.
    """
    temperature, numbers = request.temperature, dict[int, list[int]]()
    loaded.settle()
    for lag in request.lags:
        assert loaded.versions is not None, "rows are stale, and ranks keep no versions"
        if (number := loaded.versions.place_of(request.step - 1 - lag)) is not None:
            numbers.setdefault(number, []).append(lag)
    own, asked = loaded.chunks[-1], replace(loaded.head_request(temperature=temperature), states_only=True)
    beside = TeacherBeside(loaded=loaded, request=asked, shard=own.vocab_shard, common=None, own_shard=own.vocab_shard)
    if own.post_process:
        first = others.get(0)
        beside.weight = own.output_weight.detach().to("cpu", copy=True) if first is None else first.weight
    run_schedule(loaded.chunks, rows, micro_batches, asked, beside.keep, forward_only=True)
    for number, lags in numbers.items():
        assert loaded.versions is not None
        with loaded.versions.computing_with(number):
            if own.post_process:
                weight = next((each.others[number] for each in others.values() if number in each.others), None)
                beside.others[number] = own.output_weight.detach().to("cpu", copy=True) if weight is None else weight
            keep = beside.keep_of(number, lags, rows)
            run_schedule(loaded.chunks, rows, micro_batches, asked, keep, forward_only=True)
    return beside


@torch.enable_grad()
def _loss_gradients(
    request: AccumulateRequest, batch: RowBatch, pack: Pack, outputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of a token-local loss with respect to [N] log-probs and entropies of this rank's labels and,
    with a teacher, to divergences from it and to its log-probs.

    A token-local loss is a sum over tokens, so the labels of other context-parallel ranks are not needed.
    """
    differentiated = [values.detach().requires_grad_() for values in outputs]
    logprobs, entropy, *taught = map(pack.scatter, differentiated)
    comparison = {"teacher_logprobs": taught[1].detach()} if taught else {}
    divergence = taught[0] if taught else None
    out = PolicyOutputs(logprobs=logprobs, entropy=entropy, divergence=divergence, comparison=comparison)
    loss = _differentiable(request.objective.loss(batch, out, request.state).total(request.denominators), request.role)
    found: list[torch.Tensor | None] = list(torch.autograd.grad(loss, differentiated, allow_unused=True))
    if not request.objective.entropy_needs_grad:
        found[1] = None
    return tuple(found)


def optimizer_step(loaded: LoadedRole, request: StepRequest) -> UpdateResult:
    """Sum the gradients over replicas unless that is done, scale and clip them, and take an optimizer step.

    The metrics are the gradient norm before clipping, the learning rate, and how far layers moved if it is asked for.
    """
    assert loaded.optimizer is not None
    # It writes where the last update's weights may still be arriving.
    loaded.settle()
    if loaded.gradients is Gradients.OWN:
        loaded.reduce_gradients()
    if request.scale != 1.0:
        for chunk in loaded.ddp:
            chunk.scale_gradients(request.scale)
    if loaded.versions is not None:
        loaded.versions.remember(request.step - 1)
    settings, tower_lr = loaded.spec.settings.optimizer, loaded.spec.settings.vision.lr
    for group in loaded.optimizer.param_groups:
        group["lr"] = request.lr * group.get("lr_mult", 1.0)
        if tower_lr is not None and group.get("is_decoupled_lr"):
            group["lr"] *= tower_lr / settings.lr
        if "betas" in group:
            group["betas"] = request.betas or settings.betas
    clip = settings.clip_grad_norm if request.clip is None else request.clip
    for optimizer in getattr(loaded.optimizer, "chained_optimizers", [loaded.optimizer]):
        optimizer.config.clip_grad = clip
    loaded.gradients = Gradients.NONE
    samples = sample_weights(loaded) if request.watches or request.measures else []
    _, grad_norm, _ = loaded.optimizer.step()
    ratios = update_ratios(loaded, samples) if request.measures else {}
    for chunk in loaded.ddp:
        chunk.start_gathering()
    norm = float(grad_norm)
    if not math.isfinite(norm):
        raise NonFiniteError(
            f"step {request.step}: gradient norm of the {request.role} is {norm}; the weights of this process are "
            f"spoiled: restart from the last checkpoint with a lower learning rate"
        )
    return UpdateResult(
        metrics={f"{request.role}/grad_norm": norm, f"{request.role}/lr": request.lr, **ratios},
        before={},
        num_watched=sum(len(each.before) for each in samples) if request.watches else 0,
        num_moved=sum(int((s.weight != s.before).sum()) for s in samples) if request.watches else 0,
    )


def _differentiable(loss: torch.Tensor, role: Role) -> torch.Tensor:
    """Return a loss; raise ValueError if no gradient flows from it."""
    if not loss.requires_grad:
        raise ValueError(
            f"the loss of the {role} has no path to a trained parameter; compute it from the model's outputs, without "
            "detach() or item(), and leave some parameters to train"
        )
    return loss


def _explain(batch: RowBatch, role: Role) -> str:
    """Describe, for the error message, which row's which input (such as old log-probs) makes the loss non-finite."""
    for name, values in batch.quantities.items():
        bad = ~torch.isfinite(values).all(1)
        if bad.any():
            return f"{name} of row {batch.labels[int(bad.nonzero()[0])]} are not finite"
    cause = f"all quantities are finite; its micro-batch starts with row {batch.labels[0]}"
    return f"{cause}: lower {TRAINED_AS.get(role, role)}.optimizer.lr"
