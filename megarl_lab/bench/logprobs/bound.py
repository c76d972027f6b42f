"""The matrix multiplications of a head alone: what its time cannot fall below.

Forward: z = h·Wᵀ. Backward: z again, dX = z·W, dW += zᵀ·h; z stands for its gradient, as times do not depend on values.
"""

from typing import Any

import torch

from megarl_lab.bench.logprobs.problem import HeadProblem, Outputs

# Rows at a time: so many that the products run at full speed, and on CPU so few that little memory is touched first.
_CHUNK_ROWS = {"cpu": 256}
_DEVICE_CHUNK_ROWS = 4096


def bare_gemms(problem: HeadProblem) -> Outputs:
    """One GEMM in forward and three in backward, with a column of logits for log-probs."""
    return Outputs(logprobs=_Gemms.apply(problem.hidden, problem.weight), entropy=None)


class _Gemms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        column = hidden.new_empty(len(hidden))
        buffer, chunks = _chunks(hidden, weight)
        for rows in chunks:
            column[rows] = torch.mm(hidden[rows], weight.t(), out=buffer[: rows.stop - rows.start])[:, 0]
        return column

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        buffer, chunks = _chunks(hidden, weight)
        for rows in chunks:
            logits = torch.mm(hidden[rows], weight.t(), out=buffer[: rows.stop - rows.start])
            torch.mm(logits, weight, out=grad_hidden[rows])
            grad_weight.addmm_(logits.t(), hidden[rows])
        return grad_hidden, grad_weight


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, list[slice]]:
    """A buffer for logits, and the rows that fill it in turn."""
    num_rows = len(hidden)
    chunk = min(num_rows, _CHUNK_ROWS.get(hidden.device.type, _DEVICE_CHUNK_ROWS))
    slices = [slice(start, min(start + chunk, num_rows)) for start in range(0, num_rows, chunk)]
    return hidden.new_empty(chunk, len(weight)), slices
