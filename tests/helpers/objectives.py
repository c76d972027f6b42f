"""An algorithm's objective as a trainer computes it: local sums of micro-batches over global denominators."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.types import Algorithm, AlgoState, PolicyOutputs, Row, RowBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Rows with every score, as float64 [B, T]; 0 outside the mask, as the worker delivers them."""

    mask: Tensor
    logprobs: Tensor
    entropy: Tensor
    quantities: Mapping[str, Tensor]

    def rows(self) -> list[Row]:
        """The rows of the host, with one prompt token."""
        return [
            Row(
                uid="q",
                sample_index=i,
                token_ids=np.zeros(self.mask.shape[1] + 1, dtype=np.int32),
                num_prompt_tokens=1,
                loss_mask=mask.numpy(),
                quantities={name: values[i].numpy() for name, values in self.quantities.items()},
            )
            for i, mask in enumerate(self.mask)
        ]

    def transformed(self, change: Callable[[Tensor], Tensor]) -> "Problem":
        """With every tensor changed alike."""
        return Problem(
            mask=change(self.mask),
            logprobs=change(self.logprobs),
            entropy=change(self.entropy),
            quantities={name: change(value) for name, value in self.quantities.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Reduced results of an optimizer mini-batch: the loss, metrics, and gradients [B, T] of what a policy answers."""

    loss: float
    metrics: dict[str, float]
    logprobs_grad: Tensor
    entropy_grad: Tensor


def run(
    algo: Algorithm,
    problem: Problem,
    *,
    micro_batches: Sequence[Sequence[int]] | None = None,
    state: AlgoState | None = None,
) -> Outcome:
    """Add up the shares of all micro-batches, which list rows and are padded to their own width (None: one, as it is).

    Metrics of micro-batches have the same names, or data-parallel ranks could not add them up.
    """
    state, counts = state or algo.initial_state(), algo.denominators(problem.rows())
    logprobs, entropy = (x.clone().requires_grad_() for x in (problem.logprobs, problem.entropy))
    loss, shares = 0.0, list[dict[str, float]]()
    for rows in [list(range(len(problem.mask)))] if micro_batches is None else micro_batches:
        width = problem.mask.shape[1] if micro_batches is None else _width(problem.mask[list(rows)])
        own = logprobs[list(rows), :width]
        # A divergence that depends on the log-probs, for losses that read one; as a head's, only at loss tokens.
        inside = problem.mask[list(rows), :width]
        divergence = own.where(inside, 0.0).square().where(inside, own.detach())
        out = PolicyOutputs(
            logprobs=own,
            entropy=entropy[list(rows), :width],
            divergence=divergence,
            comparison={"teacher_logprobs": own.detach().where(inside, 0.0) / 2},
        )
        sums = algo.loss(_micro_batch(problem, rows, width), out, state)
        share = sums.total(counts)
        share.backward()
        loss += share.item()
        shares.append(sums.shares(counts))
        assert not any(value.requires_grad for part in sums.metrics.values() for value in part.values())
    assert all(names.keys() == shares[0].keys() for names in shares)
    return Outcome(
        loss=loss,
        metrics={name: sum(share[name] for share in shares) for name in shares[0]},
        logprobs_grad=torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad,
        entropy_grad=torch.zeros_like(entropy) if entropy.grad is None else entropy.grad,
    )


def append_padding(x: Tensor) -> Tensor:
    """Two more columns."""
    return torch.cat([x, x.new_zeros(len(x), 2)], dim=1)


def _width(mask: Tensor) -> int:
    columns = mask.any(0).nonzero()
    return int(columns.max()) + 1 if len(columns) else 0


def _micro_batch(problem: Problem, rows: Sequence[int], width: int) -> RowBatch:
    """As `row_batch` makes it: without rows there are no quantities."""
    return RowBatch(
        labels=tuple(f"q/{i}" for i in rows),
        loss_mask=problem.mask[list(rows), :width],
        quantities={name: values[list(rows), :width] for name, values in problem.quantities.items()} if rows else {},
    )
