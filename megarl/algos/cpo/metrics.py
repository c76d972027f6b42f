"""Compute the metrics that log how CPO changed the advantages."""

import math
from collections.abc import Mapping

from torch import Tensor

from megarl.algos.cpo.inputs import CpoInputs
from megarl.algos.cpo.methods import formula, neg_scope
from megarl.algos.cpo.terms import make_terms
from megarl.config.algo import CpoConfig


def shift_diagnostics(before: Tensor, after: Tensor) -> Mapping[str, Tensor]:
    """Return tensors [B, T], whose means over loss tokens are logged: A' − A, |A' − A|, 1 where the sign flips, and A'.

    >>> shift_diagnostics(tensor([[1.0, 1.0]]), tensor([[-1.0, 2.0]]))["cpo/adv_flip_frac"].tolist()
    [[1.0, 0.0]]
    """
    change = (after - before).detach()
    return {
        "cpo/adv_delta_mean": change,
        "cpo/adv_delta_abs_mean": change.abs(),
        "cpo/adv_flip_frac": (before * after < 0).to(change.dtype),
        "train/advantage_mean": after.detach(),
    }


def hint_metrics(x: CpoInputs, cfg: CpoConfig) -> Mapping[str, float]:
    """Summarise the mutual information (MI) over the tokens that may change, and the share of clamped ratios; return
    nothing if the method reads no hint or there are no such tokens.

    >>> cfg = CpoConfig(method="mi", mi_estimator="pmi")
    >>> hint_metrics(terms([[1.0, -2.0]]).inputs, cfg)["cpo/mi_mean"]
    -0.5
    """
    if not formula(cfg).uses_hint or not x.active.any():
        return {}
    # These metrics read no entropies, and with entropy_source=current there are none before the update.
    terms = make_terms(x, cfg, neg_scope=neg_scope(cfg), uses_hint=True, uses_entropy=False)
    mi, delta = terms.mi[x.active].double(), terms.delta[x.active].double()
    return {
        "cpo/mi_mean": mi.mean().item(),
        "cpo/mi_std": mi.std(correction=0).item(),
        "cpo/mi_min": mi.min().item(),
        "cpo/mi_max": mi.max().item(),
        "cpo/mi_pos_ratio": (mi > 0).double().mean().item(),
        "cpo/ratio_clamped_frac": (delta.abs() > math.log(cfg.ratio_clamp)).double().mean().item(),
        "train/mi_mean": mi.mean().item(),
    }


def cpo_metrics(before: Tensor, after: Tensor, x: CpoInputs, cfg: CpoConfig) -> Mapping[str, float]:
    """Compute `hint_metrics`, and the means of `shift_diagnostics` over loss tokens.

    >>> x = terms([[1.0, -2.0]]).inputs
    >>> before, after = tensor([[1.0, 1.0]]), tensor([[-1.0, 2.0]])
    >>> cpo_metrics(before, after, x, CpoConfig(method="mi"))["cpo/adv_flip_frac"]
    0.5
    """
    if not x.loss_mask.any():
        return {}
    per_token = shift_diagnostics(before, after)
    shift = {name: value[x.loss_mask].double().mean().item() for name, value in per_token.items()}
    return {**hint_metrics(x, cfg), **shift}
