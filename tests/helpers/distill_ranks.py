"""What the tests of distillation run on every rank: a teacher's pass over rows, and the actor's gradients with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megarl.types import FloatArray, LikelyTokens, Row
from megarl.types.messages import ForwardRequest, LoadRequest, Role, RoleSpec, UpdateRequest
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout

TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillCase:
    """Roles of one layout, the actor first; rows by data-parallel rank and micro-batch; updates that are asked for.

    with_slices: whether gradients are wanted, which only a model without adapters has.
    """

    roles: tuple[RoleSpec, ...]
    rows: Sequence[Row]
    micro_batches: Sequence[Sequence[Sequence[int]]]
    requests: Sequence[UpdateRequest] = ()
    with_slices: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Of an update without its step: (tensor, index, values) of each slice of this rank, and its metrics."""

    slices: list[tuple[str, Any, torch.Tensor]]
    metrics: dict[str, float]


def teacher_logprobs(context: RankContext, case: DistillCase) -> dict[int, FloatArray]:
    """The teacher's log-probs of this replica's rows, on the rank that reports; empty on others."""
    worker = join_layout(context, case.roles[0].layout)
    worker.load(LoadRequest(roles=case.roles, seed=0))
    mine = case.micro_batches[worker.layout.dp_group.rank()]
    found = worker.forward(case.rows, mine, ForwardRequest(role=Role.TEACHER, temperature=TEMPERATURE, step=0))
    return dict(found.quantities["logprobs"]) if found else {}


def likely_tokens(context: RankContext, case: DistillCase, top_k: int) -> dict[int, LikelyTokens]:
    """The teacher's likeliest tokens of this replica's rows, on the rank that reports; empty on others."""
    worker = join_layout(context, case.roles[0].layout)
    worker.load(LoadRequest(roles=case.roles, seed=0))
    mine = case.micro_batches[worker.layout.dp_group.rank()]
    request = ForwardRequest(role=Role.TEACHER, temperature=TEMPERATURE, step=0, top_k=top_k)
    found = worker.forward(case.rows, mine, request)
    if found is None:
        return {}
    ids, logprobs = found.quantities["top_ids"], found.quantities["top_logprobs"]
    return {i: LikelyTokens(ids=ids[i].astype(np.int32), logprobs=logprobs[i]) for i in ids}


def update_gradients(context: RankContext, case: DistillCase) -> list[Gradients]:
    """The gradients of each request, all by the same weights."""
    from megarl.parallel.building import named_shards, rank_slices
    from megarl.parallel.updates import accumulate_gradients

    worker = join_layout(context, case.roles[0].layout)
    worker.load(LoadRequest(roles=case.roles, seed=0))
    loaded = worker.roles[Role.ACTOR]
    mine = case.micro_batches[worker.layout.dp_group.rank()]
    found = []
    for request in case.requests:
        role = None if request.teaching is None else request.teaching.role
        teacher = None if role is None else worker.roles[role]
        group = worker.layout.dp_group
        worker.discard(Role.ACTOR)
        result = accumulate_gradients(loaded, case.rows, mine, request, dp_group=group, teacher=teacher)
        shards = [named for chunk in loaded.chunks for named in named_shards(chunk) if case.with_slices]
        slices = rank_slices([(name, p.main_grad) for name, _, p in shards], loaded.model_spec, worker.layout)
        found.append(
            Gradients(slices=[(s.tensor, s.index, s.view.clone()) for s in slices], metrics=dict(result.metrics))
        )
    return found


def assembled(by_rank: Sequence[Gradients], shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The whole tensors of all ranks' slices."""
    full = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for name, index, values in (each for rank in by_rank for each in rank.slices):
        full[name][index] = values.reshape(full[name][index].shape)
    assert not any(tensor.isnan().any() for tensor in full.values())
    return full
