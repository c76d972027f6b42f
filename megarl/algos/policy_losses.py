"""Compute policy losses per token. Gradients flow only through the current policy's log-probs, and its entropy."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Literal, TypeAlias

from megarl.algos.masked import kept, require_per_token, row_means
from megarl.config.algo import PolicyLossConfig
from megarl.config.torch_later import Tensor, torch
from megarl.registry import FunctionRegistry, require_fields, require_known
from megarl.types.objectives import HeadMeasure

# Bounds log-ratios before exp(): e^±20 is far outside any clip range, and finite in float32.
MAX_LOG_RATIO = 20.0
# The inputs that only some losses read, besides the ratio's `old_logprobs`.
FURTHER_INPUTS = ("ref_logprobs", "rollout_logprobs", "entropy", "clip_bounds", "log_z")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossInputs:
    """Inputs of a policy loss, [B, T] each; `loss_mask` is bool, and the others are set to 0 outside it.

    correction: the weights of `compute_correction`. chosen: bool, the tokens of `choose_tokens`, for losses that treat
    these in another way. ref_logprobs, rollout_logprobs (the engine's), entropy (the current policy's, with gradient),
    clip_bounds and log_z (of shapers) are there for losses that read them, and beside, which `measure` computes.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    correction: Tensor | None = None
    chosen: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    clip_bounds: Tensor | None = None
    log_z: Tensor | None = None
    beside: Tensor | None = None

    def __post_init__(self) -> None:
        # Padding may hold anything, and a mask on the loss alone would leave gradients of 0 · NaN.
        for name in ("logprobs", "old_logprobs", "advantages", "correction", "beside", *FURTHER_INPUTS):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, kept(value, self.loss_mask))

    @property
    def log_ratio(self) -> Tensor:
        """Return ln r = logprobs − old_logprobs; a gradient flows only through `logprobs`."""
        return self.logprobs - self.old_logprobs.detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossTerms:
    """The result of a policy loss: the loss [B, T] with graph, and diagnostics [B, T] without graph, by metric name.

    The means of the diagnostics over loss tokens are logged. Values outside the loss mask are undefined.
    """

    loss: Tensor
    diagnostics: Mapping[str, Tensor]


PolicyLossFunction: TypeAlias = Callable[[PolicyLossInputs, PolicyLossConfig], PolicyLossTerms]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A policy loss, and what its registration declares about it.

    options: the fields of `PolicyLossConfig` that it reads. reads: the inputs that it needs besides `logprobs` and
    `advantages`: `old_logprobs` for a ratio to the old policy, and names among `FURTHER_INPUTS`. token_local: whether a
    token's loss depends on that token alone. row_ratio: whether the ratio is one per row, as a mean over its tokens;
    such a loss needs an aggregation over rows, and takes no weights per token. chooses: which tokens of a step it
    treats in another way, those of the largest covariance or a draw among those between bounds. tuned_clip: the largest
    `clip_high` that suits it, and in `clip_note` why. takes_weights: whether the correction's weights are part of its
    formula; other losses are multiplied by them. measure: what the log-prob head computes for it, by its settings,
    beside the engine's recorded head.
    """

    compute: PolicyLossFunction = field(kw_only=False)
    options: Collection[str] = ()
    reads: Collection[str] = ("old_logprobs",)
    token_local: bool = True
    row_ratio: bool = False
    chooses: Literal["largest", "drawn"] | None = None
    tuned_clip: float = inf
    clip_note: str = ""
    takes_weights: bool = False
    measure: Callable[[PolicyLossConfig], HeadMeasure] | None = None

    def __post_init__(self) -> None:
        require_fields(self.options, PolicyLossConfig)
        require_known("reads", self.reads, ("old_logprobs", *FURTHER_INPUTS))
        if self.row_ratio and self.token_local:
            raise ValueError(
                "token_local: got true with row_ratio, but a ratio of a whole row depends on other tokens; declare "
                "token_local=False"
            )


POLICY_LOSSES: FunctionRegistry[PolicyLossFunction, PolicyLoss] = FunctionRegistry(
    "policy loss", key="algo.policy_loss.name", entry=PolicyLoss, parameters=("x", "cfg")
)

_CLIP_RANGE = ("clip_low", "clip_high")
# A wider clip range suits PPO, not GSPO, whose ratio is a mean over the row.
_register_gspo = partial(
    POLICY_LOSSES.register,
    options=_CLIP_RANGE,
    token_local=False,
    row_ratio=True,
    tuned_clip=0.01,
    clip_note="its ratio is a mean over the row, and the paper uses 3e-4 and 4e-4",
)


def policy_loss(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute the configured loss, times the correction weights if there are any; diagnostics are not weighted.

    >>> policy_loss(loss_inputs([[1.0, 2.0]], [[1.0, 1.0]]), PolicyLossConfig()).loss.round(decimals=2).tolist()
    [[-1.0, -1.2]]
    """
    loss = POLICY_LOSSES.get(cfg.name)
    terms = loss.compute(x, cfg)
    require_per_token(terms.loss, x.loss_mask, f"the loss of algo.policy_loss.name={cfg.name}")
    if x.correction is None or loss.takes_weights:
        return terms
    return replace(terms, loss=terms.loss * x.correction.detach())


def token_ratio(x: PolicyLossInputs) -> Tensor:
    """Return r = exp(logprobs − old_logprobs), with the exponent clamped to ±20.

    >>> token_ratio(loss_inputs([[2.0]], [[1.0]])).tolist()
    [[2.0]]
    """
    return x.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """The clipped surrogate loss [B, T] with graph, and bool masks [B, T] of where clip and dual clip determined it."""

    loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, low: float | Tensor, high: float | Tensor, dual_clip: float | Tensor | None
) -> Surrogate:
    """Compute max(−r·A, −clip(r, low, high)·A) [B, T], and where A < 0 bound it by −dual_clip·A (None: no bound).

    >>> clipped_surrogate(tensor([1.0, 2.0]), tensor([1.0, 1.0]), low=0.5, high=1.5, dual_clip=None).loss.tolist()
    [-1.0, -1.5]
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(low, high)  # type: ignore[arg-type]
    loss = torch.maximum(unclipped, clipped)
    dual_clipped = torch.zeros_like(loss, dtype=torch.bool)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        dual_clipped = (advantages < 0) & (loss > bound)
        loss = torch.where(dual_clipped, bound, loss)
    return Surrogate(loss=loss, clipped=clipped > unclipped, dual_clipped=dual_clipped)


@POLICY_LOSSES.register("ppo_clip", options=(*_CLIP_RANGE, "dual_clip"))
def ppo_clip(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute PPO's clipped surrogate (arXiv:1707.06347) with the dual clip (arXiv:1912.09729), per token.

    r = exp(logprobs − old_logprobs); l = max(−r·A, −clip(r, 1 − clip_low, 1 + clip_high)·A);
    where A < 0, l = min(l, −dual_clip·A), unless `dual_clip` is None.
    Diagnostics: whether the clip or the dual clip determined l, and old_logprobs − logprobs.

    >>> ppo_clip(loss_inputs([[1.0, 2.0, 2.0]], [[1.0, 1.0, -1.0]]), PolicyLossConfig()).loss.round(decimals=2).tolist()
    [[-1.0, -1.2, 2.0]]
    """
    surrogate = clipped_surrogate(
        token_ratio(x), x.advantages, low=1 - cfg.clip_low, high=1 + cfg.clip_high, dual_clip=cfg.dual_clip
    )
    return PolicyLossTerms(
        loss=surrogate.loss,
        diagnostics={
            "actor/pg_clipfrac": surrogate.clipped.to(x.logprobs.dtype),
            "actor/pg_clipfrac_lower": surrogate.dual_clipped.to(x.logprobs.dtype),
            "actor/ppo_kl": -x.log_ratio.detach(),
        },
    )


@POLICY_LOSSES.register("reinforce", reads=())
def reinforce(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute REINFORCE (Williams, 1992): l = −A·logprobs, the policy gradient on its own samples, without ratio or
    clip.

    >>> reinforce(loss_inputs([[1.0]], [[2.0]]), PolicyLossConfig()).loss.tolist()
    [[2.0]]
    """
    return PolicyLossTerms(loss=-x.advantages * x.logprobs, diagnostics={"actor/ppo_kl": -x.log_ratio.detach()})


@POLICY_LOSSES.register("cispo", options=_CLIP_RANGE)
def cispo(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute CISPO (arXiv:2506.13585): l = −clip(r, 1 − clip_low, 1 + clip_high)·A·logprobs, r as in `ppo_clip`.

    No gradient flows through the clipped ratio, so clipped tokens still train. The paper tunes only the upper bound:
    choose a `clip_low` near 1 for that.

    >>> cispo(loss_inputs([[1.0]], [[2.0]]), PolicyLossConfig()).loss.tolist()
    [[2.0]]
    """
    ratio = token_ratio(x).detach()
    weight = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return PolicyLossTerms(
        loss=-weight * x.advantages * x.logprobs,
        diagnostics={"actor/pg_clipfrac": (weight != ratio).to(ratio.dtype), "actor/ppo_kl": -x.log_ratio.detach()},
    )


@_register_gspo("gspo")
def gspo(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute group sequence policy optimisation (arXiv:2507.18071): all tokens of a row share one ratio s.

    s = exp(mean of logprobs − old_logprobs over the row); l = max(−s·A, −clip(s, 1 − clip_low, 1 + clip_high)·A).
    Use it with the aggregation seq-mean-token-mean; with seq-mean-token-sum, which multiplies a row's loss by its
    length, this is LUSPO (arXiv:2602.05261). The paper clips at 3e-4 and 4e-4, without a `dual_clip`.

    >>> gspo(loss_inputs([[4.0, 1.0]], [[1.0, 1.0]]), PolicyLossConfig(clip_high=0.5)).loss.tolist()
    [[-1.5, -1.5]]
    """
    return _row_clip(_row_log_ratio(x), x, cfg)


@_register_gspo("gspo_token")
def gspo_token(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute GSPO-token (arXiv:2507.18071, section 4.3): the loss values of `gspo`, with a gradient per token.

    The ratio is s_t = sg(s)·π(y_t) / sg(π(y_t)) (sg: stop-gradient). For equal advantages in a row, this is `gspo`.

    >>> gspo_token(loss_inputs([[4.0, 1.0]], [[1.0, 1.0]]), PolicyLossConfig(clip_high=0.5)).loss.tolist()
    [[-1.5, -1.5]]
    """
    return _row_clip(_row_log_ratio(x).detach() + (x.logprobs - x.logprobs.detach()), x, cfg)


def _row_log_ratio(x: PolicyLossInputs) -> Tensor:
    """Return the mean [B, 1] of logprobs − old_logprobs over the row's loss tokens, clamped to ±20."""
    mean = row_means(x.log_ratio, x.loss_mask)[:, None]
    return mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _row_clip(row_log_ratio: Tensor, x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute GSPO's clipped surrogate from a log-ratio, given per row [B, 1] or per token [B, T]."""
    ratio = row_log_ratio.exp().expand_as(x.logprobs)
    surrogate = clipped_surrogate(ratio, x.advantages, low=1 - cfg.clip_low, high=1 + cfg.clip_high, dual_clip=None)
    return PolicyLossTerms(
        loss=surrogate.loss,
        diagnostics={"actor/pg_clipfrac": surrogate.clipped.to(ratio.dtype), "actor/ppo_kl": -x.log_ratio.detach()},
    )


@POLICY_LOSSES.register("gmpo", options=_CLIP_RANGE, token_local=False, row_ratio=True)
def gmpo(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute geometric-mean policy optimisation (arXiv:2507.20673): a row's ratio is a geometric mean of clipped ones.

    s = exp(mean over the row of d) is that geometric mean, where d = logprobs − old_logprobs, at most `clip_high` where
    A > 0, and elsewhere at least −`clip_low`; l = −s·A. Unlike in `gspo`, single tokens are clipped, before the mean
    and in log space, and the row still trains on its other tokens. Use it with the aggregation seq-mean-token-mean. The
    paper clips at 0.4.

    >>> x = loss_inputs([[4.0, 1.0]], [[1.0, 1.0]])
    >>> gmpo(x, PolicyLossConfig(clip_low=0.4, clip_high=0.4)).loss.round(decimals=2).tolist()
    [[-1.22, -1.22]]
    """
    log_ratio = x.log_ratio
    clipped = torch.where(x.advantages > 0, log_ratio.clamp(max=cfg.clip_high), log_ratio.clamp(min=-cfg.clip_low))
    row_log_ratio = row_means(clipped, x.loss_mask)[:, None].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return PolicyLossTerms(
        loss=-x.advantages * row_log_ratio.exp(),
        diagnostics={
            "actor/pg_clipfrac": (clipped != log_ratio).to(log_ratio.dtype),
            "actor/ppo_kl": -x.log_ratio.detach(),
        },
    )


@POLICY_LOSSES.register("sapo", options=("tau_pos", "tau_neg"))
def sapo(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute soft adaptive policy optimisation (arXiv:2511.20347): a gate without corners takes the clip's place.

    l = −4/τ·sigmoid(τ·(r − 1))·A, with τ = `tau_pos` where A > 0 and `tau_neg` elsewhere, and r as in `ppo_clip`. At
    r = 1 the gradient is that of −r·A; on either side of 1 it fades with the distance, the faster the larger τ is.

    >>> sapo(loss_inputs([[1.0, 1.0]], [[1.0, -1.0]]), PolicyLossConfig(tau_pos=1.0, tau_neg=2.0)).loss.tolist()
    [[-2.0, 1.0]]
    """
    ratio = token_ratio(x)
    tau = torch.where(x.advantages > 0, ratio.new_tensor(cfg.tau_pos), ratio.new_tensor(cfg.tau_neg))
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return PolicyLossTerms(loss=-x.advantages * gate, diagnostics={"actor/ppo_kl": -x.log_ratio.detach()})


@POLICY_LOSSES.register("clip_cov", options=(*_CLIP_RANGE, "cov_share", "cov_low", "cov_high"), chooses="drawn")
def clip_cov(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute Clip-Cov (arXiv:2505.22617): the loss of `ppo_clip` without dual clip, but 0 on the chosen tokens.

    The paper chooses tokens anew at each update, by the covariance of its batch's current log-probs with advantages,
    among tokens that the ratio's clip leaves alone. Here `choose_tokens` chooses once per step, over all rows and by
    the old log-probs, so neither micro-batches nor parallel layouts matter. For the step's first update, if that covers
    the whole step, both are the same rule: old and current log-probs are equal, and no ratio is clipped.

    >>> x = replace(loss_inputs([[1.0, 1.0]], [[1.0, 2.0]]), chosen=tensor([[True, False]]))
    >>> clip_cov(x, PolicyLossConfig(name="clip_cov")).loss.tolist()
    [[0.0, -2.0]]
    """
    assert x.chosen is not None, "clip_cov needs the tokens chosen by covariance"
    surrogate = clipped_surrogate(
        token_ratio(x), x.advantages, low=1 - cfg.clip_low, high=1 + cfg.clip_high, dual_clip=None
    )
    return PolicyLossTerms(
        loss=torch.where(x.chosen, 0.0, surrogate.loss),
        diagnostics={
            "actor/pg_clipfrac": surrogate.clipped.to(x.logprobs.dtype),
            "actor/cov_chosen": x.chosen.to(x.logprobs.dtype),
            "actor/ppo_kl": -x.log_ratio.detach(),
        },
    )


@POLICY_LOSSES.register("kl_cov", options=("cov_share", "cov_kl_coef"), chooses="largest")
def kl_cov(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
    """Compute KL-Cov (arXiv:2505.22617): l = −r·A, on the chosen tokens + `cov_kl_coef`·|logprobs − old_logprobs|.

    Ratios r are not clipped. As in `clip_cov`, tokens are chosen once per step by the old log-probs; the paper chooses
    at each update by the current ones.

    >>> x = replace(loss_inputs([[1.0, 2.0]], [[1.0, 0.0]]), chosen=tensor([[False, True]]))
    >>> kl_cov(x, PolicyLossConfig(name="kl_cov", cov_kl_coef=0.5)).loss.round(decimals=2).tolist()
    [[-1.0, 0.35]]
    """
    assert x.chosen is not None, "kl_cov needs the tokens chosen by covariance"
    penalty = torch.where(x.chosen, cfg.cov_kl_coef * x.log_ratio.abs(), 0.0)
    return PolicyLossTerms(
        loss=-x.advantages * token_ratio(x) + penalty,
        diagnostics={"actor/cov_chosen": x.chosen.to(x.logprobs.dtype), "actor/ppo_kl": -x.log_ratio.detach()},
    )
