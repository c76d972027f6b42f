"""Define the interface of advantage estimators, and run the estimator that the configuration names."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from megarl.algos.masked import kept, require_per_token
from megarl.algos.token_rewards import KL_PENALTY, TURN_REWARDS
from megarl.config.algo import AdvantageConfig, AlgoConfig
from megarl.config.torch_later import Tensor, torch
from megarl.errors import DataError
from megarl.registry import FunctionRegistry, require_fields, require_known
from megarl.types import ScoredBatch, TokenQuantity

# Name of the detail that holds the reward of the greedy response to a row's prompt.
GREEDY_SCORE = "greedy_score"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Advantages [B, T], 0 outside the loss mask; `returns` [B, T] are the targets of a critic, or None without one."""

    advantages: Tensor
    returns: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """Rows (bool [B]) whose advantages change sign, before or after normalisation; their returns do not change."""

    rows: Tensor
    stage: Literal["before_whiten", "after_whiten"]

    def apply(self, advantages: Tensor) -> Tensor:
        return torch.where(self.rows[:, None], -advantages, advantages)


RawEstimator: TypeAlias = Callable[[ScoredBatch, AdvantageConfig], Estimate | Tensor]
Normaliser: TypeAlias = Callable[[Tensor, ScoredBatch, AdvantageConfig], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """An advantage estimator: `raw` computes advantages in float64, then `normalise` scales them over the batch.

    `raw` returns an `Estimate`, whose advantages are 0 outside the loss mask, or one number per row [B], which is the
    advantage of all its loss tokens. options: the fields of `AdvantageConfig` that the estimator reads. needs_values:
    whether it reads a critic's values. min_group: the smallest number of samples per prompt it accepts. needs_greedy:
    whether it reads `GREEDY_SCORE`, for which a greedy response to each prompt is generated. reads_rewards: whether it
    reads the rewards. refuses_negative: whether it fails on rewards below 0. reads: the quantities of a pass before the
    update that it needs.
    """

    raw: RawEstimator = field(kw_only=False)
    normalise: Normaliser | None = None
    options: Collection[str] = ()
    needs_values: bool = False
    min_group: int = 1
    needs_greedy: bool = False
    reads_rewards: bool = True
    refuses_negative: bool = False
    reads: Collection[str] = ()

    def __post_init__(self) -> None:
        require_fields(self.options, AdvantageConfig)
        require_known("reads", self.reads, [quantity.value for quantity in TokenQuantity])

    def __call__(self, batch: ScoredBatch, cfg: AdvantageConfig, flip: Flip | None = None) -> Estimate:
        """Compute advantages and returns, and convert them to the dtype of the rewards."""
        estimate, dtype = self.raw(batch, cfg), batch.rewards.dtype
        if isinstance(estimate, Tensor):
            # Nothing is computed per token if nothing normalises.
            per_row = estimate if self.normalise is not None else estimate.to(dtype)
            estimate = Estimate(advantages=torch.where(batch.loss_mask, per_row[:, None], 0.0))
        advantages = estimate.advantages
        require_per_token(advantages, batch.loss_mask, f"the estimate of algo.advantage.estimator={cfg.estimator}")
        if flip is not None and flip.stage == "before_whiten":
            advantages = flip.apply(advantages)
        if self.normalise is not None:
            advantages = self.normalise(advantages, batch, cfg)
        if flip is not None and flip.stage == "after_whiten":
            advantages = flip.apply(advantages)
        returns = None if estimate.returns is None else estimate.returns.to(dtype)
        return replace(estimate, advantages=advantages.to(dtype), returns=returns)


ADVANTAGE_ESTIMATORS: FunctionRegistry[RawEstimator, Estimator] = FunctionRegistry(
    "advantage estimator", key="algo.advantage.estimator", entry=Estimator, parameters=("batch", "cfg")
)


def estimator_of(cfg: AlgoConfig) -> Estimator:
    """Return the configured estimator, or `critic_value` if algo.reward.source=critic overrides the configured one.

    >>> estimator_of(AlgoConfig(reward=RewardConfig(source="critic"))).needs_values
    True
    """
    named = ADVANTAGE_ESTIMATORS.get(cfg.advantage.estimator)
    return ADVANTAGE_ESTIMATORS.get("critic_value") if cfg.reward.source == "critic" else named


def compute_advantages(batch: ScoredBatch, cfg: AdvantageConfig, flip: Flip | None = None) -> Estimate:
    """Run the configured estimator; raise DataError if a reward (of a turn, too), KL penalty, critic value or resulting
    advantage is NaN or infinite.

    >>> cfg = AdvantageConfig(estimator="dr_grpo")
    >>> compute_advantages(step("aa", [1.0, 0.0]), cfg).advantages.tolist()
    [[0.5], [-0.5]]
    """
    estimator = ADVANTAGE_ESTIMATORS.get(cfg.estimator)
    _require_finite(batch, "reward", batch.rewards, "check the scorer")
    remedies = {
        TURN_REWARDS: "check the environment",
        KL_PENALTY: "check the model and the log-probs it is computed from",
        TokenQuantity.VALUES: "check the critic",
    }
    for name in remedies.keys() & batch.quantities.keys():
        rows = kept(batch.quantities[name], batch.loss_mask).sum(-1, dtype=torch.float64)
        _require_finite(batch, f"sum of {name}", rows, remedies[name])
    estimate = estimator(batch, cfg, flip)
    for what, values in (("advantage", estimate.advantages), ("return", estimate.returns)):
        if values is not None:
            _require_finite(batch, f"sum of {what}s", values.sum(-1, dtype=torch.float64), "make the rewards smaller")
    return estimate


def required_detail(batch: ScoredBatch, name: str, remedy: str) -> Tensor:
    """Return a detail of the rewards as float64 [B].

    It is NaN for rows on which no scorer has an opinion; any other row without a finite number raises DataError. The
    reward itself (`score`) and `correct`, 1 or 0, are details, too.

    >>> required_detail(step("aa", [1.0, 0.0]), "correct", "").tolist()
    [1.0, 0.0]
    """
    known = {"score": batch.rewards, "correct": batch.correct, **batch.details}
    values = known.get(name, torch.full_like(batch.rewards, torch.nan)).double()
    no_rows = torch.zeros_like(values, dtype=torch.bool)
    # A function without a score of its own says nothing else, either.
    by_function = batch.no_opinion.get(f"{name.partition('/')[0]}/score", no_rows)
    excused = batch.no_opinion.get(name, no_rows) | by_function
    for row in (~values.isfinite() & ~excused).nonzero().flatten().tolist():
        finite = sorted(key for key, value in known.items() if value[row].isfinite())
        raise DataError(
            f"row {row} (uid {batch.uids[row]!r}) has no number {name!r} beside its reward, but {', '.join(finite)}; "
            f"{remedy}"
        )
    return values


def _require_finite(batch: ScoredBatch, what: str, rows: Tensor, remedy: str) -> None:
    bad = (~rows.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise DataError(
            f"{what} of row {bad[0]} (uid {batch.uids[bad[0]]!r}): got {rows[bad[0]].item()}, expected a finite "
            f"number (float32 ends at 3.4e38); {remedy}"
        )
