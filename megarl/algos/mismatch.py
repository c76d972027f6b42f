"""Measure how far the rollout engine's log-probs are from the trainer's, for the same tokens and model weights.

Engine and trainer run different kernels, so the policy that sampled is not exactly the policy that is trained.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megarl.algos.kl import MAX_EXPONENT, MAX_K3
from megarl.algos.masked import BlockSums
from megarl.config.torch_later import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchSums(BlockSums):
    """Sums of Δ = rollout_logprobs − logprobs, in nats, over loss tokens and over rows that have loss tokens."""

    largest: ClassVar[str] = "abs_max"
    num_tokens: int = 0
    num_rows: int = 0
    abs_sum: float = 0.0
    k1_sum: float = 0.0
    k3_sum: float = 0.0
    abs_max: float = 0.0
    num_above_2x: int = 0
    seq_abs_sum: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Compute the token means of |Δ|, Δ (k1) and k3, max |Δ|, the share of tokens whose probabilities differ by
        more than 2×, and the mean over rows of |Σ Δ|. k1 and k3 estimate KL(rollout ‖ trainer).
        """
        tokens, rows = max(self.num_tokens, 1), max(self.num_rows, 1)
        return {
            "mismatch/abs_mean": self.abs_sum / tokens,
            "mismatch/k1": self.k1_sum / tokens,
            "mismatch/k3": self.k3_sum / tokens,
            "mismatch/abs_max": self.abs_max,
            "mismatch/frac_above_2x": self.num_above_2x / tokens,
            "mismatch/seq_abs_mean": self.seq_abs_sum / rows,
        }


def mismatch_sums(rollout_logprobs: Tensor, logprobs: Tensor, loss_mask: Tensor) -> MismatchSums:
    """Compare log-probs [B, T] of engine and trainer for the same tokens, on `loss_mask` (bool [B, T]), in float64.

    >>> mismatch_sums(tensor([[-1.0]]), tensor([[-1.5]]), tensor([[True]])).metrics()["mismatch/k1"]
    0.5
    """
    if not rollout_logprobs.shape == logprobs.shape == loss_mask.shape:
        raise ValueError(
            f"mismatch: got rollout_logprobs {tuple(rollout_logprobs.shape)}, logprobs "
            f"{tuple(logprobs.shape)} and loss_mask {tuple(loss_mask.shape)}, expected one shape"
        )
    # Arrays of this size take a third of the time that tensors take, whose temporaries are new memory each time.
    rollout, trainer, mask = rollout_logprobs.numpy(), logprobs.numpy(), loss_mask.numpy()
    with np.errstate(invalid="ignore"):
        delta = np.subtract(rollout, trainer, dtype=np.float64)
        delta[~mask] = 0.0
        magnitude = np.abs(delta)
        # `k3`, which is 0 where Δ is.
        exponent = np.clip(-delta, -MAX_EXPONENT, MAX_EXPONENT)
        divergence = np.clip(np.exp(exponent) - exponent - 1, -MAX_K3, MAX_K3)
        return MismatchSums(
            num_tokens=int(np.count_nonzero(mask)),
            num_rows=int(mask.any(axis=-1).sum()),
            abs_sum=float(magnitude.sum()),
            k1_sum=float(delta.sum()),
            k3_sum=float(divergence.sum()),
            abs_max=float(magnitude.max(initial=0.0)),
            num_above_2x=int(np.count_nonzero(magnitude > math.log(2))),
            seq_abs_sum=float(np.abs(delta.sum(axis=-1)).sum()),
        )
