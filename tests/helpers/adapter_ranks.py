"""All that one rank can say of a model with adapters: log-probs with and without them, gradients, and a step."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.config.schema import ActorConfig, ModelConfig
from megarl.types import FloatArray, Row
from megarl.types.messages import ForwardRequest, LoadRequest, Role, RoleSpec, UpdateRequest, Vision
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCase:
    """A model with adapters under a layout, and rows by micro-batch and data-parallel rank.

    load: a checkpoint to go on from. save: where to write one after the step. weight_files: for the model before it.
    """

    model: ModelConfig
    actor: ActorConfig
    rows: Sequence[Row]
    micro_batches: Sequence[Sequence[Sequence[int]]]
    request: UpdateRequest
    load: str = ""
    save: str = ""
    weight_files: Sequence[str] = ()
    vision: Vision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOutcome:
    """logprobs, base: row → [R] with and without adapters, before the step, both empty off the last stage.

    gradients, after: (tensor, index, values) of each slice of the adapters' tensors, the latter after the step.
    num_bytes: of gradients and of parameters that are trained. changed: parameters of the base whose bits are not those
    that were read, after all of this.
    """

    logprobs: dict[int, FloatArray]
    base: dict[int, FloatArray]
    gradients: list[tuple[str, Any, torch.Tensor]]
    after: list[tuple[str, Any, torch.Tensor]]
    grad_norm: float
    num_bytes: tuple[int, int]
    changed: list[str]


def run_adapters(context: RankContext, case: AdapterCase) -> AdapterOutcome:
    from megarl.parallel.adapters import adapter_slices, without_adapters
    from megarl.parallel.building import named_shards, rank_slices
    from megarl.parallel.updates import accumulate_gradients, optimizer_step

    # Megatron forks a writer of checkpoints.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    worker = join_layout(context, case.actor.layout)
    role = RoleSpec(role=Role.ACTOR, model=case.model, settings=case.actor, vision=case.vision)
    worker.load(LoadRequest(roles=(role,), seed=0))
    loaded = worker.roles[Role.ACTOR]
    assert loaded.adapters is not None
    frozen = [named for chunk in loaded.chunks for named in named_shards(chunk)]
    as_read = {name: p.data.clone() for name, _, p in frozen}
    if case.load:
        worker.load_checkpoint(case.load, same_layout=())
    mine = case.micro_batches[worker.layout.dp_group.rank()]
    request = ForwardRequest(role=Role.ACTOR, temperature=1.0, step=0)
    outputs = worker.forward(case.rows, mine, request)
    with without_adapters(loaded.chunks):
        base = worker.forward(case.rows, mine, request)
    if case.weight_files:
        worker.store_weights(case.weight_files, with_checksums=False)
    for part in loaded.weights(by_expert=True):
        # As a weight sync computes them, which leaves the base as it is.
        assert part.view.isfinite().all()
    accumulate_gradients(loaded, case.rows, mine, case.request, dp_group=worker.layout.dp_group)
    shards = [named for chunk in loaded.chunks for named in named_shards(chunk, of_adapters=True)]
    gradients = rank_slices([(name, p.main_grad) for name, _, p in shards], loaded.adapters, worker.layout)
    found = [(part.tensor, part.index, part.view.clone()) for part in gradients]
    step = case.request.optimizer_step
    norm = optimizer_step(loaded, step).metrics[f"{step.role}/grad_norm"]
    if case.save:
        Path(case.save).mkdir(parents=True, exist_ok=True)
        worker.save_checkpoint(case.save, portable=True)
        worker.finish_checkpoint(wait=True)
    trained = [p for chunk in loaded.chunks for p in chunk.parameters() if p.requires_grad]
    buffers = [b for each in loaded.ddp for b in (*each.buffers, *each.expert_parallel_buffers)]
    return AdapterOutcome(
        logprobs=dict(outputs.quantities["logprobs"]) if outputs else {},
        base=dict(base.quantities["logprobs"]) if base else {},
        gradients=found,
        after=[(p.tensor, p.index, p.view.clone()) for p in adapter_slices(loaded.chunks, loaded.adapters)],
        grad_norm=norm,
        changed=[name for name, _, p in frozen if not torch.equal(p.data, as_read[name])],
        num_bytes=(sum(b.grad_data.nbytes for b in buffers), sum(p.nbytes for p in trained)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLayout:
    """What a rank holds of a model with adapters, under names that no kind of layer changes, and what it sends.

    parameters: the shape and whether it is trained. sent: (tensor, index, shape of the view) by name.
    num_bytes: of the gradients' buffers.
    """

    parameters: dict[str, tuple[tuple[int, ...], bool]]
    sent: list[tuple[str, Any, tuple[int, ...]]]
    num_bytes: int


def adapter_layout(context: RankContext, case: AdapterCase, *, engine_layers: bool) -> AdapterLayout:
    """engine_layers: whether all linear layers have to be Transformer Engine's."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megarl.parallel.building import named_shards

    worker = join_layout(context, case.actor.layout)
    worker.load(LoadRequest(roles=(RoleSpec(role=Role.ACTOR, model=case.model, settings=case.actor),), seed=0))
    loaded, parameters = worker.roles[Role.ACTOR], {}
    assert loaded.adapters is not None
    for of_adapters, spec in ((False, loaded.model_spec), (True, loaded.adapters)):
        rules = spec.parameter_rules()
        for name, _, parameter in (n for chunk in loaded.chunks for n in named_shards(chunk, of_adapters=of_adapters)):
            placed = rules[name]
            parameters[placed.name(placed.rule.names[0])] = tuple(parameter.shape), parameter.requires_grad
    linear = {
        type(m) for m in loaded.chunks[0].decoder.modules() if isinstance(getattr(m, "weight", None), torch.Tensor)
    }
    assert engine_layers is not any(issubclass(each, ColumnParallelLinear) for each in linear)
    return AdapterLayout(
        parameters=parameters,
        sent=sorted(((p.tensor, p.index, tuple(p.view.shape)) for p in loaded.sent()[1]), key=str),
        num_bytes=sum(b.grad_data.nbytes for d in loaded.ddp for b in (*d.buffers, *d.expert_parallel_buffers)),
    )
