"""What CPO did to the advantages, for the log."""

import math
from collections.abc import Mapping

from torch import Tensor

from megarl.algos.cpo.inputs import CpoInputs
from megarl.algos.cpo.methods import formula, neg_scope
from megarl.algos.cpo.terms import make_terms
from megarl.config.algo import CpoConfig


def shift_diagnostics(before: Tensor, after: Tensor) -> Mapping[str, Tensor]:
    """Return [B, T] by metric whose means over loss tokens are logged: change, its size, flipped signs, A'.

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
    """Compute mean, deviation, range and share of positive values of MI over loss tokens; share of tokens whose
    likelihood ratio is clamped. Nothing for a method without a hint or without tokens.

    >>> cfg = CpoConfig(method="mi", mi_estimator="pmi")
    >>> hint_metrics(terms([[1.0, -2.0]]).inputs, cfg)["cpo/mi_mean"]
    -0.5
    """
    if not formula(cfg).uses_hint or not x.active.any():
        return {}
    # Entropies do not enter, and where the update's own are used there are none yet.
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
    """Compute `hint_metrics`, and over loss tokens the means of `shift_diagnostics`.

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
