"""Measure how well a score tells two kinds of tokens apart: the area under the ROC curve, and its standard error."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """This is an area under a ROC curve: 0.5 tells nothing, 1 everything, and 0 everything with the sign reversed.

    std_error: by bootstrap over groups; None if too few draws had both kinds.
    """

    value: float
    std_error: float | None
    num_positive: int
    num_negative: int


def area_under_roc(
    scores: Floats, positive: npt.NDArray[np.bool_], groups: npt.NDArray[np.int64], *, num_draws: int, seed: int
) -> Area | None:
    """Compute the chance that a positive token's score exceeds a negative one's, where equal scores count half.

    Tokens of a group are not independent, so the bootstrap draws whole groups. None without both kinds of tokens.
    """
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if not num_positive or not num_negative:
        return None
    ranks = np.unique(scores, return_inverse=True)[1]
    names, members = np.unique(groups, return_inverse=True)

    def area(weights: Floats) -> float:
        found = np.bincount(ranks, weights * positive)
        others = np.bincount(ranks, weights * ~positive)
        below = np.cumsum(others) - others / 2
        total = found.sum() * others.sum()
        return float((found * below).sum() / total) if total else np.nan

    rng = np.random.default_rng(seed)
    draws = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=num_draws)
    drawn = np.array([area(draw[members].astype(np.float64)) for draw in draws])
    drawn = drawn[~np.isnan(drawn)]
    return Area(
        value=area(np.ones(len(scores))),
        std_error=float(drawn.std(ddof=1)) if len(drawn) > 1 else None,
        num_positive=num_positive,
        num_negative=num_negative,
    )
