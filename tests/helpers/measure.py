"""All that one rank can say of a checkpoint: log-probs, dense logits, its weights written again, gradients."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.algos.objectives import SftAlgorithm
from megarl.config.schema import ActorConfig, ModelConfig
from megarl.parallel.worker import RankWorker
from megarl.types import FloatArray, Row
from megarl.types.messages import ForwardRequest, LoadRequest, Role, RoleSpec, StoreResult, UpdateRequest, Vision
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureCase:
    """A model under a layout, rows by micro-batch and data-parallel rank, and the files to write."""

    model: ModelConfig
    actor: ActorConfig
    rows: Sequence[Row]
    micro_batches: Sequence[Sequence[Sequence[int]]]
    weight_files: Sequence[str]
    gradient_files: Sequence[str]
    vision: Vision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a rank reports. logprobs: row → [R]; logits: row → [row tokens, V]; both empty off the last stage.

    num_reductions: how often an update summed something over the ranks that share rows.
    """

    logprobs: Mapping[int, FloatArray]
    logits: Mapping[int, FloatArray]
    weights: StoreResult
    gradients: StoreResult
    metrics: Mapping[str, float]
    num_reductions: int

    @property
    def grad_norm(self) -> float | None:
        return self.metrics.get("actor/grad_norm")


def measure(context: RankContext, case: MeasureCase) -> Measured:
    """Load, run a forward pass, take one backward pass of the mean negative log-likelihood, and write weights and
    gradients.
    """
    worker = join_layout(context, case.actor.layout)
    role = RoleSpec(role=Role.ACTOR, model=case.model, settings=case.actor, vision=case.vision)
    worker.load(LoadRequest(roles=(role,), seed=0))
    mine = case.micro_batches[worker.layout.dp_group.rank()]
    outputs = worker.forward(case.rows, mine, ForwardRequest(role=Role.ACTOR, temperature=1.0, step=0))
    is_whole = case.actor.layout.cp == 1 and not any(row.forks for row in case.rows)
    logits = dense_logits(worker, case.rows, mine) if is_whole else {}
    weights = worker.store_weights(case.weight_files, with_checksums=False)

    algorithm = SftAlgorithm()
    request = UpdateRequest(
        step=0,
        objective=algorithm,
        state=algorithm.initial_state(),
        denominators=algorithm.denominators(case.rows),
        temperature=1.0,
        lr=0.0,
    )
    with counted_reductions() as reductions:
        result = worker.update(case.rows, mine, request)
    # Written as if they were the weights, gradients get their Hugging Face names.
    for parameter in itertools.chain.from_iterable(c.parameters() for c in worker.roles[Role.ACTOR].chunks):
        if parameter.requires_grad:
            parameter.data.copy_(parameter.main_grad)
    return Measured(
        logprobs=outputs.quantities["logprobs"] if outputs else {},
        logits=logits if outputs else {},
        weights=weights,
        gradients=worker.store_weights(case.gradient_files, with_checksums=False),
        metrics=result.metrics if result else {},
        num_reductions=len(reductions),
    )


@contextlib.contextmanager
def counted_reductions() -> Iterator[list[object]]:
    """A list to which every sum over the ranks that share rows is added."""
    seen, reduce = list[object](), dist.all_reduce

    def noted(tensor: torch.Tensor, *arguments: Any, group: Any = None, **named: Any) -> Any:
        from megatron.core import parallel_state

        if group is parallel_state.get_tensor_and_context_parallel_group():
            seen.append(tensor)
        return reduce(tensor, *arguments, group=group, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", noted)
        yield seen


@torch.no_grad()
def dense_logits(
    worker: RankWorker, rows: Sequence[Row], micro_batches: Sequence[Sequence[int]]
) -> dict[int, FloatArray]:
    """Logits of every token of rows without forks, through the pipeline, gathered over the vocabulary."""
    from megarl.parallel.packing import PackAlignment, _arrange
    from megarl.parallel.passes import run_schedule

    collected: dict[int, FloatArray] = {}

    def collect(model: Any, pack: Any, indices: Sequence[int], logits: Any) -> None:
        placed = _arrange([rows[i] for i in indices], PackAlignment(), pack.shares_prefixes)
        # A filler sequence may end the pack.
        for k, tokens in zip(placed.order, placed.sequences, strict=False):
            assert pack.input_ids[0, tokens].tolist() == rows[indices[k]].token_ids.tolist()
            collected[indices[k]] = logits[tokens].float().cpu().numpy()

    loaded = worker.roles[Role.ACTOR]
    chunks = [_LogitsModel(chunk) for chunk in loaded.chunks]
    run_schedule(chunks, rows, micro_batches, loaded.head_request(temperature=1.0), collect, forward_only=True)
    return collected


class _LogitsModel(torch.nn.Module):
    """A policy that answers dense logits [T, V] of the true vocabulary instead of log-probs."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.module = policy

    def forward(self, pack: Any, request: Any, loss_gradients: None = None, teacher: None = None) -> torch.Tensor:
        policy = self.module
        hidden: torch.Tensor = policy.hidden_states(pack)
        if not policy.post_process:
            return hidden
        group = policy.layout.tp_group
        if policy.config.sequence_parallel:
            hidden = torch.cat(_all_gather(hidden, group))
        logits = hidden[:, 0] @ policy.output_weight.t() / policy.spec.multipliers.logits_divisor
        if (cap := policy.spec.logit_cap) is not None:
            logits = cap * (logits / cap).tanh()
        shards = _all_gather(logits, group)
        return torch.cat(shards, dim=1)[:, : policy.spec.dims.vocab]


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
