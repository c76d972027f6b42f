"""Define objectives for a user's own loop (cross-entropy, importance sampling, and functions of the user), and
supervised fine-tuning as an `Algorithm` without advantages, so that the trainer of RL can run it.

All are sums over loss tokens. Where rows have the quantity `correction`, it is a weight per token, as in the losses of
`POLICY_LOSSES`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn, TypeAlias

from megarl.algos.aggregation import count_rows
from megarl.algos.composed import ComposedAlgorithm
from megarl.algos.corrections import CORRECTION
from megarl.algos.distill import comparison, weighed_divergence
from megarl.algos.masked import kept, masked_sum, require_per_token
from megarl.algos.policy_losses import MAX_LOG_RATIO, POLICY_LOSSES
from megarl.config.algo import DistillConfig, PolicyLossConfig
from megarl.config.torch_later import Tensor, torch
from megarl.errors import ConfigError
from megarl.registry import unknown_name
from megarl.types import (
    AlgoState,
    Denominators,
    LossSums,
    PolicyOutputs,
    Row,
    RowBatch,
    ScoredBatch,
    TokenQuantity,
    ValueOutputs,
)

# Returns the loss [B, T] of each token; what it is outside the loss mask does not matter.
TokenLoss: TypeAlias = Callable[[RowBatch, PolicyOutputs], Tensor]
ROLLOUT_LOGPROBS = "rollout_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSampling:
    """An objective for off-policy samples: the mean over loss tokens of −r·A, with r = exp(logprobs −
    rollout_logprobs), the exponent clamped to ±20. There is no clip: the gradient is r·A·∇logprobs at any ratio.
    """

    entropy_needs_grad: ClassVar[bool] = False
    token_local: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"advantages", ROLLOUT_LOGPROBS, CORRECTION})

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        return {"tokens": float(max(count_rows(rows).num_tokens, 1))}

    def loss(self, rows: RowBatch, out: PolicyOutputs, state: AlgoState) -> LossSums:
        mask = rows.loss_mask
        log_ratio = kept(out.logprobs, mask) - kept(rows.quantity(ROLLOUT_LOGPROBS), mask)
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        loss = masked_sum(-weighted(ratio, rows) * kept(rows.quantity("advantages"), mask), mask)
        metrics = {"actor/is_ratio": masked_sum(ratio.detach(), mask)}
        return LossSums(objective={"tokens": loss}, metrics={"tokens": metrics})


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnObjective:
    """An objective made of a function of the user, which returns the loss of each token; the loss is their mean.

    function: must be picklable, and see only its arguments; it is not called for a batch without rows. reads: the
    quantities of rows that it needs. token_local: whether each token's loss depends on that token alone, which saves
    memory. entropy_needs_grad: whether gradients flow through the entropy.
    """

    function: TokenLoss
    reads: frozenset[str] = frozenset()
    token_local: bool = False
    entropy_needs_grad: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", self.reads | {CORRECTION})

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        return {"tokens": float(max(count_rows(rows).num_tokens, 1))}

    def loss(self, rows: RowBatch, out: PolicyOutputs, state: AlgoState) -> LossSums:
        per_token = self.function(rows, out) if rows.labels else out.logprobs
        require_per_token(per_token, rows.loss_mask, "the loss")
        return LossSums(objective={"tokens": masked_sum(weighted(per_token, rows), rows.loss_mask)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SftAlgorithm:
    """An objective for fine-tuning: the mean of −logprobs over loss tokens, the cross-entropy to the data in nats.

    Where rows have the quantity `correction`, it is a weight per token.

    distill: with a teacher, coef times the mean divergence from it on these tokens, instead.
    """

    distill: DistillConfig = field(default_factory=DistillConfig)
    entropy_needs_grad: ClassVar[bool] = False
    token_local: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({CORRECTION})

    def requires(self) -> frozenset[TokenQuantity]:
        return frozenset()

    def initial_state(self) -> AlgoState:
        return AlgoState()

    def advantages(self, batch: ScoredBatch, state: AlgoState) -> NoReturn:
        raise TypeError("supervised fine-tuning has no advantages; update on the rows directly")

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        return {"tokens": float(max(count_rows(rows).num_tokens, 1))}

    def loss(self, rows: RowBatch, out: PolicyOutputs, state: AlgoState) -> LossSums:
        nll = masked_sum(weighted(-out.logprobs, rows), rows.loss_mask)
        metrics = {"sft/nll": nll.detach()}
        if not self.distill.is_dense:
            return LossSums(objective={"tokens": nll}, metrics={"tokens": metrics})
        divergence = masked_sum(weighed_divergence(rows, out, self.distill), rows.loss_mask)
        found = {name: masked_sum(values, rows.loss_mask) for name, values in comparison(out, self.distill).items()}
        metrics |= {"distill/loss": divergence.detach(), **found}
        return LossSums(objective={"tokens": divergence}, metrics={"tokens": metrics})

    def after_step(self, state: AlgoState, metrics: Mapping[str, float], num_rows: int) -> AlgoState:
        return state


def weighted(per_token: Tensor, rows: RowBatch) -> Tensor:
    """Return values [B, T] times the rows' weights per token, if they have any.

    >>> weighted(tensor([[2.0, 3.0]]), rows([[1, 1]], correction=[[0.5, 0.0]])).tolist()
    [[1.0, 0.0]]
    """
    if CORRECTION not in rows.quantities:
        return per_token
    return per_token * kept(rows.quantity(CORRECTION), rows.loss_mask)


OBJECTIVES: Mapping[str, Callable[[], Any]] = {
    "cross_entropy": SftAlgorithm,
    "importance_sampling": ImportanceSampling,
}
ALGORITHM = "algorithm"


def objective_by_name(name: str, algorithm: ComposedAlgorithm) -> Any:
    """Return the objective that a loop names: one of `OBJECTIVES`, the run's own algorithm, or this algorithm with
    another one of `POLICY_LOSSES`, its options at their defaults. ConfigError for other names.

    >>> from megarl.algos.build import build_algorithm
    >>> from megarl.config.algo import AlgoConfig
    >>> own = build_algorithm(AlgoConfig(), max_response_tokens=8)
    >>> objective_by_name("reinforce", own).cfg.policy_loss.name, objective_by_name("algorithm", own) is own
    ('reinforce', True)
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name]()
    if name in (ALGORITHM, algorithm.cfg.policy_loss.name):
        return algorithm
    if name not in POLICY_LOSSES:
        raise unknown_name("objective", name, [ALGORITHM, *OBJECTIVES, *POLICY_LOSSES], key="objective")
    if POLICY_LOSSES.get(name).measure is not None:
        raise ConfigError(
            f"objective: got {name!r}, which reads the distribution of what sampled, but a loop gives rows alone; use "
            "megarl train, or another objective"
        )
    return replace(algorithm, cfg=replace(algorithm.cfg, policy_loss=PolicyLossConfig(name=name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """The critic's loss, PPO's: the mean over loss tokens of ½·max((v − R)², (clip(v, v_old ± clip) − R)²). It follows
    the reference code of arXiv:1707.06347. R is the row's quantity `returns`, v_old its `values`; with `clip`
    None, there is no second term and no need for `values`.
    """

    clip: float | None = None

    entropy_needs_grad: ClassVar[bool] = False
    token_local: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"returns", "values"})

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        """Count the loss tokens of an optimizer mini-batch, because the loss is a mean over tokens."""
        return {"tokens": float(max(count_rows(rows).num_tokens, 1))}

    def loss(self, rows: RowBatch, out: ValueOutputs, state: AlgoState) -> LossSums:
        """Sum the loss over a micro-batch; metrics: `critic/{vf_loss,vf_clipfrac,vpred_mean}`."""
        mask = rows.loss_mask
        values, returns = kept(out.values, mask), kept(rows.quantity("returns"), mask)
        error = (values - returns).square()
        clipped = torch.zeros_like(error)
        if self.clip is not None:
            old = kept(rows.quantity("values"), mask)
            near_old = values.clamp(old - self.clip, old + self.clip)
            clipped = (near_old - returns).square()
        loss = masked_sum(0.5 * torch.maximum(error, clipped), mask)
        return LossSums(
            objective={"tokens": loss},
            metrics={
                "tokens": {
                    "critic/vf_loss": loss.detach(),
                    "critic/vf_clipfrac": masked_sum((clipped > error).to(error.dtype), mask),
                    "critic/vpred_mean": values.detach().sum(),
                }
            },
        )
