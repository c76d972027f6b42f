"""The log-prob head in each of its regimes, on one rank and in a pool's ranks, with the collectives that it takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.config.schema import ActorConfig, HeadConfig, LayoutConfig, ModelConfig
from megarl.types import Row
from megarl.types.messages import ForwardRequest, ForwardResult, Role, UpdateRequest, UpdateResult
from tests.helpers.head import HeadProblem, HeadResult, dense_head
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout, load_worker

if TYPE_CHECKING:
    from megarl.parallel.head.statistics import VocabShard

REGIMES = ("recompute", "keep", "in_chunk")
# A process group as far as the head reads it when there is one rank.
ONE_RANK: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


def token_loss(problem: HeadProblem, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Σ g_l·sin(log p) + g_H·sin(H), a sum over tokens: its gradients are bounded, and depend on the values."""
    loss = (problem.grad_logprobs * logprobs.sin()).sum()
    return loss if problem.grad_entropy is None else loss + (problem.grad_entropy * entropy.sin()).sum()


def token_gradients(
    problem: HeadProblem,
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]:
    """The gradients of `token_loss`, by hand."""

    def gradients(logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        by_entropy = None if problem.grad_entropy is None else problem.grad_entropy * entropy.cos()
        return problem.grad_logprobs * logprobs.cos(), by_entropy

    return gradients


def dense_token_loss(problem: HeadProblem) -> HeadResult:
    """Values, and gradients of `token_loss`, from dense float64 logits."""
    # `dense_head` makes leaves of the tensors it is given, which are inputs of the head too.
    problem = replace(problem, hidden=problem.hidden.detach().clone(), weight=problem.weight.detach().clone())
    values = dense_head(problem)
    by_logprobs, by_entropy = token_gradients(problem)(values.logprobs, values.entropy)
    return dense_head(replace(problem, grad_logprobs=by_logprobs, grad_entropy=by_entropy))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCase:
    """A problem, and how it is spread over ranks: rows of the padded weight, and rows of the hidden states if a rank
    has not all of them."""

    problem: HeadProblem
    rows_per_rank: int
    memory_mode: str = "recompute"
    chunk_tokens: int | None = 3
    row_counts: tuple[int, ...] | None = None

    def own_hidden(self, rank: int) -> torch.Tensor:
        return self.problem.hidden if self.row_counts is None else self.problem.hidden.split(self.row_counts)[rank]

    def forward(self, hidden: torch.Tensor, weight: torch.Tensor, shard: "VocabShard", **options: Any) -> Any:
        """The head on a rank's rows; `options` go to it."""
        # Imported late: a rank prepares its platform first.
        from megarl.parallel.head.logprobs import HeadOptions, vocab_parallel_logprobs
        from megarl.parallel.head.memory_mode import HeadMemoryMode

        memory_mode = HeadMemoryMode(self.memory_mode)
        return vocab_parallel_logprobs(
            hidden,
            weight,
            self.problem.labels,
            shard=shard,
            options=HeadOptions(
                temperature=self.problem.temperature,
                memory_mode=memory_mode,
                chunk_tokens=self.chunk_tokens,
                entropy_needs_grad=self.problem.grad_entropy is not None,
                row_counts=self.row_counts,
                logit_cap=self.problem.logit_cap,
                loss_gradients=token_gradients(self.problem) if memory_mode is HeadMemoryMode.IN_CHUNK else None,
                **options,
            ),
            nucleus=self.problem.nucleus,
        )

    def differentiate(self, weight: torch.Tensor, shard: "VocabShard") -> HeadResult:
        """Values, and gradients of `token_loss` for this rank's rows of hidden states and weight, which stay as they
        are."""
        given = self.own_hidden(shard.group.rank())
        hidden, weight = given.clone().requires_grad_(), weight.clone().requires_grad_()
        out = self.forward(hidden, weight, shard)
        loss = token_loss(self.problem, out.logprobs, out.entropy)
        grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
        assert torch.equal(hidden, given)
        return HeadResult(
            logprobs=out.logprobs.detach(),
            entropy=out.entropy.detach(),
            grad_hidden=grad_hidden,
            grad_weight=grad_weight,
        )


def one_rank_arguments(problem: HeadProblem, padded_rows: int, **options: Any) -> dict[str, Any]:
    """What the head is told beside hidden states and weight, in chunks of three rows; `options` are further ones."""
    from megarl.parallel.head.logprobs import HeadOptions
    from megarl.parallel.head.statistics import vocab_shard

    return {
        "labels": problem.labels,
        "shard": vocab_shard(ONE_RANK, padded_rows, problem.vocab_size),
        "options": HeadOptions(temperature=problem.temperature, chunk_tokens=3, **options),
    }


def _rank_shard(context: RankContext, case: HeadCase, group: Any) -> tuple[torch.Tensor, "VocabShard"]:
    """This rank's rows of the padded weight."""
    from megarl.parallel.head.statistics import vocab_shard

    weight = case.problem.padded_weight(case.rows_per_rank * context.world_size).chunk(context.world_size)[context.rank]
    return weight, vocab_shard(group, case.rows_per_rank, case.problem.vocab_size)


def heads(context: RankContext, cases: Sequence[HeadCase]) -> list[HeadResult]:
    """Each case in turn, the vocabulary spread over all ranks."""
    group = join_layout(context, LayoutConfig(tp=context.world_size)).layout.tp_group
    return [case.differentiate(*_rank_shard(context, case, group)) for case in cases]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """An operation of a process group, and the elements and bytes that this rank hands to it."""

    name: str
    num_elements: int
    num_bytes: int


class Collectives(TorchDispatchMode):
    """Notes every operation of process groups, whatever function of torch.distributed it comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            # Of input and output the input is the smaller, or they are one.
            handed = min(tensors, key=torch.Tensor.numel)
            name = func.overloadpacket.__name__
            self.seen.append(
                Collective(name=name, num_elements=handed.numel(), num_bytes=handed.numel() * handed.element_size())
            )
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCollectives:
    """The collectives of one rank: without a graph, of a forward and its backward, and with top-k log-probs."""

    without_graph: list[Collective]
    forward: list[Collective]
    backward: list[Collective]
    top: list[Collective]


def head_collectives(context: RankContext, case: HeadCase, top_k: int) -> HeadCollectives:
    """What `case` exchanges in each of its passes."""
    group = join_layout(context, LayoutConfig(tp=context.world_size)).layout.tp_group
    from megarl.parallel.head.logprobs import HeadOptions, vocab_parallel_top_logprobs

    weight, shard = _rank_shard(context, case, group)
    hidden = case.own_hidden(context.rank).clone().requires_grad_()
    weight.requires_grad_()
    with Collectives() as without_graph, torch.no_grad():
        case.forward(hidden, weight, shard)
    with Collectives() as forward:
        out = case.forward(hidden, weight, shard)
    loss = token_loss(case.problem, out.logprobs, out.entropy)
    with Collectives() as backward:
        loss.backward()
    problem = case.problem
    with Collectives() as top:
        options = HeadOptions(chunk_tokens=case.chunk_tokens)
        vocab_parallel_top_logprobs(problem.hidden, weight, problem.labels, shard=shard, top_k=top_k, options=options)
    return HeadCollectives(without_graph=without_graph.seen, forward=forward.seen, backward=backward.seen, top=top.seen)


def dense_squares(problem: HeadProblem) -> torch.Tensor:
    """Σ p² of each row, over its nucleus if it has one, from dense float64 logits."""
    logits = problem.hidden.double() @ problem.weight.double().t() / problem.temperature.double()[:, None]
    if problem.nucleus is not None:
        for row, ids in zip(logits, problem.nucleus, strict=True):
            if (inside := ids[ids >= 0].long()).numel():
                row[torch.ones_like(row, dtype=torch.bool).index_fill(0, inside, False)] = -torch.inf
    return logits.softmax(-1).square().sum(-1)


def squares_result(case: HeadCase, weight: torch.Tensor, shard: "VocabShard") -> tuple[torch.Tensor, torch.Tensor]:
    """The head's log-probs of a problem's labels, and its sums of squared probabilities."""
    from megarl.parallel.head.logprobs import HeadOptions, head_inputs
    from megarl.parallel.head.statistics import row_statistics

    problem = case.problem
    options = HeadOptions(temperature=problem.temperature, chunk_tokens=case.chunk_tokens)
    x = head_inputs(problem.hidden, weight, problem.labels, shard=shard, options=options, nucleus=problem.nucleus)
    found = row_statistics(x, squares=True)
    assert found.squares is not None
    return found.logprobs, found.squares


def squares(context: RankContext, case: HeadCase) -> tuple[torch.Tensor, torch.Tensor]:
    """`squares_result` with the vocabulary spread over all ranks."""
    group = join_layout(context, LayoutConfig(tp=context.world_size)).layout.tp_group
    return squares_result(case, *_rank_shard(context, case, group))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopResult:
    """Log-probs of the labels [N], and log-probs and ids [N, k] of the likeliest tokens."""

    label_logprobs: torch.Tensor
    logprobs: torch.Tensor
    ids: torch.Tensor


def top_result(case: HeadCase, weight: torch.Tensor, shard: "VocabShard", top_k: int) -> TopResult:
    """The head's top-k of a problem."""
    from megarl.parallel.head.logprobs import HeadOptions, vocab_parallel_top_logprobs

    problem = case.problem
    values, top = vocab_parallel_top_logprobs(
        problem.hidden,
        weight,
        problem.labels,
        shard=shard,
        top_k=top_k,
        options=HeadOptions(temperature=problem.temperature, chunk_tokens=case.chunk_tokens),
    )
    return TopResult(label_logprobs=values.logprobs, logprobs=top.logprobs, ids=top.ids)


def top_logprobs(context: RankContext, case: HeadCase, top_ks: Sequence[int]) -> list[TopResult]:
    """`top_result` for each k, the vocabulary spread over all ranks."""
    group = join_layout(context, LayoutConfig(tp=context.world_size)).layout.tp_group
    weight, shard = _rank_shard(context, case, group)
    return [top_result(case, weight, shard, top_k) for top_k in top_ks]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadUpdate:
    """One update under one setting of the head, on the rank that reports: its result, the log-probs after it, and on
    ranks with a head the regimes of its micro-batches."""

    result: UpdateResult | None
    after: ForwardResult | None
    regimes: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadUpdates:
    """What `head_updates` runs. micro_batches: by data-parallel rank."""

    actor: ActorConfig
    model: ModelConfig
    rows: Sequence[Row]
    micro_batches: Sequence[Sequence[Sequence[int]]]
    request: UpdateRequest
    settings: Sequence[HeadConfig]


def head_updates(context: RankContext, case: HeadUpdates) -> list[HeadUpdate]:
    """The same update of the same weights under each setting."""
    return [_head_update(context, case, settings) for settings in case.settings]


def _head_update(context: RankContext, case: HeadUpdates, settings: HeadConfig) -> HeadUpdate:
    worker = load_worker(context, replace(case.actor, head=settings), case.model)
    from megarl.parallel.head import policy

    mine = case.micro_batches[worker.layout.dp_group.rank()]
    with patch.object(policy, "vocab_parallel_logprobs", wraps=policy.vocab_parallel_logprobs) as head:
        result = worker.update(case.rows, mine, case.request)
    temperature = case.request.temperature
    after = worker.forward(case.rows, mine, ForwardRequest(role=Role.ACTOR, temperature=temperature, step=0))
    return HeadUpdate(
        result=result, after=after, regimes=[str(call.kwargs["options"].memory_mode) for call in head.call_args_list]
    )
