"""Who is compared by `megarl_lab.bench.head`: the head in each memory mode, with and without a teacher, and its peers.

`megatron_verl` does as verl (arXiv:2409.19256; verl/workers/actor/megatron_actor.py): megatron-core's cross entropy
on a clone of the whole logits [N, V/tp], which it overwrites, and an entropy of three all-reduces of its own:
    m = max_v z_v,   s = Σ_v e^{z_v − m},   μ = Σ_v p_v z_v,   H = m + log s − μ,   ∂H/∂z_v = −p_v (z_v − μ).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megarl.algos.centering import Centering
from megarl.algos.off_policy_losses import TopDivergence
from megarl.parallel.head.distill import vocab_parallel_divergence
from megarl.parallel.head.divergence import Divergence
from megarl.parallel.head.given_teachers import TeacherLogits
from megarl.parallel.head.logprobs import HeadOptions, vocab_parallel_logprobs
from megarl.parallel.head.memory_mode import HeadMemoryMode
from megarl.parallel.head.statistics import vocab_shard
from megarl.types.objectives import HeadMeasure
from megarl_lab.bench.head_problem import BETA, CLIP, HeadObjective, Inputs

# (inputs, rows of a chunk or None) → the loss, of which hidden states and weight get gradients
Head = Callable[[Inputs, int | None], torch.Tensor]
# Liger leaves this out of the loss; no label is that.
_IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """load: tensor-parallel group → head; raises ImportError where it cannot run. beside: whose time and memory are 1.

    is_ours: its gradients must be those of float64.
    """

    load: Callable[[dist.ProcessGroup], Head]
    objective: HeadObjective
    beside: str
    is_ours: bool = False


def _options(mode: HeadMemoryMode, chunk: int | None, given: tuple[torch.Tensor | None, ...]) -> HeadOptions:
    options = HeadOptions(memory_mode=mode, chunk_tokens=chunk)
    return replace(options, loss_gradients=lambda *_: given) if mode is HeadMemoryMode.IN_CHUNK else options


def _ours(mode: HeadMemoryMode, kernels: str | None = None, *, entropy: bool = True) -> Contender:
    def load(group: dist.ProcessGroup) -> Head:
        module, _, name = (kernels or "").partition(":")
        made = getattr(import_module(f"megarl.parallel.head.{module}"), name)() if kernels else None

        def head(x: Inputs, chunk: int | None) -> torch.Tensor:
            options = _options(mode, chunk, (x.by_logprobs, x.by_entropy if entropy else None))
            # Training's rows are a copy of those that are trained, too.
            options = replace(options, kernels=made, entropy_needs_grad=entropy, overwrite_hidden=entropy)
            shard = vocab_shard(group, len(x.weight), len(x.weight) * group.size())
            out = vocab_parallel_logprobs(x.hidden, x.weight, x.labels, shard=shard, options=options)
            return x.loss(out.logprobs, out.entropy if entropy else None)

        return head

    objective = HeadObjective.ENTROPY if entropy else HeadObjective.PLAIN
    return Contender(load=load, objective=objective, beside="recompute" if entropy else f"plain {mode}", is_ours=True)


def _teacher(mode: HeadMemoryMode, objective: HeadObjective, *, versions: int = 1) -> Contender:
    """The head with a teacher, or for centering and TV beside an earlier policy, in so many versions by turns."""
    measures: Mapping[HeadObjective, HeadMeasure] = {
        HeadObjective.CENTERING: Centering(weight="tis", low=CLIP[0], high=CLIP[1]),
        HeadObjective.TV: TopDivergence(kind="tv"),
    }
    measure = measures.get(objective)
    divergence = Divergence.REVERSE if measure else Divergence(objective)

    def load(group: dist.ProcessGroup) -> Head:
        def head(x: Inputs, chunk: int | None) -> torch.Tensor:
            shard = vocab_shard(group, len(x.weight), len(x.weight) * group.size())
            teacher = TeacherLogits(hidden=x.teacher_hidden, weight=x.teacher_weight, shard=shard, measure=measure)
            if versions > 1:
                # The same weight each time: caches hold too little of it for that to save reading.
                others = dict.fromkeys(range(versions - 1), x.teacher_weight)
                teacher = replace(teacher, others=others, which=torch.arange(len(x.labels)) % versions - 1)
            out = vocab_parallel_divergence(
                x.hidden,
                x.weight,
                x.labels,
                shard=shard,
                teacher=teacher,
                divergence=divergence,
                beta=BETA,
                options=_options(mode, chunk, (x.by_logprobs, None, x.by_divergence)),
            )
            return x.loss(out.logprobs) + out.divergence @ x.by_divergence

        return head

    return Contender(load=load, objective=objective, beside=f"plain {mode}", is_ours=True)


class _EagerEntropy(torch.autograd.Function):
    """Logits [N, V/tp] → H [N]."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        peak = logits.amax(-1, keepdim=True)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        softmax = (logits - peak).exp_()
        total = softmax.sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        softmax.div_(total)
        # verl compiles product and sum into one loop; a batched dot product needs no [N, V/tp] of its own either.
        mean = torch.bmm(softmax[:, None], logits[:, :, None])[:, 0]
        dist.all_reduce(mean, group=group)
        ctx.save_for_backward(logits, softmax, mean)
        return (peak + total.log() - mean)[:, 0]

    @staticmethod
    def backward(ctx: Any, grad_entropy: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, softmax, mean = ctx.saved_tensors
        # Only one pass of the three leaves the logits as they were, as in verl.
        logits.sub_(mean)
        softmax.mul_(logits).mul_(-grad_entropy[:, None])
        logits.add_(mean)
        return softmax, None


def _output_layer(group: dist.ProcessGroup) -> tuple[Callable[[Inputs], torch.Tensor], dist.ProcessGroup]:
    """Megatron's product h·Wᵀ, and its tensor-parallel group, which becomes one of the same ranks as `group`."""
    # Megatron asks for it where it overlaps its all-reduce; without CUDA it is not read.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as linear

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=group.size())
    tp_group = parallel_state.get_tensor_model_parallel_group()

    def logits(x: Inputs) -> torch.Tensor:
        made: torch.Tensor = linear(
            x.hidden,
            x.weight,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=True,
            sequence_parallel=False,
            tp_group=tp_group,
        )
        return made

    return logits, tp_group


def _megatron_verl(group: dist.ProcessGroup) -> Head:
    linear, tp_group = _output_layer(group)
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    def head(x: Inputs, _: int | None) -> torch.Tensor:
        logits = linear(x)
        copy = logits.clone()
        entropy = _EagerEntropy.apply(logits, tp_group)
        return x.loss(-vocab_parallel_cross_entropy(copy, x.labels), entropy)

    return head


def _megatron_fused(group: dist.ProcessGroup) -> Head:
    """Megatron's compiled cross entropy (cross_entropy_loss_fusion), whose gradient is bfloat16."""
    linear, tp_group = _output_layer(group)
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    return lambda x, _: x.loss(-fused_vocab_parallel_cross_entropy(linear(x), x.labels, tp_group))


def _liger_fallback(group: dist.ProcessGroup) -> Head:
    """Liger's chunked function, called as its own front end calls it where its CUDA kernels cannot run."""
    module = import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    function = module._TensorParallelFusedLinearPPOFallbackFunction

    def head(x: Inputs, _: int | None) -> torch.Tensor:
        nll, entropy = function.apply(x.hidden, x.weight, x.labels, 1.0, _IGNORE_INDEX, True, group)
        return x.loss(-nll, entropy)

    return head


def _liger_linear(group: dist.ProcessGroup) -> Head:
    """Liger's Triton loss on hidden states, a loss per token; its gradients are then computed in backward."""
    function = import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction
    _only_alone(group)

    def head(x: Inputs, _: int | None) -> torch.Tensor:
        bias, class_weights, z_loss, smoothing = None, None, 0.0, 0.0
        options = bias, class_weights, _IGNORE_INDEX, z_loss, smoothing, "none"
        return x.loss(-function.apply(x.hidden, x.weight, x.labels, *options)[0])

    return head


def _cut_cross_entropy(group: dist.ProcessGroup) -> Head:
    function = import_module("cut_cross_entropy").linear_cross_entropy
    _only_alone(group)
    return lambda x, _: x.loss(-function(x.hidden, x.weight, x.labels, reduction="none", filter_eps=None))


def _only_alone(group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        raise ImportError("it has no tensor-parallel form")


_KERNELS = {"": None, "_triton": "triton_kernels:TritonKernels", "_torch": "kernels:TorchKernels"}
CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        **{f"{mode}{suffix}": _ours(mode, kernels) for mode in HeadMemoryMode for suffix, kernels in _KERNELS.items()},
        "megatron_verl": Contender(load=_megatron_verl, objective=HeadObjective.ENTROPY, beside="recompute"),
        "megatron_fused": Contender(load=_megatron_fused, objective=HeadObjective.PLAIN, beside="recompute"),
        "liger_fallback": Contender(load=_liger_fallback, objective=HeadObjective.ENTROPY, beside="recompute"),
        "liger_linear": Contender(load=_liger_linear, objective=HeadObjective.PLAIN, beside="recompute"),
        "cut_cross_entropy": Contender(load=_cut_cross_entropy, objective=HeadObjective.PLAIN, beside="recompute"),
        **{f"plain {mode}": _ours(mode, entropy=False) for mode in HeadMemoryMode},
        **{
            f"{objective} {mode}": _teacher(mode, objective)
            for objective in HeadObjective
            if objective not in (HeadObjective.PLAIN, HeadObjective.ENTROPY)
            for mode in HeadMemoryMode
        },
        "three versions recompute": _teacher(HeadMemoryMode.RECOMPUTE, HeadObjective.CENTERING, versions=3),
    }
)
