"""Who is compared: the head in each regime, its peers, and the bare matrix multiplications as the bound of time.

A contender is loaded in processes of its own; what it needs is imported there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from megarl.registry import Registry
from megarl_lab.bench.logprobs.problem import Head, HeadProblem, Outputs


class Kind(StrEnum):
    OURS = "ours"
    PEER = "peer"
    BOUND = "bound"


def _nothing(itemsize: int) -> int:
    return 0


def _logits(itemsize: int) -> int:
    return itemsize


def _eager_copies(itemsize: int) -> int:
    """Logits, their clone (in float32 the cross entropy writes over it), float32 softmax, the entropy's softmax."""
    return 3 * itemsize + (4 if itemsize < 4 else 0)


def _float32_softmax(itemsize: int) -> int:
    """A float32 softmax, and beside it in backward the gradient of the logits."""
    return 4 + itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadContender:
    """load: (tensor-parallel group) → head. kept_bytes: (bytes of a number) → bytes kept for each logit [N, V/tp].

    num_gemms: products of N·H·V/tp that forward and backward take. optional: left out where it cannot be imported.
    """

    kind: Kind
    load: Callable[[dist.ProcessGroup], Head]
    num_gemms: int
    kept_bytes: Callable[[int], int] = _nothing
    optional: bool = False
    note: str = ""


CONTENDERS: Registry[HeadContender] = Registry("contender", key="--contenders")
# Liger leaves this out of the loss; no label is that.
_IGNORE_INDEX = -100

DEFAULTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cpu": ("recompute", "keep", "in_chunk", "megatron_verl", "liger_fallback", "gemms"),
        "cuda": (
            *("recompute_triton", "recompute_torch", "keep_triton", "keep_torch", "in_chunk_triton"),
            *("megatron_verl", "megatron_fused", "liger", "liger_fallback", "liger_linear", "cut_cross_entropy"),
            "gemms",
        ),
    }
)


def _head(regime: str, kernels: Callable[[], Any] | None = None) -> Callable[[dist.ProcessGroup], Head]:
    """The head in one regime; `kernels` None is its own choice."""

    def load(group: dist.ProcessGroup) -> Head:
        from megarl.parallel.head.logprobs import HeadMemoryMode, HeadOptions, vocab_parallel_logprobs
        from megarl.parallel.head.statistics import vocab_shard

        made = None if kernels is None else kernels()

        def head(problem: HeadProblem) -> Outputs:
            rows_per_rank = problem.weight.shape[0]
            in_chunk = HeadMemoryMode[regime] is HeadMemoryMode.IN_CHUNK
            result = vocab_parallel_logprobs(
                problem.hidden,
                problem.weight,
                problem.labels,
                shard=vocab_shard(group, rows_per_rank, rows_per_rank * group.size()),
                options=HeadOptions(
                    memory_mode=HeadMemoryMode[regime],
                    entropy_needs_grad=True,
                    # As in training, where the rows are a copy of those that are trained.
                    overwrite_hidden=True,
                    main_grad=problem.main_grad,
                    loss_gradients=(lambda *_: (problem.grad_logprobs, problem.grad_entropy)) if in_chunk else None,
                    kernels=made,
                ),
            )
            return Outputs(logprobs=result.logprobs, entropy=result.entropy)

        return head

    return load


def _torch_kernels() -> Any:
    from megarl.parallel.head.kernels import TorchKernels

    return TorchKernels()


def _triton_kernels() -> Any:
    from megarl.parallel.head.triton_kernels import TritonKernels

    return TritonKernels()


def _megatron_verl(group: dist.ProcessGroup) -> Head:
    from megarl_lab.bench.logprobs.eager_peer import load

    return load(group)


def _megatron_fused(group: dist.ProcessGroup) -> Head:
    from megarl_lab.bench.logprobs.eager_peer import load_fused

    return load_fused(group)


def _liger_fallback(group: dist.ProcessGroup) -> Head:
    """Liger's chunked function, called as its own front end calls it where its CUDA kernels cannot run."""
    module = import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    function = module._TensorParallelFusedLinearPPOFallbackFunction

    def head(problem: HeadProblem) -> Outputs:
        nll, entropy = function.apply(problem.hidden, problem.weight, problem.labels, 1.0, _IGNORE_INDEX, True, group)
        return Outputs(logprobs=-nll, entropy=entropy)

    return head


def _liger(group: dist.ProcessGroup) -> Head:
    """Liger's front end, which picks a kernel for the device."""
    ops = import_module("liger_kernel.ops")

    def head(problem: HeadProblem) -> Outputs:
        inputs = problem.hidden, problem.weight, problem.labels
        if group.size() == 1:
            nll, entropy = ops.LigerFusedLinearScaledCrossEntropyFunction.apply(*inputs, return_entropy=True)
        else:
            nll, entropy = ops.LigerFusedLinearScaledCrossEntropyTPFunction.apply(*inputs, group, return_entropy=True)
        return Outputs(logprobs=-nll, entropy=entropy)

    return head


def _liger_linear(group: dist.ProcessGroup) -> Head:
    """Liger's Triton loss on hidden states, a loss per token; its gradients are then computed in backward."""
    function = import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction
    if group.size() > 1:
        raise ImportError("it has no tensor-parallel form")

    def head(problem: HeadProblem) -> Outputs:
        bias, class_weights, z_loss, smoothing = None, None, 0.0, 0.0
        options = bias, class_weights, _IGNORE_INDEX, z_loss, smoothing, "none"
        nll, *_ = function.apply(problem.hidden, problem.weight, problem.labels, *options)
        return Outputs(logprobs=-nll, entropy=None)

    return head


def _cut_cross_entropy(group: dist.ProcessGroup) -> Head:
    linear_cross_entropy = import_module("cut_cross_entropy").linear_cross_entropy
    if group.size() > 1:
        raise ImportError("it has no tensor-parallel form")

    def head(problem: HeadProblem) -> Outputs:
        nll = linear_cross_entropy(problem.hidden, problem.weight, problem.labels, reduction="none", filter_eps=None)
        return Outputs(logprobs=-nll, entropy=None)

    return head


def _gemms(group: dist.ProcessGroup) -> Head:
    from megarl_lab.bench.logprobs.bound import bare_gemms

    return bare_gemms


def _register_head(name: str, **settings: Any) -> None:
    for suffix, kernels in (("", None), ("_triton", _triton_kernels), ("_torch", _torch_kernels)):
        contender = HeadContender(kind=Kind.OURS, load=_head(name.upper(), kernels), **settings)
        CONTENDERS.register(name + suffix)(contender)


_OURS = "writes the hidden gradient over the hidden states, as in training"
_register_head("recompute", num_gemms=4, note=_OURS)
_register_head("keep", num_gemms=3, kept_bytes=_logits, note=_OURS)
_register_head("in_chunk", num_gemms=3, note=f"{_OURS}; is told the gradient of the loss in forward, and is done there")
CONTENDERS.register("megatron_verl")(
    HeadContender(
        kind=Kind.PEER,
        load=_megatron_verl,
        num_gemms=3,
        kept_bytes=_eager_copies,
        note="megatron-core's cross entropy on whole logits, with the eager entropy of verl",
    )
)
CONTENDERS.register("megatron_fused")(
    HeadContender(
        kind=Kind.PEER,
        load=_megatron_fused,
        num_gemms=3,
        kept_bytes=_float32_softmax,
        optional=True,
        note="megatron-core's compiled cross entropy on whole logits; computes no entropy",
    )
)
CONTENDERS.register("liger_fallback")(
    HeadContender(
        kind=Kind.PEER, load=_liger_fallback, num_gemms=4, note="Liger's tensor-parallel function without CUDA kernels"
    )
)
CONTENDERS.register("liger")(
    HeadContender(
        kind=Kind.PEER, load=_liger, num_gemms=4, optional=True, note="Liger's fused linear scaled cross entropy"
    )
)
CONTENDERS.register("liger_linear")(
    HeadContender(
        kind=Kind.PEER,
        load=_liger_linear,
        num_gemms=4,
        optional=True,
        note="Liger's fused linear cross entropy in Triton; computes no entropy",
    )
)
CONTENDERS.register("cut_cross_entropy")(
    HeadContender(kind=Kind.PEER, load=_cut_cross_entropy, num_gemms=4, optional=True, note="computes no entropy")
)
CONTENDERS.register("gemms")(
    HeadContender(kind=Kind.BOUND, load=_gemms, num_gemms=4, note="the four matrix multiplications alone")
)
