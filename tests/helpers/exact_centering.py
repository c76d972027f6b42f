"""The gradient of score centering by the logits, in closed form and 64-bit mantissas, and what float64 may lose."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Wide = NDArray[np.longdouble]
FLOOR = 1e-6
EPS = float(np.finfo(np.float64).eps)
assert np.finfo(np.longdouble).eps < 1e-18, "this machine has no wider floats than float64"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """f: 1 (none), clip(r, low, high) (tis), or r within the bounds, else 0 (mis)."""

    name: str
    low: float
    high: float

    def of_ratio(self, log_ratio: np.longdouble) -> np.longdouble:
        """f(r), its log-ratio clamped to ±20."""
        log_ratio = np.clip(log_ratio, -20, 20)
        ratio = np.exp(log_ratio)
        if self.name == "none":
            return np.longdouble(1)
        return np.clip(ratio, self.low, self.high) if self.name == "tis" else ratio * self.holds(log_ratio)

    def holds(self, log_ratio: Wide | np.longdouble) -> Wide:
        """Whether `mis` keeps a ratio."""
        with np.errstate(divide="ignore"):
            return (log_ratio >= np.log(np.longdouble(self.low))) & (log_ratio <= np.log(np.longdouble(self.high)))

    def weighed(self, p: Wide, q: Wide, log_ratio: Wide) -> Wide:
        """q·f(p/q), without the quotient."""
        if self.name == "none":
            return q
        return np.clip(p, self.low * q, self.high * q) if self.name == "tis" else p * self.holds(log_ratio)


def gradient(
    logits: NDArray[np.float64],
    token: int,
    token_logq: float,
    ids: list[int],
    logq: list[float],
    advantage: float,
    weight: Weight,
    *,
    support: list[int] | None = None,
) -> tuple[Wide, Wide]:
    """∂L/∂z_v = −A·(f(p_a/q_a)·(1[v = a] − p_v) − (c_v − p_v·Σc)) of a token, and how far float64 may be from it.

    With m = max |z|, float64 has p to 4·eps·(1 + m) relative, as log p = z − lse has that absolute error, and sums of n
    terms to n·eps; so each term above has γ = eps·(4·(1 + m) + V) of its size. 1 − Q of K recorded float64 values, of
    which nobody can know more, is off by K·eps, and α = κ·f(1/κ) by max f times that over max(1 − P, 1e-6).
    """
    wide = logits.astype(np.longdouble)
    kept = list(range(len(wide))) if support is None else support
    peak = wide[kept].max()
    lp = np.full(len(wide), -np.inf, np.longdouble)
    lp[kept] = wide[kept] - peak - np.log(np.exp(wide[kept] - peak).sum())
    p, at = np.exp(lp), np.array(ids)
    lq = np.array(logq, np.longdouble)
    q, f = np.exp(lq), weight.of_ratio(lp[token] - np.longdouble(token_logq))
    rest_p, rest_q = np.delete(p, at).sum(), max(1 - q.sum(), np.longdouble(0))
    is_whole = support is None
    least = max(rest_p, np.longdouble(FLOOR))
    kappa = max(rest_q, np.longdouble(FLOOR)) / least if is_whole else np.longdouble(1)
    one, log_kappa = np.ones(1, np.longdouble), np.log(kappa)
    alpha = weight.weighed(one, kappa * one, -log_kappa * one)[0]
    first = np.zeros_like(p)
    first[at] = weight.weighed(p[at], q, lp[at] - lq)
    second = np.zeros_like(p)
    second[at] = alpha * p[at]
    c, chosen = first - second, np.arange(len(p)) == token
    found = -advantage * (f * (chosen - p) - (c - p * c.sum()))
    sizes = first + second
    size = abs(advantage) * (f * (chosen + p) + sizes + p * sizes.sum())
    gamma = EPS * (4 * (1 + float(np.abs(wide[kept]).max())) + len(p))
    slope = {"none": 1.0, "tis": max(weight.high, 1.0), "mis": 0.0}[weight.name] * is_whole
    inside = np.isin(np.arange(len(p)), at) * p
    lost = abs(advantage) * (inside + p * inside.sum()) * slope * len(ids) * EPS / least
    return found, gamma * size + lost
