"""Compute the metrics that log how CPO changed the advantages."""

import math
from collections.abc import Mapping

from megarl.algos.cpo.difficulty import LEVELS
from megarl.algos.cpo.factors import credit_ratio
from megarl.algos.cpo.formulas import make_terms
from megarl.algos.cpo.inputs import CpoInputs
from megarl.algos.cpo.methods import formula, neg_scope
from megarl.config.algo import CpoConfig
from megarl.config.torch_later import Tensor


def shift_diagnostics(before: Tensor, after: Tensor) -> Mapping[str, Tensor]:
    """Return per-token tensors [B, T] by metric name: A' − A, |A' − A|, 1 where the sign flips (else 0), and A'.

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
    """Compute statistics, over active tokens, of the change by the hint in each quantity that the method reads.

    `cpo/delta_*` describe the log-prob change d, `cpo/mi_*` the mutual information: mean, standard deviation, range,
    share of positive values, and means over correct rows, wrong rows and each difficulty. There are also shares of
    tokens: those with d beyond ±ln λ, and with `verifier_sign` those with a weight beyond 1 ± `weight_clip`. With a
    shuffled baseline, the mean change of log-probs by another prompt's hint is added. Without a hint or active tokens
    there are no such metrics.

    >>> cfg = CpoConfig(method="mi", mi_estimator="pmi")
    >>> hint_metrics(terms([[1.0, -2.0]]).inputs, cfg)["cpo/mi_mean"]
    -0.5
    """
    chosen = formula(cfg)
    if not chosen.uses_hint or not x.active.any():
        return {}
    # Without entropies: they do not enter, and if the update's own are used, there are none yet.
    terms = make_terms(x, cfg, neg_scope=neg_scope(cfg), uses_hint=True, uses_entropy=False)
    signals = {"delta": terms.delta, **({"mi": terms.mi} if "mi" in chosen.reads else {})}
    metrics: dict[str, float] = {}
    for name, signal in signals.items():
        values = signal[x.active].double()
        metrics |= {
            f"cpo/{name}_mean": values.mean().item(),
            f"cpo/{name}_std": values.std(correction=0).item(),
            f"cpo/{name}_min": values.min().item(),
            f"cpo/{name}_max": values.max().item(),
            f"cpo/{name}_pos_ratio": (values > 0).double().mean().item(),
            **_means_by_rows(name, signal, x),
        }
    if "mi" in signals:
        metrics["train/mi_mean"] = metrics["cpo/mi_mean"]
    beyond = terms.delta[x.active].abs() > math.log(cfg.ratio_clamp)
    metrics["cpo/ratio_clamped_frac"] = beyond.double().mean().item()
    if "weight_clip" in chosen.reads:
        weights = credit_ratio(terms.advantages, terms.delta)[x.active]
        metrics["cpo/weight_clipped_frac"] = ((weights - 1).abs() > cfg.weight_clip).double().mean().item()
    if cfg.shuffled_baseline:
        other = x.need("shuffled_hint_logprobs") - x.need("old_logprobs")
        metrics["cpo/shuffled_mi_mean"] = other[x.active].double().mean().item()
    return metrics


def _means_by_rows(name: str, values: Tensor, x: CpoInputs) -> dict[str, float]:
    """Return means of `values` [B, T] over active tokens: of correct rows, of wrong rows, and of each difficulty."""
    rows = {"right": x.correct, "wrong": ~x.correct, **{key: x.difficulty == level for key, level in LEVELS.items()}}
    tokens = {key: values[x.active & chosen[:, None]].double() for key, chosen in rows.items()}
    return {f"cpo/{name}_{key}": kept.mean().item() for key, kept in tokens.items() if kept.numel()}


def cpo_metrics(before: Tensor, after: Tensor, x: CpoInputs, cfg: CpoConfig) -> Mapping[str, float]:
    """Compute all of CPO's metrics: `hint_metrics`, means of `shift_diagnostics`, and the change by kind of row.

    >>> x = terms([[1.0, -2.0]]).inputs
    >>> before, after = tensor([[1.0, 1.0]]), tensor([[-1.0, 2.0]])
    >>> cpo_metrics(before, after, x, CpoConfig(method="mi"))["cpo/adv_flip_frac"]
    0.5
    """
    if not x.loss_mask.any():
        return {}
    per_token = shift_diagnostics(before, after)
    shift = {name: value[x.loss_mask].double().mean().item() for name, value in per_token.items()}
    return {**hint_metrics(x, cfg), **shift, **_means_by_rows("adv_delta", after - before, x)}
