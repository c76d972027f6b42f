"""What a worker differentiates, what its sums are divided by, and the seam between trainer and algorithms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from megarl.types.batches import Advantages, PolicyOutputs, RowBatch, ScoredBatch
from megarl.types.rows import Row, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Global counts of one optimizer mini-batch (all micro-batches × data-parallel ranks), at least 1 each.

    loss: the aggregation's. tokens: loss tokens; policy_tokens, demonstration_tokens: those that the policy sampled,
    and the others. imitated_tokens: those of an imitation loss beside the policy loss.
    """

    loss: float
    tokens: float
    policy_tokens: float = 1.0
    demonstration_tokens: float = 1.0
    imitated_tokens: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Local sums over a micro-batch; one place divides them by the global `Denominators`.

    loss: scalar with graph, ÷ `Denominators.loss`. imitation: the same, ÷ `Denominators.imitated_tokens`.
    Detached scalars by metric name: loss_parts ÷ `Denominators.loss`, token_sums ÷ tokens, policy_sums ÷
    policy_tokens, demonstration_sums ÷ demonstration_tokens, imitation_sums ÷ imitated_tokens.
    """

    loss: torch.Tensor
    imitation: torch.Tensor | None = None
    loss_parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    token_sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    policy_sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    demonstration_sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    imitation_sums: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def total(self, denominators: Denominators) -> torch.Tensor:
        """This micro-batch's share of the objective, with graph."""
        total = self.loss / denominators.loss
        return total if self.imitation is None else total + self.imitation / denominators.imitated_tokens

    def shares(self, denominators: Denominators) -> dict[str, float]:
        """This micro-batch's share of every metric."""
        return {
            name: float(value) / count
            for sums, count in (
                (self.loss_parts, denominators.loss),
                (self.token_sums, denominators.tokens),
                (self.policy_sums, denominators.policy_tokens),
                (self.demonstration_sums, denominators.demonstration_tokens),
                (self.imitation_sums, denominators.imitated_tokens),
            )
            for name, value in sums.items()
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
        """The state of which `dataclasses.asdict` made `state`."""
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
