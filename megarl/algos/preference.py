"""Define the objectives that train reward models and policies on pairs of a preferred and a rejected response."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from megarl.algos.masked import masked_sum, per_row
from megarl.config.schema import TrainPreferenceConfig
from megarl.config.torch_later import Tensor, torch
from megarl.registry import FunctionRegistry, refuse_unused, require_fields
from megarl.types import (
    PAIRS,
    AlgoState,
    Denominators,
    LossSums,
    PolicyOutputs,
    Row,
    RowBatch,
    TokenQuantity,
    ValueOutputs,
)
from megarl.types.rows import MARGIN

# KL(policy ‖ reference) of a whole batch, estimated on prompts with responses of other rows; the same in each token.
BATCH_KL = "batch_kl"
# Mean log-probs nearer to 0 count as this in `orpo_losses`: the odds of a certain response are infinite.
_MAX_MEAN_LOGPROB = -1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class BradleyTerry:
    """A loss for reward models: the mean of −log σ(r_chosen − r_rejected − margin) over pairs of rows. The source is
    Bradley and Terry (1952), with the margins of arXiv:2307.09288. The first half of a batch are chosen rows, the
    second half the rejected rows of the same pairs. A pair is never split, because its gradient needs both scores.
    Each row has one score r (`row_read_at_end`) and a `margin`, which is 0 in rejected rows.
    """

    entropy_needs_grad: ClassVar[bool] = False
    token_local: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset({MARGIN})

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        """Count the pairs of an optimizer mini-batch."""
        return {PAIRS: max(len(rows) / 2, 1.0)}

    def loss(self, rows: RowBatch, out: ValueOutputs, state: AlgoState) -> LossSums:
        """Sum the loss over a micro-batch's pairs. Metrics: share of pairs with r_chosen > r_rejected, mean difference
        and scores. Pairs with equal scores count as wrong.
        """
        num_pairs = len(out.values) // 2
        # Each row has one token, or none in a micro-batch without rows.
        mask = rows.loss_mask
        scores, margin = masked_sum(out.values, mask, dim=1), masked_sum(rows.quantity(MARGIN), mask, dim=1)[:num_pairs]
        chosen, rejected = scores[:num_pairs], scores[num_pairs:]
        difference = chosen - rejected
        with torch.no_grad():
            parts = {
                "accuracy": (difference > 0).float().sum(),
                "margin": difference.sum(),
                "score_chosen": chosen.sum(),
                "score_rejected": rejected.sum(),
            }
        return LossSums(
            objective={PAIRS: torch.nn.functional.softplus(margin - difference).sum()},
            metrics={PAIRS: {f"reward_model/{name}": value for name, value in parts.items()}},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLogprobs:
    """Log-probs of pairs of responses: row 0 of each [2, P] tensor are the chosen ones, row 1 the rejected.

    logprobs: log-probs of whole responses. log_ratios: the same less those of the reference model (0 for losses that
    have none). num_tokens: lengths of the responses. kl: what `BATCH_KL` stands for (0 for losses that do not read it).
    """

    logprobs: Tensor
    log_ratios: Tensor
    num_tokens: Tensor
    kl: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLosses:
    """The losses of pairs [P], and the implicit rewards [2, P] of their chosen and rejected responses."""

    losses: Tensor
    rewards: Tensor


PairLossFunction: TypeAlias = Callable[[PairLogprobs, TrainPreferenceConfig], PairLosses]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """A loss of a policy on pairs. reads: the quantities of rows it needs. options: the settings that it alone
    reads.
    """

    of_pairs: PairLossFunction = field(kw_only=False)
    reads: Collection[str] = ()
    options: Collection[str] = ()

    def __post_init__(self) -> None:
        require_fields(self.options, TrainPreferenceConfig)


PREFERENCE_LOSSES: FunctionRegistry[PairLossFunction, PreferenceLoss] = FunctionRegistry(
    "objective", key="train_preference.objective", entry=PreferenceLoss, parameters=("pairs", "cfg")
)


@PREFERENCE_LOSSES.register("dpo", reads=(TokenQuantity.REF_LOGPROBS,))
def dpo_losses(pairs: PairLogprobs, cfg: TrainPreferenceConfig) -> PairLosses:
    """Compute DPO's losses (arXiv:2305.18290): −log σ(r_chosen − r_rejected) with r = β·ln(π/π_ref) of a response.

    >>> round(dpo_losses(pairs([[2.0], [0.0]]), TrainPreferenceConfig(beta=0.5)).losses.item(), 4)  # −log σ(1)
    0.3133
    """
    rewards = cfg.beta * pairs.log_ratios
    return PairLosses(losses=-torch.nn.functional.logsigmoid(rewards[0] - rewards[1]), rewards=rewards)


@PREFERENCE_LOSSES.register("ipo", reads=(TokenQuantity.REF_LOGPROBS,))
def ipo_losses(pairs: PairLogprobs, cfg: TrainPreferenceConfig) -> PairLosses:
    """Compute IPO's losses (arXiv:2310.12036): (h_chosen − h_rejected − 1/(2β))², h the mean of ln(π/π_ref) per token.

    The paper has sums instead of means; means, as in TRL, keep long responses from setting the scale.

    >>> ipo_losses(pairs([[2.0], [0.0]], num_tokens=[[1], [4]]), TrainPreferenceConfig(beta=0.5)).losses.item()
    1.0
    """
    means = pairs.log_ratios / pairs.num_tokens
    return PairLosses(losses=(means[0] - means[1] - 1 / (2 * cfg.beta)).square(), rewards=cfg.beta * means)


@PREFERENCE_LOSSES.register(
    "kto", reads=(TokenQuantity.REF_LOGPROBS, BATCH_KL), options=("desirable_weight", "undesirable_weight")
)
def kto_losses(pairs: PairLogprobs, cfg: TrainPreferenceConfig) -> PairLosses:
    """Compute KTO's losses (arXiv:2402.01306), the mean of λ_D·(1 − σ(r_chosen − z)) and λ_U·(1 − σ(z − r_rejected)).

    r = β·ln(π/π_ref) of a response, and z = β·KL(π ‖ π_ref) of the batch.

    >>> kto_losses(pairs([[0.0], [0.0]]), TrainPreferenceConfig()).losses.item()
    0.5
    """
    rewards, threshold = cfg.beta * pairs.log_ratios, cfg.beta * pairs.kl
    chosen = cfg.desirable_weight * torch.sigmoid(threshold[0] - rewards[0])
    rejected = cfg.undesirable_weight * torch.sigmoid(rewards[1] - threshold[1])
    return PairLosses(losses=(chosen + rejected) / 2, rewards=rewards)


@PREFERENCE_LOSSES.register("orpo")
def orpo_losses(pairs: PairLogprobs, cfg: TrainPreferenceConfig) -> PairLosses:
    """Compute ORPO's losses (arXiv:2403.07691): −ln p_chosen − β·log σ(ln odds_chosen − ln odds_rejected).

    p is the geometric mean of a response's token probabilities, and odds = p/(1 − p).

    >>> halves = pairs([[0.0], [0.0]], logprobs=[[-0.6931], [-0.6931]])  # ln ½
    >>> round(orpo_losses(halves, TrainPreferenceConfig(beta=1.0)).losses.item(), 3)  # 2·ln 2
    1.386
    """
    means = (pairs.logprobs / pairs.num_tokens).clamp(max=_MAX_MEAN_LOGPROB)
    log_odds = means - torch.log(-torch.expm1(means))
    losses = -means[0] - cfg.beta * torch.nn.functional.logsigmoid(log_odds[0] - log_odds[1])
    return PairLosses(losses=losses, rewards=cfg.beta * means)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceObjective:
    """An objective for policies: the mean over pairs of the loss that `cfg.objective` names.

    As for `BradleyTerry`, the first half of a batch are chosen rows, the second half the rejected rows of the same
    pairs, and a pair is never split.
    """

    cfg: TrainPreferenceConfig

    entropy_needs_grad: ClassVar[bool] = False
    token_local: ClassVar[bool] = False

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(map(str, PREFERENCE_LOSSES.get(self.cfg.objective).reads))

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        """Count the pairs of an optimizer mini-batch."""
        return {PAIRS: max(len(rows) / 2, 1.0)}

    def loss(self, rows: RowBatch, out: PolicyOutputs, state: AlgoState) -> LossSums:
        """Sum the losses of a micro-batch's pairs; metrics say, for example, how often the chosen answer wins."""
        shape, mask = (2, len(out.logprobs) // 2), rows.loss_mask
        logprobs = masked_sum(out.logprobs, mask, dim=1).reshape(shape)
        log_ratios, kl = (torch.zeros_like(logprobs) for _ in range(2))
        if TokenQuantity.REF_LOGPROBS in self.reads:
            # Subtract before summing: the sums are large, and float32 would lose their difference.
            log_ratios = masked_sum(out.logprobs - rows.quantity(TokenQuantity.REF_LOGPROBS), mask, dim=1).reshape(
                shape
            )
        if BATCH_KL in self.reads:
            kl = per_row(rows.quantity(BATCH_KL), mask).reshape(shape)
        num_tokens = mask.sum(1).clamp(min=1).reshape(shape)
        pairs = PairLogprobs(logprobs=logprobs, log_ratios=log_ratios, num_tokens=num_tokens, kl=kl)
        result = PREFERENCE_LOSSES.get(self.cfg.objective).of_pairs(pairs, self.cfg)
        (chosen, rejected), (chosen_logprobs, rejected_logprobs) = result.rewards.detach(), logprobs.detach()
        parts = {
            "loss": result.losses.detach(),
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "logprobs_chosen": chosen_logprobs,
            "logprobs_rejected": rejected_logprobs,
            **({"kl": kl[0]} if BATCH_KL in self.reads else {}),
        }
        return LossSums(
            objective={PAIRS: result.losses.sum()},
            metrics={PAIRS: {f"preference/{name}": values.sum() for name, values in parts.items()}},
        )


def preference_objective(cfg: TrainPreferenceConfig) -> PreferenceObjective:
    """Make the objective that `cfg` names. Raises ConfigError for an unknown name, or a setting that nothing reads.

    >>> sorted(preference_objective(TrainPreferenceConfig(objective="kto")).reads)
    ['batch_kl', 'ref_logprobs']
    """
    own = PREFERENCE_LOSSES.get(cfg.objective).options
    for name, loss in PREFERENCE_LOSSES.entries().items():
        others = [option for option in loss.options if option not in own]
        remedy = f"set train_preference.objective={name}"
        refuse_unused("train_preference", cfg, others, f"train_preference.objective={cfg.objective}", remedy)
    return PreferenceObjective(cfg=cfg)
