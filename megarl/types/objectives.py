"""Define the interface between trainer and algorithms: losses, their sums and denominators, and their state."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

from megarl.config.torch_later import Tensor, torch
from megarl.types.batches import Advantages, PolicyOutputs, RowBatch, ScoredBatch
from megarl.types.rows import Row, TokenQuantity

# The numbers that sums are divided by, under names that the objective chooses: counts over one optimizer mini-batch
# (all micro-batches × data-parallel ranks), at least 1 each.
Denominators: TypeAlias = dict[str, float]
# The denominator of a sum over pairs. Rows of the first half of such a mini-batch belong to those of the second, in the
# same order, and a micro-batch has both of a pair, in halves, too.
PAIRS = "pairs"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Local sums over a micro-batch. Each is stored under the name of the denominator that it will be divided by.

    objective: scalars with graph; the objective is Σ sum / denominator, added in this order.
    metrics: detached scalars by denominator and metric name; a metric is sum / denominator.

    >>> sums = LossSums(
    ...     objective={"rows": torch.tensor(6.0), "tokens": torch.tensor(2.0)},
    ...     metrics={"tokens": {"entropy": torch.tensor(2.0)}},
    ... )
    >>> sums.total({"rows": 3.0, "tokens": 4.0}).item(), sums.shares({"rows": 3.0, "tokens": 4.0})
    (2.5, {'entropy': 0.5})
    """

    objective: Mapping[str, Tensor]
    metrics: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def total(self, denominators: Denominators) -> Tensor:
        """Compute this micro-batch's share of the objective, with gradients."""
        return functools.reduce(torch.add, (value / denominators[name] for name, value in self.objective.items()))

    def shares(self, denominators: Denominators) -> dict[str, float]:
        """Return this micro-batch's share of every metric, sum / denominator, by metric name."""
        return {
            metric: float(value) / denominators[name]
            for name, sums in self.metrics.items()
            for metric, value in sums.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProbs:
    """The probabilities of the policy p and the engine q at the tokens of recorded heads, in place of n tokens.

    log_p, log_q: [n, K] in nats, normalised over what could be sampled; the least number and −∞ where there is no
    token, and log_p also where another rank has it. rest_p, rest_q: [n] the probability of all other tokens.
    """

    log_p: Tensor
    log_q: Tensor
    rest_p: Tensor
    rest_q: Tensor


class HeadMeasure(Protocol):
    """A number per token that a loss takes of the policy beside the engine's head; it is picklable.

    keeps_sampled: whether the sampled token belongs to the head also where it is not among the likeliest.
    """

    @property
    def keeps_sampled(self) -> bool: ...

    def slopes(self, x: HeadProbs) -> Tensor | None:
        """Return its derivatives by log_p, [n, K], each from that token and the rests alone; None: it has none."""

    def value(self, x: HeadProbs, slopes: Tensor | None) -> Tensor:
        """Return it, [n], given its slopes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyState:
    """The coefficient of the entropy bonus, and the moments of its optimizer after `num_updates` updates."""

    coef: float = 0.0
    exp_avg: float = 0.0
    exp_avg_sq: float = 0.0
    num_updates: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoState:
    """State of an algorithm between batches: the KL coefficient, and the state of the entropy bonus."""

    kl_coef: float = 0.0
    entropy: EntropyState = field(default_factory=EntropyState)


OutputsT = TypeVar("OutputsT", contravariant=True)


class Objective(Protocol[OutputsT]):
    """A loss of a model's outputs that the trainer's ranks differentiate; it is picklable and stateless."""

    @property
    def entropy_needs_grad(self) -> bool:
        """Return whether the loss differentiates through the entropy."""

    @property
    def token_local(self) -> bool:
        """Return whether the loss is a sum over tokens, each term depending only on the outputs for its token."""

    @property
    def reads(self) -> frozenset[str]:
        """Return the names of the quantities that the loss reads if rows have them; other quantities are not sent to
        ranks.
        """

    def loss(self, rows: RowBatch, out: OutputsT, state: AlgoState) -> LossSums:
        """Return the local sums of the loss and of its metrics over a micro-batch."""


class Algorithm(Objective[PolicyOutputs], Protocol):
    """An RL algorithm: the loss, the advantages and the denominators. Implementations are picklable and stateless."""

    def requires(self) -> frozenset[TokenQuantity]:
        """Return the names of the quantities that must be computed for the whole batch before `advantages` is
        called.
        """

    def initial_state(self) -> AlgoState:
        """Return the algorithm's state (such as the KL coefficient) before the first step."""

    def advantages(self, batch: ScoredBatch, state: AlgoState) -> Advantages:
        """Compute the advantages of a step, given complete groups; this runs on the host."""

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        """Compute a mini-batch's denominators from its rows on all ranks, before the first backward pass."""

    def after_step(self, state: AlgoState, metrics: Mapping[str, float], num_rows: int) -> AlgoState:
        """Return the algorithm's state for the next step, given this step's metrics over all ranks."""
