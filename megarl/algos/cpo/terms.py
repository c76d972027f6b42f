"""Compute the tensors that CPO's formulas read, with zeros on tokens whose advantage must not change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megarl.algos.cpo.information import MI_ESTIMATORS
from megarl.algos.cpo.inputs import CpoInputs
from megarl.config.algo import CpoConfig
from megarl.config.torch_later import Tensor, torch
from megarl.errors import NonFiniteError
from megarl.registry import Registry

# The rules for which rows count as negative, [B] bool.
NEG_SCOPES: Registry[Callable[[CpoInputs], Tensor]] = Registry("negative scope", key="algo.cpo.neg_scope")


@NEG_SCOPES.register("not_all_correct")
def _in_groups_not_all_correct(x: CpoInputs) -> Tensor:
    return x.difficulty != 1


@NEG_SCOPES.register("all_wrong_group")
def _in_groups_all_wrong(x: CpoInputs) -> Tensor:
    return (x.difficulty == -1) & ~x.correct


@NEG_SCOPES.register("negative_sample")
def _wrong(x: CpoInputs) -> Tensor:
    return ~x.correct


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The tensors [B, T] that CPO's formulas read, 0 on tokens that must not change (`advantages`: 0 outside the loss
    mask).

    active: bool, the tokens that may change. delta: d = hint_logprobs − old_logprobs, or with `shuffled_baseline`
    hint_logprobs − shuffled_hint_logprobs. old_logprobs, hint_logprobs: log-probs without and with the hint. mi: mutual
    information of token and hint, in nats. entropy: nats. Per row, [B, 1]: correct (bool, by the verifier), negative
    (bool, by the rule `algo.cpo.neg_scope`) and difficulty (−1, 0 or 1). coefficients: the method's numbers, by name.
    """

    inputs: CpoInputs
    cfg: CpoConfig
    active: Tensor
    advantages: Tensor
    delta: Tensor
    old_logprobs: Tensor
    hint_logprobs: Tensor
    mi: Tensor
    entropy: Tensor
    correct: Tensor
    negative: Tensor
    difficulty: Tensor
    vocab_size: int
    step: int
    coefficients: Mapping[str, float]


def make_terms(
    x: CpoInputs,
    cfg: CpoConfig,
    *,
    neg_scope: str,
    uses_hint: bool,
    uses_entropy: bool,
    coefficients: Mapping[str, float] = MappingProxyType({}),
) -> Terms:
    """Compute the tensors that one CPO formula reads. Tensors that the formula does not read are 0 and need no inputs.

    Raises NonFiniteError if an input is NaN or infinite on a token whose advantage may change.

    >>> x = terms([[1.0, -1.0]]).inputs
    >>> cfg = CpoConfig()
    >>> make_terms(x, cfg, neg_scope="negative_sample", uses_hint=True, uses_entropy=False).delta.tolist()
    [[1.0, -1.0]]
    """
    active = x.active
    advantages = _clean("advantages", x.advantages, x.loss_mask)
    zeros = torch.zeros_like(advantages)
    old, hint, delta, mi = zeros, zeros, zeros, zeros
    if uses_hint:
        old = _clean("old_logprobs", x.need("old_logprobs"), active)
        hint = _clean("hint_logprobs", x.need("hint_logprobs"), active)
        baseline = old
        if cfg.shuffled_baseline:
            baseline = _clean("shuffled_hint_logprobs", x.need("shuffled_hint_logprobs"), active)
        delta = hint - baseline
        estimator = MI_ESTIMATORS.get(cfg.mi_estimator)
        hint_kl = _clean("hint_kl", x.need("hint_kl"), active) if estimator.uses_hint_kl else None
        low, high = estimator.bounds(cfg.ratio_clamp)
        mi = torch.where(active, estimator.of(delta.clamp(low, high), hint, hint_kl), 0.0)
    return Terms(
        inputs=x,
        cfg=cfg,
        active=active,
        advantages=advantages,
        delta=delta,
        old_logprobs=old,
        hint_logprobs=hint,
        mi=mi,
        entropy=_clean("entropy", x.need("entropy"), active).detach() if uses_entropy else zeros,
        correct=x.correct[:, None],
        negative=NEG_SCOPES.get(neg_scope)(x)[:, None],
        difficulty=x.difficulty[:, None],
        vocab_size=x.vocab_size,
        step=x.step,
        coefficients=coefficients,
    )


def _clean(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` with zeros outside `mask`; raise NonFiniteError if a value inside `mask` is NaN or infinite."""
    kept = torch.where(mask, values, 0.0)
    bad_rows = (~kept.isfinite().all(dim=-1)).nonzero().flatten().tolist()
    if bad_rows:
        raise NonFiniteError(
            f"cpo: {name} of row {bad_rows[0]} is not finite on a loss token, expected finite numbers; "
            f"check the forward passes"
        )
    return kept
