"""What a worker differentiates, what its sums are divided by, and the seam between trainer and algorithms."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from megarl.types.batches import Advantages, PolicyOutputs, RowBatch, ScoredBatch
from megarl.types.rows import Row, Score

# What sums are divided by, under names that the objective chooses: counts over one optimizer mini-batch (all
# micro-batches × data-parallel ranks), at least 1 each.
Denominators: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Local sums over a micro-batch, each under the name of its denominator.

    objective: scalars with graph; the objective is Σ sum / denominator, added in this order.
    metrics: detached scalars by denominator and metric name; a metric is sum / denominator.

    >>> sums = LossSums(
    ...     objective={"rows": torch.tensor(6.0), "tokens": torch.tensor(2.0)},
    ...     metrics={"tokens": {"entropy": torch.tensor(2.0)}},
    ... )
    >>> sums.total({"rows": 3.0, "tokens": 4.0}).item(), sums.shares({"rows": 3.0, "tokens": 4.0})
    (2.5, {'entropy': 0.5})
    """

    objective: Mapping[str, torch.Tensor]
    metrics: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)

    def total(self, denominators: Denominators) -> torch.Tensor:
        """Compute this micro-batch's share of the objective, with graph."""
        return functools.reduce(torch.add, (value / denominators[name] for name, value in self.objective.items()))

    def shares(self, denominators: Denominators) -> dict[str, float]:
        """Compute this micro-batch's share of every metric."""
        return {
            metric: float(value) / denominators[name]
            for name, sums in self.metrics.items()
            for metric, value in sums.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyState:
    """The coefficient of the entropy bonus, and the moments of its optimizer after `num_updates` updates."""

    coef: float = 0.0
    exp_avg: float = 0.0
    exp_avg_sq: float = 0.0
    num_updates: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoState:
    """What an algorithm carries from one batch to the next."""

    kl_coef: float = 0.0
    entropy: EntropyState = field(default_factory=EntropyState)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "AlgoState":
        """Restore the state of which `dataclasses.asdict` made `state`."""
        return cls(kl_coef=state["kl_coef"], entropy=EntropyState(**state["entropy"]))


OutputsT = TypeVar("OutputsT", contravariant=True)


class Objective(Protocol[OutputsT]):
    """What a worker differentiates: a picklable, stateless loss of a model's outputs."""

    @property
    def entropy_needs_grad(self) -> bool:
        """Whether the loss differentiates the entropy."""

    @property
    def token_local(self) -> bool:
        """Whether the loss is a sum over tokens, each term a function of its own token's outputs alone."""

    @property
    def reads(self) -> frozenset[str]:
        """Scores of rows that the loss reads where rows have them; the others stay with the driver."""

    def loss(self, rows: RowBatch, out: OutputsT, state: AlgoState) -> LossSums:
        """Local sums over a micro-batch."""


class Algorithm(Objective[PolicyOutputs], Protocol):
    """The seam between the trainer and what it optimises. Implementations are picklable and stateless."""

    def requires(self) -> frozenset[Score]:
        """Scores that must be computed before `advantages`, for the whole batch."""

    def initial_state(self) -> AlgoState:
        """State before the first step."""

    def advantages(self, batch: ScoredBatch, state: AlgoState) -> Advantages:
        """Advantages of complete groups, on the host."""

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        """Global counts of an optimizer mini-batch, known before its first backward."""

    def after_step(self, state: AlgoState, metrics: Mapping[str, float], num_rows: int) -> AlgoState:
        """State for the next step, from this step's reduced metrics."""
