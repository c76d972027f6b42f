"""Define the forms in which callers give a teacher, and prepare it for the head: check shapes, gather hidden states."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from megarl.parallel.head.choose import choose_teacher_kernels
from megarl.parallel.head.divergence import Divergence
from megarl.parallel.head.gradients import GradientSinks
from megarl.parallel.head.logprobs import HeadOptions, head_inputs
from megarl.parallel.head.recorded import MeasuredPolicy, RecordedHead
from megarl.parallel.head.statistics import HeadInputs, VocabShard
from megarl.parallel.head.teacher_kernels import TeacherKernels
from megarl.parallel.head.teachers import Teacher, WholeTeacher
from megarl.parallel.head.top_teacher import TopTeacher
from megarl.types.objectives import HeadMeasure


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherLogits:
    """A teacher that gives its whole distribution, by hidden states and this rank's rows of its output weight.

    Attributes:
        hidden: [N, H'] of the student's labels; with `row_counts`, this rank's part.
        weight: [≥ shard.size, H'], from the first token of the student's shard on.
        shard: what `weight` has; its start is the student's.
        temperature: a float, or one per token [N], > 0.
        logit_cap: c if the teacher's logits are c·tanh(h·Wᵀ/c).
        fp32_logits: multiply in float32.
        common: tokens below this id are the same in both vocabularies, and only these are compared, after both
            distributions are normalised over them; None: the vocabularies are the same.
        kernels: computations on chunks of both logits; None: the best for the device.
        measure: what is computed beside it in place of a divergence; both vocabularies are then the same.
        others, which: further output weights by number, and the number of each token's [N], −1 of `weight` itself;
            None: all have this one.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    shard: VocabShard
    temperature: torch.Tensor | float = 1.0
    logit_cap: float | None = None
    fp32_logits: bool = False
    common: int | None = None
    kernels: TeacherKernels | None = None
    measure: HeadMeasure | None = None
    others: Mapping[int, torch.Tensor] = field(default_factory=dict)
    which: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogits:
    """A teacher that gives its likeliest tokens: logprobs [N, K] in nats, and ids [N, K], each once, then −1.

    All other tokens are compared as one outcome. Every rank has all N rows. common: as in `TeacherLogits`; log-probs
    are normalised over these tokens.
    """

    logprobs: torch.Tensor
    ids: torch.Tensor
    common: int | None = None


def prepare_teacher(
    given: TeacherLogits | TopLogits | RecordedHead,
    x: HeadInputs,
    sinks: GradientSinks,
    labels: torch.Tensor,
    divergence: Divergence,
    beta: float,
) -> Teacher:
    """Check a teacher against the student's inputs, and gather its hidden states where ranks have parts of them."""
    count, shard = len(labels), x.shard
    if isinstance(given, TopLogits | RecordedHead):
        if given.ids.shape != given.logprobs.shape or given.ids.ndim != 2 or len(given.ids) != count:
            shapes = f"{tuple(given.logprobs.shape)} and ids {tuple(given.ids.shape)}"
            raise ValueError(f"the teacher's log-probs have shape {shapes}, expected ({count}, K) like the labels")
        if isinstance(given, RecordedHead):
            return given
        return TopTeacher(
            logprobs=given.logprobs,
            ids=given.ids,
            divergence=divergence,
            beta=beta,
            columns=shard.first(given.common).size,
            cut=given.common is not None,
        )
    if given.shard.start != shard.start:
        raise ValueError(
            f"the teacher's rows of the output weight start at token {given.shard.start}, the student's at "
            f"{shard.start}; call resplit_weight for the teacher's"
        )
    states = sinks.owners.gather(given.hidden.detach())
    if len(states) != count:
        raise ValueError(f"the teacher has {len(states)} hidden states, expected {count} like the labels")
    options = HeadOptions(
        temperature=given.temperature,
        chunk_tokens=x.chunk_tokens,
        kernels=x.kernels,
        fp32_logits=given.fp32_logits,
        logit_cap=given.logit_cap,
    )
    columns = _compared_columns(given, shard)
    inputs = head_inputs(states, given.weight, labels, shard=given.shard, options=options)
    if given.which is not None:
        others = {number: weight[: given.shard.size].to(inputs.weight.dtype) for number, weight in given.others.items()}
        weights, (numbers, counts) = {-1: inputs.weight, **others}, given.which.unique_consecutive(return_counts=True)
        runs = [(weights[number], count) for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)]
        inputs = replace(inputs, runs=runs)
    if given.measure is not None:
        if columns != given.shard.size or x.nucleus is not None:
            raise ValueError("a policy is measured against another's whole distribution, not against a part of it")
        return MeasuredPolicy(inputs=inputs, measure=given.measure)
    return WholeTeacher(
        inputs=inputs,
        kernels=given.kernels or choose_teacher_kernels(states.device),
        divergence=divergence,
        beta=beta,
        columns=columns,
        cut=given.common is not None,
    )


def _compared_columns(given: TeacherLogits, shard: VocabShard) -> int:
    """Return how many of this rank's first columns are compared; ValueError if the teacher lacks some."""
    columns = min(shard.size, given.shard.size)
    if given.common is None and shard.size != given.shard.size:
        raise ValueError(
            f"this rank has {shard.size} tokens of the student's vocabulary and {given.shard.size} of the teacher's; "
            f"tell how many both have in common"
        )
    if given.common is not None:
        columns = shard.first(given.common).size
        if columns > given.shard.size:
            raise ValueError(
                f"{given.common} tokens are in common, but this rank's {given.shard.size} of the teacher's from "
                f"{shard.start} on end before"
            )
    return columns
