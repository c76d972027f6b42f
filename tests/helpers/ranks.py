"""What the multi-rank tests run on every rank of a pool: the real worker and model."""

import gc
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.errors import NonFiniteError
from megarl.parallel.worker import RankWorker
from megarl.types import Row
from megarl.types.messages import (
    ForwardRequest,
    ForwardResult,
    LoadRequest,
    Role,
    RoleSpec,
    StoreResult,
    UpdateRequest,
    UpdateResult,
)
from tests.helpers.rank_pool import RankContext

# A rank that waits for a dead one gives up well before the pool does.
COLLECTIVE_TIMEOUT_S = 30.0
# Each rendezvous of the ranks needs a file of its own; all ranks count alike.
_rendezvous_settings = itertools.count()


def join_layout(context: RankContext, config: LayoutConfig) -> RankWorker:
    """A worker in this layout, instead of the one that the process was in."""
    worker = RankWorker(context.rank)
    worker.prepare()
    # A model that lingers in a reference cycle keeps its groups, and they their threads.
    gc.collect()
    worker.close()
    worker.join(config, f"file://{context.directory}/rendezvous-{next(_rendezvous_settings)}", COLLECTIVE_TIMEOUT_S)
    return worker


def load_worker(
    context: RankContext, actor: ActorConfig, model: ModelConfig, *, with_reference: bool = False
) -> RankWorker:
    """A worker with its models loaded."""
    worker = join_layout(context, actor.layout)
    roles = [RoleSpec(role=Role.ACTOR, model=model, settings=actor)]
    if with_reference:
        roles.append(RoleSpec(role=Role.REFERENCE, model=model, settings=actor, trainable=False))
    worker.load(LoadRequest(roles=tuple(roles), seed=0))
    return worker


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLogits:
    """A pack's tokens [T], the bounds of its sequences, and logits [T, V] of the true vocabulary."""

    input_ids: torch.Tensor
    cu_seqlens: list[int]
    logits: torch.Tensor


def pack_logits(
    context: RankContext, layout: LayoutConfig, model: ModelConfig, rows: Sequence[Row]
) -> PackLogits | None:
    """Dense logits of a pack, gathered over the vocabulary; on tensor-parallel rank 0."""
    worker = load_worker(context, ActorConfig(layout=layout), model)
    from megarl.parallel.packing import PackAlignment, pack_rows

    policy, group = worker.roles[Role.ACTOR].chunks[0], worker.layout.tp_group
    alignment = PackAlignment(tp=layout.tp if layout.sequence_parallel else 1)
    pack = pack_rows(rows, alignment=alignment, device=torch.device("cpu"), plans_attention=True)
    with torch.no_grad():
        hidden = policy.hidden_states(pack)[:, 0]
        if layout.sequence_parallel:
            hidden = torch.cat(_all_gather(hidden, group))
        shard = hidden @ policy.output_weight[: policy.vocab_shard.size].t()
    logits = torch.cat(_all_gather(shard, group), dim=1)
    if not worker.layout.reports:
        return None
    return PackLogits(input_ids=pack.input_ids[0], cu_seqlens=pack.cu_seqlens.tolist(), logits=logits)


def forward_actor(
    context: RankContext,
    actor: ActorConfig,
    model: ModelConfig,
    rows: Sequence[Row],
    micro_batches: Sequence[Sequence[int]],
    *,
    temperature: float,
    top_k: int | None = None,
) -> ForwardResult | None:
    """The actor's log-probs and entropies of the rows, and perhaps its likeliest tokens."""
    worker = load_worker(context, actor, model)
    request = ForwardRequest(role=Role.ACTOR, temperature=temperature, step=0, top_k=top_k)
    return worker.forward(rows, micro_batches, request)


def forward_pairs(
    context: RankContext,
    actor: ActorConfig,
    model: ModelConfig,
    rows: Sequence[Row],
    plan: Sequence[Sequence[Sequence[int]]],
    *,
    temperature: float,
) -> ForwardResult | None:
    """The actor's divergences between the halves of each micro-batch of `plan[dp]`."""
    worker = load_worker(context, actor, model)
    mine = plan[worker.layout.dp_group.rank()]
    return worker.forward(rows, mine, ForwardRequest(role=Role.ACTOR, temperature=temperature, step=0, paired=True))


def load_and_store(
    context: RankContext, actor: ActorConfig, model: ModelConfig, files: Sequence[str]
) -> tuple[StoreResult, Mapping[str, tuple[int, ...]]]:
    """Load a checkpoint and write it again; with the shapes of this rank's parameters."""
    worker = load_worker(context, actor, model)
    stored = worker.store_weights(files, with_checksums=True)
    return stored, {name: tuple(p.shape) for name, p in _parameters(worker, Role.ACTOR).items()}


def _parameters(worker: RankWorker, role: Role) -> dict[str, torch.nn.Parameter]:
    """The parameters of a role that is a single model chunk here."""
    (chunk,) = worker.roles[role].chunks
    return dict(chunk.named_parameters())


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The tensors of all ranks, which may differ in shape."""
    parts: list[torch.Tensor | None] = [None] * group.size()
    dist.all_gather_object(parts, tensor, group=group)
    return [part for part in parts if part is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCase:
    """Steps on the same rows: `micro_batches` by data-parallel rank, and by step the files for the weights."""

    actor: ActorConfig
    model: ModelConfig
    rows: Sequence[Row]
    micro_batches: Sequence[Sequence[Sequence[int]]]
    requests: Sequence[UpdateRequest]
    files: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOutcome:
    """What one rank reports: log-probs of actor and reference before the steps, and the steps' results."""

    actor: ForwardResult | None
    reference: ForwardResult | None
    updates: list[UpdateResult | None]


def run_updates(context: RankContext, case: UpdateCase) -> UpdateOutcome:
    """Run forward passes and updates through the worker, as the trainer's rank does, and write the weights after each
    step.
    """
    worker = load_worker(context, case.actor, case.model, with_reference=True)
    mine = case.micro_batches[worker.layout.dp_group.rank()]
    temperature = case.requests[0].temperature

    # As `RolePasses` sends them.
    plain = [row.only((), routed_experts=True, nucleus=True, likely=True) for row in case.rows]

    def forward(role: Role) -> ForwardResult | None:
        return worker.forward(plain, mine, ForwardRequest(role=role, temperature=temperature, step=0))

    actor, reference = forward(Role.ACTOR), forward(Role.REFERENCE)
    teaching = case.requests[0].teaching
    if teaching is not None and teaching.kept is not None:
        worker.forward(case.rows, mine, ForwardRequest(role=Role.ACTOR, temperature=temperature, step=0, keeps=0))
    updates = []
    for request, files in zip(case.requests, case.files, strict=True):
        updates.append(worker.update(case.rows, mine, request))
        worker.store_weights(files, with_checksums=False)
    return UpdateOutcome(actor=actor, reference=reference, updates=updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCopies:
    """A parameter as the model has it and as the optimizer has it, flattened."""

    model: torch.Tensor
    main: torch.Tensor


def final_norm_over_steps(
    context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row], requests: Sequence[UpdateRequest]
) -> list[ParameterCopies]:
    """The last norm's weight before the first step and after each; all gradients and main parameters are float32."""
    worker = load_worker(context, actor, model)
    loaded, named = worker.roles[Role.ACTOR], _parameters(worker, Role.ACTOR)
    parameter = named["decoder.final_layernorm.weight"]
    assert {p.main_grad.dtype for p in named.values()} == {torch.float32}
    assert loaded.optimizer is not None
    assert {p.dtype for group in loaded.optimizer.param_groups for p in group["params"]} == {torch.float32}

    def copies() -> ParameterCopies:
        main = parameter.main_param.detach().clone().flatten()
        return ParameterCopies(model=parameter.detach().clone().flatten(), main=main)

    history = [copies()]
    for request in requests:
        worker.update(rows, [list(range(len(rows)))], request)
        history.append(copies())
    return history


def non_finite_messages(
    context: RankContext,
    actor: ActorConfig,
    model: ModelConfig,
    rows: Sequence[Row],
    micro_batches: Sequence[Sequence[int]],
    request: UpdateRequest,
) -> tuple[str | None, str | None]:
    """What forward passes and updates complain about."""
    worker = load_worker(context, actor, model)

    def complaint(call: Callable[[], object]) -> str | None:
        try:
            call()
        except NonFiniteError as error:
            return str(error)
        return None

    return (
        complaint(lambda: worker.forward(rows, micro_batches, ForwardRequest(role=Role.ACTOR, step=request.step))),
        complaint(lambda: worker.update(rows, micro_batches, request)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BothModels:
    """Parameters of actor and reference, where they lie in memory, and which of the reference's want a gradient."""

    actor: dict[str, torch.Tensor]
    reference: dict[str, torch.Tensor]
    shared_addresses: set[int]
    trainable_reference: list[str]


def models_around_update(
    context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row], request: UpdateRequest
) -> tuple[BothModels, BothModels]:
    """Actor and reference before and after an update."""
    worker = load_worker(context, actor, model, with_reference=True)

    def snapshot() -> BothModels:
        parameters = [_parameters(worker, role) for role in (Role.ACTOR, Role.REFERENCE)]
        mine, theirs = ({p.data_ptr() for p in named.values()} for named in parameters)
        copies = [{name: p.detach().clone() for name, p in named.items()} for named in parameters]
        return BothModels(
            actor=copies[0],
            reference=copies[1],
            shared_addresses=mine & theirs,
            trainable_reference=[name for name, p in parameters[1].items() if p.requires_grad],
        )

    before = snapshot()
    worker.update(rows, [list(range(len(rows)))], request)
    return before, snapshot()


def update_metrics(
    context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row], request: UpdateRequest
) -> Mapping[str, float] | None:
    """The metrics of an update, for which every replica has all rows; on ranks that report."""
    worker = load_worker(context, actor, model)
    result = worker.update(rows, [[i] for i in range(len(rows))], request)
    return None if result is None else result.metrics


def write_gradient(
    context: RankContext,
    actor: ActorConfig,
    model: ModelConfig,
    rows: Sequence[Row],
    request: UpdateRequest,
    files: Sequence[str],
    doubled: str,
) -> None:
    """Write the gradient of rows; that of parameters whose names begin with `doubled` is wrong."""
    worker = load_worker(context, actor, model)
    for name, parameter in _parameters(worker, Role.ACTOR).items():
        if doubled and name.startswith(doubled):
            parameter.register_hook(lambda gradient: 2 * gradient)
    replicas, replica = actor.layout.dp, worker.layout.dp_group.rank()
    worker.accumulate(rows, [[i] for i in range(len(rows)) if i % replicas == replica], request)
    worker.store_weights(files, with_checksums=False, gradients=True)


def group_timeouts(context: RankContext, config: LayoutConfig) -> list[float]:
    """Seconds after which collectives of the layout's groups give up."""
    layout = join_layout(context, config).layout
    backends = [group._get_backend(torch.device("cpu")) for group in (layout.tp_group, layout.dp_group)]
    return [backend.options._timeout.total_seconds() for backend in backends]


def deterministic_settings(context: RankContext, model: ModelConfig, wanted: Sequence[bool]) -> list[tuple[str, bool]]:
    """What Transformer Engine and torch are told after loading with each wish for determinism."""
    worker, found = join_layout(context, LayoutConfig()), []
    for deterministic in wanted:
        role = RoleSpec(role=Role.ACTOR, model=model, settings=ActorConfig())
        worker.load(LoadRequest(roles=(role,), seed=0, deterministic=deterministic))
        told = os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"], torch.are_deterministic_algorithms_enabled()
        found.append(told)
    return found
