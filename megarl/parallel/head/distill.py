"""Compute log-probs, entropies and the divergence from a teacher in one pass over chunks of sharded logits.

The memory modes are those of the log-prob head. The teacher's logits take one more chunk of memory, and one product of
its hidden states with its output weight for each time that they are needed (recompute and keep: twice, in_chunk: once).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import repeat
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.parallel.head.differentiable import LossGradients, overwrite_by_gradient, require_same_gradient
from megarl.parallel.head.divergence import Divergence
from megarl.parallel.head.given_teachers import TeacherLogits, TopLogits, prepare_teacher
from megarl.parallel.head.gradients import GradientSinks, HiddenGradient, WeightGradient
from megarl.parallel.head.logprobs import HeadOptions, prepare_head
from megarl.parallel.head.memory_mode import HeadMemoryMode
from megarl.parallel.head.recorded import RecordedHead
from megarl.parallel.head.statistics import HeadInputs, RowStatistics, VocabShard, gather_parts
from megarl.parallel.head.teachers import LogitsChunk, Teacher, TeacherComparison, holding

_NUM_VALUES = len(TeacherComparison._fields)
_DEFAULTS = HeadOptions()
_Values = TypeVar("_Values", torch.Tensor | float, torch.Tensor | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilledLogprobs:
    """Log-probs and entropies [N] as in `TokenLogprobs`, and values beside the teacher, [N] float32 in nats.

    Only the first three have gradients. teacher_logprobs: of the labels; 0 where the teacher does not tell. agreement:
    1 where both find the same token likeliest, else 0. student_mass, teacher_mass: the probability of the tokens that
    are compared one by one.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    divergence: torch.Tensor
    teacher_logprobs: torch.Tensor
    reverse_kl: torch.Tensor
    forward_kl: torch.Tensor
    teacher_entropy: torch.Tensor
    agreement: torch.Tensor
    student_mass: torch.Tensor
    teacher_mass: torch.Tensor


def vocab_parallel_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    shard: VocabShard,
    teacher: TeacherLogits | TopLogits | RecordedHead,
    divergence: Divergence = Divergence.REVERSE,
    beta: float = 0.5,
    options: HeadOptions = _DEFAULTS,
    nucleus: torch.Tensor | None = None,
) -> DistilledLogprobs:
    """Compute what `vocab_parallel_logprobs` does, and the divergence from a teacher over the whole vocabulary.

    Args:
        beta: the teacher's weight in the mixture of JSD, between 0 and 1; other divergences do not read it.
        options: under in_chunk, `loss_gradients` is given the divergences too, and returns their gradients as well.
        nucleus: log-probs are normalised over it; entropies and divergences are not.

    Raises:
        ValueError: shapes or shards do not agree, β is None, or an option that the memory mode requires is missing.
    """
    if divergence is Divergence.JSD and not 0 < beta < 1:
        raise ValueError(f"beta is {beta}, expected a number between 0 and 1; the ends are forward and reverse KL")
    whole = back = None
    if isinstance(teacher, TeacherLogits) and (order := order_of_versions(teacher, shard.group, options.row_counts)):
        whole, own, counts = order
        back = whole.argsort()
        hidden, labels, nucleus = hidden[own], labels[whole], _at(nucleus, whole)
        temperature, which = _at(teacher.temperature, whole), _at(teacher.which, whole)
        teacher = replace(teacher, hidden=teacher.hidden[own], which=which, temperature=temperature)
        gradients, temperature = _in_order(options.loss_gradients, whole, back), _at(options.temperature, whole)
        options = replace(options, temperature=temperature, row_counts=counts, loss_gradients=gradients)
    x, sinks, hidden, weight = prepare_head(hidden, weight, labels, shard=shard, options=options, nucleus=nucleus)
    compared = prepare_teacher(teacher, x, sinks, labels, divergence, beta)
    if not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)):
        found = TeacherComparison(*compare_rows(x, compared))
    else:
        *differentiable, table = DistilledGradients.apply(hidden, weight, x, compared, sinks, options, whole)
        found = TeacherComparison(*differentiable, *table[len(differentiable) :])
    values = {each.name: getattr(found, each.name) for each in fields(DistilledLogprobs)}
    return DistilledLogprobs(**{name: each if back is None else each[back] for name, each in values.items()})


def order_of_versions(
    teacher: TeacherLogits, group: dist.ProcessGroup, row_counts: Sequence[int] | None
) -> tuple[torch.Tensor, torch.Tensor, Sequence[int] | None] | None:
    """Return the order of tokens by version in which few chunks are multiplied by several weights, the same on all
    ranks; None if each version is in one place.

    It has the places of all tokens, those of this rank's hidden states among these, and the new `row_counts`.
    """
    which = teacher.which
    if which is None or len(which.unique_consecutive()) == len(numbers := which.unique()):
        return None
    whole = which.argsort(stable=True)
    if row_counts is None:
        return whole, whole, None
    parts = which.split(list(row_counts))
    counts = torch.stack([(part == number).sum() for number in numbers for part in parts])
    return whole, parts[group.rank()].argsort(stable=True), counts.tolist()


def _at(values: _Values, places: torch.Tensor) -> _Values:
    """Return values of tokens at these places; one that all tokens have stays."""
    return values[places] if isinstance(values, torch.Tensor) and values.ndim else values


def _in_order(given: LossGradients | None, whole: torch.Tensor, back: torch.Tensor) -> LossGradients | None:
    return given and (lambda *values: tuple(_at(each, whole) for each in given(*(value[back] for value in values))))


def logits_of(teacher: Teacher, x: HeadInputs) -> Callable[[slice], torch.Tensor]:
    """Return how the teacher's logits of a chunk are computed, each over those before; empty if it has none."""
    if teacher.inputs is None:
        return lambda rows: x.hidden.new_empty(0)
    buffer = teacher.inputs.buffer(min(x.chunk_tokens, len(x.hidden)))
    return functools.partial(teacher.inputs.write_logits, out=buffer)


def compare_rows(
    x: HeadInputs,
    teacher: Teacher,
    *,
    kept: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    on_chunk: Callable[[LogitsChunk, TeacherComparison], None] | None = None,
) -> torch.Tensor:
    """Return the values of `TeacherComparison` of all tokens, [values, N], computed chunk by chunk.

    kept: [N, shard.size] receives the student's raw logits. table: receives the values. on_chunk: called while the
    logits of a chunk exist; ranks then exchange statistics once per chunk instead of once.
    """
    count, dtype, device = len(x.hidden), x.statistics_dtype, x.hidden.device
    num_statistics = x.num_statistics + teacher.num_statistics
    by_chunk = on_chunk is not None or teacher.reads_logits_twice
    values = torch.zeros(_NUM_VALUES, count, dtype=dtype, device=device) if table is None else table
    parts = torch.empty(num_statistics, 0 if by_chunk else count, dtype=dtype, device=device)
    buffer, others = x.buffer(min(x.chunk_tokens, count)) if kept is None else kept, logits_of(teacher, x)
    for rows in x.chunks():
        logits = x.write_logits(rows, buffer if kept is None else kept[rows])
        chunk = LogitsChunk(x, rows, logits, others(rows))
        if not by_chunk:
            teacher.write_statistics(chunk, parts[:, rows])
            continue
        part = parts.new_empty(num_statistics, len(logits))
        teacher.write_statistics(chunk, part)
        found = teacher.compare(chunk, gather_parts(part, x.shard.group))
        values[:, rows] = torch.stack(found)
        if on_chunk is not None:
            on_chunk(chunk, found)
    if not by_chunk:
        whole = LogitsChunk(x, slice(0, count), *[x.hidden.new_empty(0)] * 2)
        torch.stack(teacher.compare(whole, gather_parts(parts, x.shard.group)), out=values)
    return values


class DistilledGradients(torch.autograd.Function):
    """The autograd function (hidden states, weight) → (log p, H, divergence, all values) of the three memory modes."""

    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        weight: torch.Tensor,
        x: HeadInputs,
        teacher: Teacher,
        sinks: GradientSinks,
        options: HeadOptions,
        order: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.gradients, ctx.kept, ctx.spent = None, None, False
        entropy_needs_grad = options.entropy_needs_grad
        used: list[torch.Tensor] = []
        if options.loss_gradients is None:
            ctx.kept = x.buffer(len(x.hidden)) if options.memory_mode is HeadMemoryMode.KEEP else None
            table = compare_rows(x, teacher, kept=ctx.kept)
        else:
            wanted = ctx.needs_input_grad[1]
            table, *used, entropy_needs_grad, ctx.gradients = _in_chunk(
                x, teacher, sinks, options.loss_gradients, weight, wanted=wanted
            )
        ctx.in_chunk, ctx.order = options.loss_gradients is not None, order
        large = used or [*x.large, *(() if teacher.inputs is None else teacher.inputs.large)]
        ctx.save_for_backward(table, weight, *large)
        nothing = repeat(weight.new_empty(0))
        ctx.context = x.holding(nothing), holding(teacher, nothing), sinks
        values = [table[i].clone() for i in range(3)]
        ctx.mark_non_differentiable(*([] if entropy_needs_grad else [values[1]]), table)
        ctx.set_materialize_grads(False)
        return *values, table

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if ctx.spent:
            raise RuntimeError("log-prob head with a teacher: a second backward, but gradients are made once")
        x, teacher, sinks = ctx.context
        table, weight, *saved = ctx.saved_tensors
        if ctx.in_chunk:
            ctx.spent = True
            for name, used, actual in zip(("log-probs", "entropy", "divergence"), saved, grads, strict=False):
                require_same_gradient(name, used, actual, ctx.order)
            # Drop our references, or autograd would copy the gradients.
            (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
            return grad_hidden, grad_weight, *[None] * 5
        large = iter(saved)
        x, teacher = x.holding(large), holding(teacher, large)
        ctx.spent = sinks.overwrite_hidden
        # The gradient overwrites the kept logits, so a second backward has to recompute them.
        kept, ctx.kept = ctx.kept, None
        buffer = x.buffer(min(x.chunk_tokens, len(x.hidden))) if kept is None else None
        others = logits_of(teacher, x)
        sums = HiddenGradient(x.hidden, sinks), WeightGradient(weight, sinks.main_grad, wanted=ctx.needs_input_grad[1])
        given = [torch.zeros_like(table[0]) if grad is None else grad for grad in grads[:3]]
        for rows in x.chunks():
            logits = kept[rows] if buffer is None else x.write_logits(rows, buffer)
            by_entropy = None if grads[1] is None else given[1][rows]
            there = TeacherComparison(*table[:, rows])
            weights = given[0][rows], by_entropy, given[2][rows]
            _overwrite(LogitsChunk(x, rows, logits, others(rows)), teacher, there, *weights)
            sums[1].add(logits, x.hidden[rows])
            sums[0].add(rows, logits, x.weight)
        return sums[0].finish(), sums[1].finish(), *[None] * 5


def _in_chunk(
    x: HeadInputs,
    teacher: Teacher,
    sinks: GradientSinks,
    loss_gradients: LossGradients,
    weight: torch.Tensor,
    *,
    wanted: bool,
) -> tuple[Any, ...]:
    """Return values, the loss's gradients with respect to them, whether it needs entropies, and the input gradients."""
    table = torch.zeros(_NUM_VALUES, len(x.hidden), dtype=x.statistics_dtype, device=x.hidden.device)
    used = torch.zeros_like(table[:3])
    grad_hidden, grad_weight = HiddenGradient(x.hidden, sinks), WeightGradient(weight, sinks.main_grad, wanted=wanted)
    depends_on_entropy = False

    def on_chunk(chunk: LogitsChunk, found: TeacherComparison) -> None:
        nonlocal depends_on_entropy
        rows, logits = chunk.rows, chunk.logits
        by_logprobs, by_entropy, by_divergence, *_ = loss_gradients(*table[:4])
        assert by_logprobs is not None
        used[0, rows] = by_logprobs[rows]
        # A loss may read the divergence without differentiating it.
        used[2, rows] = 0.0 if by_divergence is None else by_divergence[rows]
        if by_entropy is not None:
            depends_on_entropy, used[1, rows] = True, by_entropy[rows]
        weights = used[0, rows], used[1, rows] if by_entropy is not None else None, used[2, rows]
        _overwrite(chunk, teacher, found, *weights)
        grad_weight.add(logits, x.hidden[rows])
        grad_hidden.add(rows, logits, x.weight)

    compare_rows(x, teacher, table=table, on_chunk=on_chunk)
    return table, *used, depends_on_entropy, (grad_hidden.finish(), grad_weight.finish())


def _overwrite(
    chunk: LogitsChunk,
    teacher: Teacher,
    found: TeacherComparison,
    by_logprobs: torch.Tensor,
    by_entropy: torch.Tensor | None,
    by_divergence: torch.Tensor,
) -> None:
    """Overwrite a chunk's raw logits by the loss's gradient."""
    statistics = RowStatistics(
        logprobs=found.logprobs, entropy=found.entropy, lse=found.lse, nucleus_lse=found.nucleus_lse
    )
    write = functools.partial(teacher.write_gradient, chunk, found, by_divergence)
    overwrite_by_gradient(chunk.x, chunk.rows, chunk.logits, statistics, by_logprobs, by_entropy, write)
