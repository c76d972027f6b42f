"""Megatron-Core's cross entropies on whole logits, and the entropy of their softmax as verl computes it eagerly.

verl (arXiv:2409.19256; verl/utils/megatron/tensor_parallel.py and workers/actor/megatron_actor.py) has the logits
[N, V/tp] from Megatron's output layer. Where the entropy is wanted it clones them, since the cross entropy of
megatron-core writes its softmax over its input, and its entropy needs three all-reduces of its own:
    m = max_v z_v,   s = Σ_v e^{z_v − m},   μ = Σ_v p_v z_v,   H = m + log s − μ,   ∂H/∂z_v = −p_v (z_v − μ),
with softmax and logits kept for backward, where the softmax is overwritten by the gradient.
"""

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megarl_lab.bench.logprobs.problem import Head, HeadProblem, Outputs


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


def load(group: dist.ProcessGroup) -> Head:
    """The head with verl's entropy; Megatron's tensor-parallel group becomes one of the same ranks as `group`."""
    linear, tp_group = _output_layer(group)
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    def head(problem: HeadProblem) -> Outputs:
        logits = linear(problem)
        copy = logits.clone()
        entropy = _EagerEntropy.apply(logits, tp_group)
        return Outputs(logprobs=-vocab_parallel_cross_entropy(copy, problem.labels), entropy=entropy)

    return head


def load_fused(group: dist.ProcessGroup) -> Head:
    """The head with Megatron's compiled cross entropy (cross_entropy_loss_fusion), whose gradient is bfloat16."""
    linear, tp_group = _output_layer(group)
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    def head(problem: HeadProblem) -> Outputs:
        nll = fused_vocab_parallel_cross_entropy(linear(problem), problem.labels, tp_group)
        return Outputs(logprobs=-nll, entropy=None)

    return head


def _output_layer(group: dist.ProcessGroup) -> tuple[Callable[[HeadProblem], torch.Tensor], dist.ProcessGroup]:
    """Megatron's product h·Wᵀ, and its tensor-parallel group."""
    # Megatron asks for it where it overlaps its all-reduce; without CUDA it is not read.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    with warnings.catch_warnings():
        # About optional packages.
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as linear

    # A worker of a run has done so.
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=group.size())
    tp_group = parallel_state.get_tensor_model_parallel_group()

    def logits(problem: HeadProblem) -> torch.Tensor:
        made: torch.Tensor = linear(
            problem.hidden,
            problem.weight,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=True,
            sequence_parallel=False,
            tp_group=tp_group,
        )
        return made

    return logits, tp_group
