"""What the tests of offloading run on every rank: SFT steps with the role's memory moved away and back between."""

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from megarl.config.schema import ActorConfig, ModelConfig
from megarl.host.device.groups import backends_of_groups
from megarl.host.device.platform import platform
from megarl.parallel.worker import RankWorker
from megarl.types import Row
from megarl.types.messages import ForwardRequest, LoadRequest, Part, Role, RoleSpec
from tests.helpers.checkpoint_ranks import train
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout

History = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadTrace:
    """What was seen while all parts were on the host: bytes released, of which part; bytes that stayed."""

    released: Mapping[Part, int]
    stayed: int
    is_exact: bool
    history: History


def open_trained(
    context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row], num_steps: int
) -> tuple[RankWorker, History]:
    """An actor with a reference beside it, after some steps."""
    worker = join_layout(context, actor.layout)
    spec = RoleSpec(role=Role.ACTOR, model=model, settings=actor)
    reference = RoleSpec(role=Role.REFERENCE, model=model, settings=actor, trainable=False)
    worker.load(LoadRequest(roles=(spec, reference), seed=0))
    return worker, train(worker, actor, rows, range(num_steps))


def named_tensors(worker: RankWorker) -> Iterator[tuple[str, torch.Tensor]]:
    """What the actor computes with, found from the outside: parameters, their gradients, main parameters, moments."""
    role = worker.roles[Role.ACTOR]
    for i, chunk in enumerate(role.chunks):
        for name, parameter in chunk.named_parameters():
            yield f"{i}.{name}", parameter.data
            yield f"{i}.{name}.grad", parameter.main_grad
            if getattr(parameter, "main_param", None) is not None:
                yield f"{i}.{name}.main", parameter.main_param
    assert role.optimizer is not None
    for j, optimizer in enumerate(role.optimizer.chained_optimizers):
        for k, state in enumerate(optimizer.optimizer.state.values()):
            yield from ((f"{j}.{k}.{key}", state[key]) for key in ("exp_avg", "exp_avg_sq"))


def never_offloaded(context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row]) -> History:
    """Four steps."""
    return open_trained(context, actor, model, rows, 4)[1]


def offload_between(context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row]) -> OffloadTrace:
    """Two steps, everything away and back, two more."""
    worker, history = open_trained(context, actor, model, rows, 2)
    before = {name: tensor.clone() for name, tensor in named_tensors(worker)}
    released = {part: worker.offload(Role.ACTOR, [part]) for part in Part}
    assert all(worker.offload(Role.ACTOR, [part]) == 0 for part in Part)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for _, t in named_tensors(worker)}
    for part in (Part.OPTIMIZER, Part.PARAMS, Part.GRADS):
        worker.onload(Role.ACTOR, [part])
    after = dict(named_tensors(worker))
    is_exact = before.keys() == after.keys() and all(
        not after[name].any() if name.endswith(".grad") else _same_bits(before[name], after[name]) for name in before
    )
    history += train(worker, actor, rows, range(2, 4))
    return OffloadTrace(released=released, stayed=sum(storages.values()), is_exact=is_exact, history=history)


class PretendedBackend:
    """A backend that can be suspended, as gloo's cannot; while it is, every collective of torch's fails."""

    def __init__(self, calls: list[str], patch: pytest.MonkeyPatch) -> None:
        self._calls, self._patch = calls, patch

    def suspend(self) -> None:
        self._calls.append("suspend")
        for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_object", "barrier"):
            self._patch.setattr(dist, name, _refuse)

    def resume(self) -> None:
        self._calls.append("resume")
        self._patch.undo()


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("a suspended communicator was used")


def suspend_between(
    context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row], directory: str
) -> tuple[History, list[str], list[str]]:
    """Two steps, a checkpoint that is finished while all is away, two more; what was told to backends, and their names.

    The backends are told once nothing of either role is on the device.
    """
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    worker, history = open_trained(context, actor, model, rows, 2)
    names = [type(backend).__name__ for backend in backends_of_groups("gloo", torch.device("cpu"))]
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as ours, pytest.MonkeyPatch.context() as patch:
        ours.setattr(platform(), "communicators", lambda: [PretendedBackend(calls, patch)])
        worker.suspends_nccl = True
        worker.save_checkpoint(directory, portable=False)
        worker.offload(Role.REFERENCE, [Part.PARAMS])
        worker.offload(Role.ACTOR, [Part.PARAMS, Part.GRADS])
        assert not calls
        worker.offload(Role.ACTOR, [Part.OPTIMIZER])
        assert calls == ["suspend"]
        worker.finish_checkpoint(wait=True)
        worker.onload(Role.ACTOR, list(Part))
        worker.onload(Role.REFERENCE, [Part.PARAMS])
        history += train(worker, actor, rows, range(2, 4))
    return history, calls, names


def host_bytes(
    context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row]
) -> tuple[int, list[int]]:
    """Bytes of the actor's parameters and optimizer; the sizes of the host buffers made in two times away and back."""
    worker, _ = open_trained(context, actor, model, rows, 1)
    held = {t.untyped_storage()._cdata: t.nbytes for name, t in named_tensors(worker) if not name.endswith(".grad")}
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for _, t in named_tensors(worker)}
    expected = sum(storages[key] for key in held)
    made: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        original = platform().host_buffer
        patch.setattr(platform(), "host_buffer", lambda size: (made.append(size), original(size))[1])
        for _ in range(2):
            worker.offload(Role.ACTOR, list(Part))
            worker.onload(Role.ACTOR, list(Part))
    return expected, made


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def use_while_offloaded(
    context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row], files: Sequence[str]
) -> list[str]:
    """The errors of a pass, a step and a store that miss a part each."""
    worker, _ = open_trained(context, actor, model, rows, 1)
    return [
        _error_of(
            worker,
            Part.PARAMS,
            lambda: worker.forward(rows[:1], [[0]], ForwardRequest(role=Role.ACTOR, temperature=1.0, step=1)),
        ),
        _error_of(worker, Part.OPTIMIZER, lambda: train(worker, actor, rows, range(1, 2))),
        _error_of(worker, Part.GRADS, lambda: train(worker, actor, rows, range(1, 2))),
        _error_of(worker, Part.PARAMS, lambda: worker.store_weights(files, with_checksums=False)),
    ]


def _error_of(worker: RankWorker, part: Part, use: object) -> str:
    worker.offload(Role.ACTOR, [part])
    try:
        use()  # type: ignore[operator]
    except AssertionError as error:
        return str(error)
    finally:
        worker.onload(Role.ACTOR, [part])
    return ""


def offload_reference(
    context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row]
) -> tuple[dict[Part, int], bool]:
    """Bytes released by the parts of a frozen role, and whether its log-probs are the same afterwards."""
    worker, _ = open_trained(context, actor, model, rows, 0)

    def logprobs() -> list[list[float]]:
        result = worker.forward(rows[:1], [[0]], ForwardRequest(role=Role.REFERENCE, temperature=1.0, step=1))
        return [] if result is None else [array.tolist() for of in result.quantities.values() for array in of.values()]

    before = logprobs()
    released = {part: worker.offload(Role.REFERENCE, [part]) for part in Part}
    worker.onload(Role.REFERENCE, list(Part))
    return released, before == logprobs()
