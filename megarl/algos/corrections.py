"""Weight the policy loss by importance ratios, because the inference engine's probabilities differ from the trainer's.

ρ_t = π_trainer(y_t) / π_engine(y_t): the trainer's probability at the start of the step, divided by the engine's when
it sampled the token. If the sample is not stale, both have the same weights, and ρ measures only what the engine's
different kernels change; otherwise ρ also contains the updates since then (decoupled PPO, arXiv:2505.24298). A
correction combines three parts: a weight per token, a gate that accepts or rejects tokens, and a veto that drops rows.
Its name selects weight and gate. Rejected tokens still count in the denominator.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias

from megarl.algos.batch_statistics import within_second_moment
from megarl.algos.correction_metrics import RatioSums, ratio_sums
from megarl.algos.masked import row_blocks, row_means
from megarl.algos.policy_losses import MAX_LOG_RATIO
from megarl.config.algo import AlgoConfig, CorrectionConfig
from megarl.config.torch_later import Tensor, torch
from megarl.errors import NonFiniteError
from megarl.registry import FunctionRegistry, require_fields

# Name of the quantity that holds the weights of `compute_correction`.
CORRECTION = "correction"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionInputs:
    """All rows of a step, in tensors [B, T]. `demonstration_mask`: loss tokens that the engine did not sample."""

    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    demonstration_mask: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The result of `compute_correction`: tensors [B, T] that the updates read, and metrics to log.

    weights: factors of the policy loss; 1 on demonstration tokens, 0 outside the loss mask. accepted: bool, the loss
    tokens that neither gate nor veto rejected. old_logprobs: those in the policy loss's ratio, from the trainer, or
    with `rollout_ratio` from the engine on the tokens that the engine sampled.
    """

    weights: Tensor
    accepted: Tensor
    old_logprobs: Tensor
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRatios:
    """The log-ratios ln ρ = ln π_trainer − ln π_engine [B, T], float64, and 0 outside `sampled` (bool).

    Sums and means are over what tokens really have; only a result is clamped, before exp().
    """

    token: Tensor
    sampled: Tensor

    @property
    def row_mean(self) -> Tensor:
        """Return each row's mean of ln ρ over sampled tokens, [B, 1]; it is 0 for a row without sampled tokens."""
        return row_means(self.token, self.sampled)[:, None]

    def prefix_mean(self, *, own: bool) -> Tensor:
        """Return, per position, the mean of ln ρ over the sampled tokens before it (with `own`: up to and including
        it), else 0.
        """
        total, count = self.token.cumsum(-1), self.sampled.cumsum(-1)
        if not own:
            total, count = total - self.token, count - self.sampled.long()
        return torch.where(count > 0, total / count.clamp(min=1), 0.0)


def _exp(log_ratio: Tensor) -> Tensor:
    """Return e^log_ratio, with the exponent clamped to ±20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


Weight: TypeAlias = Callable[[LogRatios, CorrectionConfig], Tensor]
Gate: TypeAlias = Callable[[LogRatios, CorrectionConfig], Tensor]


def every_token(x: LogRatios, cfg: CorrectionConfig) -> Tensor:
    """Accept every token.

    >>> every_token(ratios([[2.0, 0.5]]), CorrectionConfig()).tolist()
    [[True, True]]
    """
    return torch.ones_like(x.sampled)


def _within(log_ratio: Tensor, cfg: CorrectionConfig) -> Tensor:
    ratio = log_ratio.exp()
    return (ratio >= cfg.low) & (ratio <= cfg.high)


def token_within(x: LogRatios, cfg: CorrectionConfig) -> Tensor:
    """Accept tokens with low ≤ ρ ≤ high.

    >>> token_within(ratios([[2.0, 4.0]]), CorrectionConfig(high=3.0)).tolist()
    [[True, False]]
    """
    return _within(x.token, cfg)


def row_within(x: LogRatios, cfg: CorrectionConfig) -> Tensor:
    """Accept all tokens of a row if low ≤ geometric mean of the row's ρ ≤ high, otherwise none of them.

    >>> row_within(ratios([[4.0, 1.0], [4.0, 4.0]]), CorrectionConfig(high=3.0)).tolist()
    [[True, True], [False, False]]
    """
    return _within(x.row_mean, cfg).expand_as(x.sampled)


def prefix_within(x: LogRatios, cfg: CorrectionConfig) -> Tensor:
    """Accept tokens with low ≤ g_t ≤ high, with g_t the geometric mean of ρ_1 … ρ_t, even after a rejected token.

    >>> prefix_within(ratios([[4.0, 0.25]]), CorrectionConfig(high=3.0)).tolist()
    [[False, True]]
    """
    return _within(x.prefix_mean(own=True), cfg)


def earlier_within(x: LogRatios, cfg: CorrectionConfig) -> Tensor:
    """Accept token t if low ≤ g_{t−1} ≤ high (g as in `prefix_within`), whatever token t is; always accept the first.

    >>> earlier_within(ratios([[4.0, 0.25]]), CorrectionConfig(high=3.0)).tolist()
    [[True, False]]
    """
    return _within(x.prefix_mean(own=False), cfg)


def row_kl_within(x: LogRatios, cfg: CorrectionConfig) -> Tensor:
    """Accept all tokens of a row if the row's mean of −ln ρ, which estimates KL(engine ‖ trainer), is ≤ `max_kl_nats`.

    >>> row_kl_within(ratios([[0.5, 0.5], [1.0, 0.5]]), CorrectionConfig(max_kl_nats=0.5)).tolist()
    [[False, False], [True, True]]
    """
    return (-x.row_mean <= cfg.max_kl_nats).expand_as(x.sampled)


def moment_within(x: LogRatios, cfg: CorrectionConfig) -> Tensor:
    """Accept as many of an optimizer batch's tokens as `within_second_moment` keeps with the limit `max_second_moment`.

    >>> moment_within(ratios([[1.0, 4.0]]), CorrectionConfig()).tolist()
    [[True, False]]
    """
    accepted = torch.zeros_like(x.sampled)
    accepted[x.sampled] = within_second_moment(x.token[x.sampled], cfg.max_second_moment)
    return accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionRule:
    """A correction's weight, its gate (which tokens are accepted), and the `options` that it reads of its settings.
    With `rollout_ratio`, the policy loss uses the engine's log-probs as the old log-probs. whole: whether the gate
    reads all rows of an optimizer batch at once. per_token: whether no weight depends on the row's other tokens.
    """

    weight: Weight = field(kw_only=False)
    gate: Gate = every_token
    options: Collection[str] = ()
    rollout_ratio: bool = False
    whole: bool = False
    per_token: bool = False

    def __post_init__(self) -> None:
        require_fields(self.options, CorrectionConfig)


CORRECTIONS: FunctionRegistry[Weight, CorrectionRule] = FunctionRegistry(
    "correction", key="algo.correction.name", entry=CorrectionRule, parameters=("x", "cfg")
)

_BOUNDS = ("low", "high")
_WEIGHTED = ("veto", "normalise")
_GATED = (*_WEIGHTED, "only_negative")
_GATED_RATIO = (*_GATED, *_BOUNDS, "token_cap")


# No correction.
@CORRECTIONS.register("none", options=("forced",), per_token=True)
# The policy loss's ratio is to the engine's log-probs: policy change and mismatch in one ratio, clipped as one.
@CORRECTIONS.register("rollout_ratio", options=("veto",), rollout_ratio=True, per_token=True)
# With `only_negative`: off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556).
@CORRECTIONS.register("sequence_mask", gate=row_kl_within, options=(*_GATED, "max_kl_nats"))
def one(x: LogRatios, cfg: CorrectionConfig) -> Tensor:
    """Give every token the weight 1.

    >>> one(ratios([[2.0, 0.5]]), CorrectionConfig()).tolist()
    [[1.0, 1.0]]
    """
    return torch.ones_like(x.token)


# IcePop (Ring-1T, arXiv:2510.18855).
@CORRECTIONS.register("icepop", gate=token_within, options=_GATED_RATIO, per_token=True)
# M2PO (arXiv:2510.01161).
@CORRECTIONS.register(
    "m2po",
    gate=moment_within,
    options=(*_GATED, "token_cap", "max_second_moment"),
    whole=True,
    per_token=True,
)
@CORRECTIONS.register("seq_mask_tis", "seq-mask-tis", gate=row_within, options=_GATED_RATIO)
# REINFORCE Pro.
@CORRECTIONS.register("reinforce_pro", gate=prefix_within, options=_GATED_RATIO)
# Its gate does not look at the token it judges. E[gate · ρ · ∇ ln π | prefix] is then 0 whatever the gate does, so a
# baseline still cancels; the gradient as a whole stays biased. Whatever else depends on the token would undo this.
@CORRECTIONS.register("baseline_unbiased", gate=earlier_within, options=_BOUNDS)
def token_ratio(x: LogRatios, cfg: CorrectionConfig) -> Tensor:
    """Weight each token by its importance ratio ρ (trainer / rollout), or by min(ρ, token_cap) if `token_cap` is set.

    >>> token_ratio(ratios([[2.0, 0.5]]), CorrectionConfig(token_cap=1.5)).tolist()
    [[1.5, 0.5]]
    """
    ratio = _exp(x.token)
    return ratio if cfg.token_cap is None else ratio.clamp(max=cfg.token_cap)


# Truncated importance sampling as in OpenRLHF: small weights are raised to `low`.
@CORRECTIONS.register("tis", options=(*_WEIGHTED, *_BOUNDS), per_token=True)
def clipped_token_ratio(x: LogRatios, cfg: CorrectionConfig) -> Tensor:
    """Give each token the weight clip(ρ, low, high).

    >>> clipped_token_ratio(ratios([[2.0, 0.5]]), CorrectionConfig(low=0.75, high=1.5)).tolist()
    [[1.5, 0.75]]
    """
    return _exp(x.token).clamp(cfg.low, cfg.high)


# The same from above only (arXiv:1802.01561 truncates ρ this way; Flash-RL applies it to the engine's mismatch).
@CORRECTIONS.register("tis_upper", options=(*_WEIGHTED, "high"), per_token=True)
def truncated_token_ratio(x: LogRatios, cfg: CorrectionConfig) -> Tensor:
    """Give each token the weight min(ρ, high).

    >>> truncated_token_ratio(ratios([[2.0, 0.5]]), CorrectionConfig(high=1.5)).tolist()
    [[1.5, 0.5]]
    """
    return _exp(x.token).clamp(max=cfg.high)


# Importance sampling of whole rows: unbiased except for the truncation, with a variance exponential in the length.
@CORRECTIONS.register("sequence", options=(*_WEIGHTED, "high"))
def truncated_row_product(x: LogRatios, cfg: CorrectionConfig) -> Tensor:
    """Give all tokens of a row the weight min(Π ρ, high), with the product over the row's sampled tokens.

    >>> truncated_row_product(ratios([[2.0, 0.5], [2.0, 2.0]]), CorrectionConfig(high=1.5)).tolist()
    [[1.0, 1.0], [1.5, 1.5]]
    """
    return _exp(x.token.sum(-1, keepdim=True)).clamp(max=cfg.high).expand_as(x.token)


@CORRECTIONS.register("geometric", gate=row_within, options=(*_GATED, *_BOUNDS))
def row_geometric_mean(x: LogRatios, cfg: CorrectionConfig) -> Tensor:
    """Give all tokens of a row the weight (Π ρ)^(1/n): the geometric mean of ρ over the row's n sampled tokens.

    >>> row_geometric_mean(ratios([[4.0, 1.0]]), CorrectionConfig()).tolist()
    [[2.0, 2.0]]
    """
    return _exp(x.row_mean).expand_as(x.token)


def compares_policies(cfg: AlgoConfig) -> bool:
    """Return whether a correction needs the trainer's log-probs from before the update.

    `rollout_ratio` puts the engine's log-probs in their place, so it needs them only for a veto, and on demonstration
    tokens, which no engine sampled.

    >>> compares_policies(AlgoConfig(correction=CorrectionConfig(name="rollout_ratio")))
    False
    """
    if CORRECTIONS.get(cfg.correction.name).rollout_ratio:
        return cfg.correction.veto is not None or cfg.demonstrations.strategy != "none"
    return cfg.correction.name != "none"


def compute_correction(
    x: CorrectionInputs, cfg: CorrectionConfig, batches: Sequence[Sequence[int]] | None = None
) -> Correction:
    """Compute a step's correction weights in float64, by blocks of rows: they are independent, except for the gate of a
    rule that is `whole`, which looks at each optimizer batch, and with `normalise`.

    batches: the rows of each optimizer batch; None: all are one.

    Raises:
        NonFiniteError: a log-prob of a sampled token is not finite.

    >>> x = CorrectionInputs(
    ...     old_logprobs=tensor([[-1.0, -1.0]]),
    ...     rollout_logprobs=tensor([[-1.0, -9.0]]),
    ...     advantages=tensor([[1.0, 1.0]]),
    ...     loss_mask=tensor([[True, True]]),
    ...     demonstration_mask=tensor([[False, False]]),
    ... )
    >>> compute_correction(x, CorrectionConfig(name="icepop")).weights.tolist()
    [[1.0, 0.0]]
    """
    rule, sums = CORRECTIONS.get(cfg.name), RatioSums()
    # Normalised weights are rounded once, at the end.
    weights = torch.zeros_like(x.old_logprobs, dtype=torch.float64 if cfg.normalise else None)
    accepted = torch.zeros_like(x.loss_mask)
    if rule.whole:
        everywhere = x.loss_mask & ~x.demonstration_mask
        token, of_step = _log_ratios(x, everywhere, first_row=0), torch.zeros_like(everywhere)
        for part_rows in batches or [range(len(token))]:
            at = list(part_rows)
            of_step[at] = rule.gate(LogRatios(token=token[at], sampled=everywhere[at]), cfg)
    for rows in row_blocks(x.loss_mask):
        part = CorrectionInputs(**{each.name: getattr(x, each.name)[rows] for each in fields(x)})
        sampled = part.loss_mask & ~part.demonstration_mask
        ratios = LogRatios(token=_log_ratios(part, sampled, first_row=rows.start), sampled=sampled)
        raw, gate = rule.weight(ratios, cfg), of_step[rows] if rule.whole else rule.gate(ratios, cfg)
        gate = gate | (part.advantages >= 0) if cfg.only_negative else gate
        # The mean of a long row would hide a single token with ρ > veto or ρ < 1 / veto.
        vetoed = (ratios.token.abs().exp() > (torch.inf if cfg.veto is None else cfg.veto)).any(-1)
        accepted[rows] = sampled & gate & ~vetoed[:, None]
        weights[rows] = torch.where(accepted[rows], raw, 0.0).to(weights.dtype)
        marks = {"sampled": sampled, "accepted": accepted[rows], "vetoed": vetoed}
        sums = sums.merged(ratio_sums(log_ratio=ratios.token, weights=raw, advantages=part.advantages, **marks))
    if cfg.normalise and sums.kept_weight > 0:
        weights /= sums.kept_weight / max(sums.num_tokens, 1.0)
    demonstrated = x.loss_mask & x.demonstration_mask
    old = torch.where(x.loss_mask & ~demonstrated, x.rollout_logprobs, x.old_logprobs) if rule.rollout_ratio else None
    return Correction(
        weights=weights.masked_fill_(demonstrated, 1.0).to(x.old_logprobs.dtype),
        accepted=accepted | demonstrated,
        old_logprobs=x.old_logprobs if old is None else old,
        metrics=sums.metrics(),
    )


def _log_ratios(x: CorrectionInputs, sampled: Tensor, *, first_row: int) -> Tensor:
    """Return ln ρ; raise NonFiniteError where it is not finite."""
    difference = torch.where(sampled, x.old_logprobs.double() - x.rollout_logprobs.double(), 0.0)
    for i, t in (~difference.isfinite()).nonzero().tolist()[:1]:
        raise NonFiniteError(
            f"correction: log-probs of row {first_row + i}, token {t}: got {x.old_logprobs[i, t].item()} (trainer) and "
            f"{x.rollout_logprobs[i, t].item()} (engine), expected finite numbers; look at the engine's sampling "
            "settings and at the weights"
        )
    return difference
