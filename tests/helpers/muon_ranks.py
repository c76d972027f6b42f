"""What a rank trains with Megatron's Muon, whose package of orthogonalizers may be a stand-in.

The package itself needs a newer Python; where it is installed, it is taken. The stand-in has what Megatron 0.16 calls
of it, with the arguments of its version 0.1: a momentum with decoupled weight decay, and the quintic Newton-Schulz
iteration in float32.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from megarl.config.schema import ActorConfig, ModelConfig
from megarl.parallel.backend import prepare_megatron
from megarl.types import Row
from megarl.types.messages import Head, LoadRequest, Part, Role, RoleSpec
from tests.helpers.checkpoint_ranks import load_train, open_worker, train, train_save_train
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout

# Asked before the stand-in has the package's name.
IS_INSTALLED = importlib.util.find_spec("emerging_optimizers") is not None
_QUINTIC = (3.4445, -4.7750, 2.0315)


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """W ← (1 − lr·λ)·W − lr·o(m), m ← β·m + (1 − β)·g, where `orthogonalize` is o."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum_beta: float,
        *,
        use_nesterov: bool,
        weight_decay: float,
        weight_decay_method: str,
        fp32_matmul_prec: str,
        scaled_orthogonalize_fn: Callable[..., torch.Tensor],
    ) -> None:
        assert (use_nesterov, weight_decay_method, fp32_matmul_prec) == (False, "decoupled", "medium")
        super().__init__(params, {"lr": lr, "momentum_beta": momentum_beta, "weight_decay": weight_decay})
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                momentum = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum_beta"])
                p.add_(self.orthogonalize(p, momentum), alpha=-group["lr"])


def newton_schulz_tp(
    x: torch.Tensor, steps: int, coefficient_type: str, tp_group: Any, partition_dim: int | None, mode: str
) -> torch.Tensor:
    """All of a matrix on every rank, of which each keeps its part."""
    assert (coefficient_type, mode) == ("quintic", "duplicated")
    if partition_dim is None:
        return newton_schulz(x, steps)
    shards = [torch.empty_like(x) for _ in range(tp_group.size())]
    torch.distributed.all_gather(shards, x.contiguous(), group=tp_group)
    whole = newton_schulz(torch.cat(shards, dim=partition_dim), steps)
    return whole.chunk(tp_group.size(), dim=partition_dim)[tp_group.rank()]


def newton_schulz(x: torch.Tensor, steps: int) -> torch.Tensor:
    a, b, c = _QUINTIC
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(steps):
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return x


def pretend_package() -> None:
    """Let Megatron find the stand-in in this process, unless the package is installed."""
    if IS_INSTALLED:
        return
    package, optimizers, utils = (
        ModuleType(name)
        for name in (
            "emerging_optimizers",
            "emerging_optimizers.orthogonalized_optimizers",
            "emerging_optimizers.orthogonalized_optimizers.muon_utils",
        )
    )
    optimizers.OrthogonalizedOptimizer = OrthogonalizedOptimizer  # type: ignore[attr-defined]
    optimizers.get_muon_scale_factor = lambda rows, columns, mode: max(rows, columns) ** 0.5  # type: ignore[attr-defined]
    utils.newton_schulz_tp = newton_schulz_tp  # type: ignore[attr-defined]
    sys.modules |= {module.__name__: module for module in (package, optimizers, utils)}
    # First, what Megatron needs on a CPU.
    prepare_megatron()
    from megatron.core.optimizer import muon

    if not muon.HAVE_EMERGING_OPTIMIZERS:
        # It looked for the package when it was imported.
        importlib.reload(muon)


def train_save_train_with_muon(*args: Any) -> list[tuple[float, float]]:
    """`train_save_train` on a rank that has the package."""
    pretend_package()
    return train_save_train(*args)


def load_train_with_muon(*args: Any, same_layout: bool) -> list[tuple[float, float]]:
    """`load_train` on a rank that has the package."""
    pretend_package()
    return load_train(*args, same_layout=same_layout)


def first_updates(
    context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row]
) -> dict[str, torch.Tensor]:
    """By parameter, what the first step has changed."""
    pretend_package()
    worker = open_worker(context, actor, model)
    (chunk,) = worker.roles[Role.ACTOR].chunks
    before = {name: value.detach().clone() for name, value in chunk.named_parameters()}
    train(worker, actor, rows, range(1))
    (chunk,) = worker._role(Role.ACTOR, Part.PARAMS).chunks
    return {name: value.detach() - before[name] for name, value in chunk.named_parameters()}


def shapes_of_critic(context: RankContext, actor: ActorConfig, model: ModelConfig) -> list[set[tuple[int, ...]]]:
    """The shapes of the parameters of a critic that each of its optimizers trains, Muon first."""
    pretend_package()
    worker = join_layout(context, actor.layout)
    critic = RoleSpec(role=Role.CRITIC, model=model, settings=actor, head=Head.SCALAR)
    worker.load(LoadRequest(roles=(critic,), seed=0))
    optimizer = worker.roles[Role.CRITIC].optimizer
    assert optimizer is not None
    return [
        {tuple(parameter.shape) for group in each.param_groups for parameter in group["params"]}
        for each in optimizer.chained_optimizers
    ]
