"""What is done with a chunk of logits: three statistics per row, and their gradient written over them.

For raw logits r = h·Wᵀ of one vocabulary shard, temperature T and label y:  z = r/T.
"""

from typing import Protocol

from torch import Tensor


class ChunkKernels(Protocol):
    """Two passes over a chunk of logits. Labels are local: −1 where another rank owns the label."""

    def statistics(self, logits: Tensor, inverse_temperature: Tensor, labels: Tensor, out: Tensor) -> None:
        """Write the statistics of each row of z into `out` [3, n]: lse, entropy of the local softmax, z of the label.

        lse = log Σ_v e^{z_v} and H = lse − Σ_v p_v z_v over this shard alone (nats); the third is 0 where the label
        is not owned. logits: [n, V] raw, left as they are, V ≥ 1. inverse_temperature: [n]. labels: [n] int64.
        """

    def write_gradient(
        self,
        logits: Tensor,
        inverse_temperature: Tensor,
        labels: Tensor,
        *,
        lse: Tensor,
        grad_logprobs: Tensor,
        a: Tensor,
        b: Tensor | None,
    ) -> None:
        """Overwrite raw logits [n, V] by the gradient with respect to them.

        With log p_v = z_v − lse (lse: [n], of the whole vocabulary):
            ∂L/∂r_v = (−p_v (a + b·log p_v) + grad_logprobs·1[v = label]) / T.
        For L = Σ g_l·log p(label) + g_H·H:  a = g_l + g_H·H and b = g_H; b is None where it is 0.
        """
