"""Fit a run's held-out scores, and say whether more samples would raise them.

The curve is the sigmoid of arXiv:2510.13786, over the samples x that the run had trained on:

    score(x) = start + (ceiling − start) / (1 + (midpoint / x)^efficiency)
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megarl.report.run import Floats, Run
from megarl.report.summary import SAMPLED, validation_curve

Advice = Literal["go on", "stop", "cannot tell"]

# Four parameters need more points than that.
MIN_VALIDATIONS = 6
# Doubling the samples is worth it if the score gains as much.
MIN_GAIN = 0.01
# The share of the posterior that intervals hold, half of the rest on either side.
INTERVAL = 0.9
# A run has collapsed if its last scores lie below its best by more than this many standard errors of that difference
# and by more than this share of what it had gained.
COLLAPSE_STD_ERRORS = 4.0
COLLAPSE_FRAC = 0.2
# Scores are averaged over as many validations to look for a collapse.
WINDOW = 3
# The posterior is computed on a grid of midpoints, efficiencies and ceilings, and once more where it is not negligible.
NUM_VALUES = (40, 20, 121)
NEGLIGIBLE = 1e-4
# The prior allows midpoints from a third of the first validation to that many times the samples.
FURTHEST_MIDPOINT = 30.0
EFFICIENCY_RANGE = (0.4, 5.0)
# Scores are not known better than that, however well they lie on a curve.
LEAST_STD_ERROR = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class CredibleInterval:
    """The median of a quantity, and the bounds of its 90 % interval."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningCurve:
    """A fitted curve, and what it advises.

    samples, scores: what was fitted. ceiling: the score after endless samples. midpoint: samples after which half of
    the way there is done. gain: of the score, if the run had twice the samples. at, low, median, high: the curve, up to
    twice the samples.
    """

    samples: Floats
    scores: Floats
    ceiling: CredibleInterval
    efficiency: CredibleInterval
    midpoint: CredibleInterval
    gain: CredibleInterval
    at: Floats
    low: Floats
    median: Floats
    high: Floats
    advice: Advice
    reason: str


def samples_per_step(run: Run) -> int | None:
    """Return the samples that a step trains on, prompts × samples per prompt; None for runs that sample nothing."""
    prompts = run.config.get("trainer", {}).get("prompts_per_step")
    per_prompt = run.config.get("rollout", {}).get("num_samples")
    return prompts * per_prompt if isinstance(prompts, int) and isinstance(per_prompt, int) else None


def fitted_points(run: Run, prefix: str = SAMPLED, until: int | None = None) -> tuple[Floats, Floats] | None:
    """Return samples and scores of the validations up to step `until`; None if there are too few for a curve."""
    points = [point for point in validation_curve(run, prefix) if until is None or point.step <= until]
    per_step = samples_per_step(run)
    if len(points) < MIN_VALIDATIONS or per_step is None:
        return None
    return np.array([p.step for p in points], float) * per_step, np.array([p.score for p in points], float)


def curve_of(
    run: Run, *, prefix: str = SAMPLED, until: int | None = None, min_gain: float = MIN_GAIN
) -> LearningCurve | None:
    """Fit the validations of a run, those up to step `until`; None if there are fewer than `MIN_VALIDATIONS`."""
    points = fitted_points(run, prefix, until)
    return None if points is None else fit(*points, min_gain=min_gain)


def fit(samples: Floats, scores: Floats, *, min_gain: float = MIN_GAIN) -> LearningCurve:
    """Fit the sigmoid to scores [n] at ascending numbers of samples [n].

    The noise is normal, equal at all points and of unknown size, which is integrated out (prior 1/σ), as is the start
    (uniform prior). Ceilings have a uniform prior from the least score (or 0) to 1, or to as far above scores beyond 1
    as they span twice; midpoints and efficiencies are uniform in their logarithms.
    """
    top = 1.0 if scores.max() <= 1.0 else scores.max() + 2 * np.ptp(scores)
    box: list[tuple[float, float]] = [
        (np.log(samples[samples > 0][0] / 3), np.log(FURTHEST_MIDPOINT * samples[-1])),
        (np.log(EFFICIENCY_RANGE[0]), np.log(EFFICIENCY_RANGE[1])),
        (min(0.0, scores.min()), top),
    ]
    for _ in range(2):
        axes = [np.linspace(low, high, num) for (low, high), num in zip(box, NUM_VALUES, strict=True)]
        midpoint, efficiency = (np.exp(each).ravel() for each in np.meshgrid(axes[0], axes[1], indexing="ij"))
        ceilings = axes[2]
        start, posterior = _posterior(samples, scores, midpoint, efficiency, ceilings)
        cell, column = np.nonzero(posterior > posterior.max() * NEGLIGIBLE)
        places = (cell // NUM_VALUES[1], cell % NUM_VALUES[1], column)
        box = [
            (axis[max(place.min() - 1, 0)], axis[min(place.max() + 1, len(axis) - 1)])
            for axis, place in zip(axes, places, strict=True)
        ]
    probability, start, ceiling = posterior[cell, column], start[cell, column], ceilings[column]

    def height(x: Floats) -> Floats:
        share = _progress(x, midpoint, efficiency)[cell]
        return start[:, None] * (1 - share) + ceiling[:, None] * share

    at = np.linspace(0, 2 * samples[-1], 25)
    bounds = np.array([_quantiles(values, probability) for values in height(at).T])
    now, twice = height(samples[-1] * np.array([1.0, 2.0])).T
    gain = _interval(twice - now, probability)
    advice, reason = _advise(samples, scores, gain, min_gain)
    return LearningCurve(
        samples=samples,
        scores=scores,
        ceiling=_interval(ceiling, probability),
        efficiency=_interval(efficiency[cell], probability),
        midpoint=_interval(midpoint[cell], probability),
        gain=gain,
        at=at,
        low=bounds[:, 0],
        median=bounds[:, 1],
        high=bounds[:, 2],
        advice=advice,
        reason=reason,
    )


def _progress(x: Floats, midpoint: Floats, efficiency: Floats) -> Floats:
    """Return the share of the way to the ceiling at x [n] for each midpoint and efficiency [g]: [g, n]."""
    with np.errstate(divide="ignore"):
        return 1 / (1 + (midpoint[:, None] / x[None]) ** efficiency[:, None])


def _posterior(
    samples: Floats, scores: Floats, midpoint: Floats, efficiency: Floats, ceilings: Floats
) -> tuple[Floats, Floats]:
    """Return the likeliest start and the posterior [g, c] for midpoints and efficiencies [g] and ceilings [c]."""
    done = _progress(samples, midpoint, efficiency)
    left = 1 - done
    weight, overlap, offset = (left * left).sum(1)[:, None], (left * done).sum(1)[:, None], (left @ scores)[:, None]
    start = (offset - ceilings * overlap) / weight
    residual = scores @ scores - 2 * ceilings * (done @ scores)[:, None] + ceilings**2 * (done * done).sum(1)[:, None]
    residual = np.maximum(residual - start**2 * weight, 0) + LEAST_STD_ERROR**2
    # Integrating σ leaves a power of the squares, integrating the start the root of its precision.
    log_posterior = -0.5 * (len(samples) - 1) * np.log(residual) - 0.5 * np.log(weight)
    return start, np.exp(log_posterior - log_posterior.max())


def _quantiles(values: Floats, probability: Floats) -> Floats:
    order = np.argsort(values)
    cumulated = np.cumsum(probability[order]) - probability[order] / 2
    return np.interp([(1 - INTERVAL) / 2, 0.5, (1 + INTERVAL) / 2], cumulated / probability.sum(), values[order])


def _interval(values: Floats, probability: Floats) -> CredibleInterval:
    low, median, high = map(float, _quantiles(values, probability))
    return CredibleInterval(low=low, median=median, high=high)


def _advise(samples: Floats, scores: Floats, gain: CredibleInterval, min_gain: float) -> tuple[Advice, str]:
    means = np.convolve(scores, np.ones(WINDOW) / WINDOW, mode="valid")
    best = int(means.argmax())
    # Neighbours differ by the noise of both, which outliers shall not enlarge.
    noise = max(1.4826 * float(np.median(np.abs(np.diff(scores)))) / np.sqrt(2), LEAST_STD_ERROR)
    fall, gained = means[best] - means[-1], means[best] - scores[0]
    if fall > COLLAPSE_STD_ERRORS * noise * np.sqrt(2 / WINDOW) and fall > COLLAPSE_FRAC * gained:
        where = samples[best + WINDOW // 2]
        return "cannot tell", f"the score fell from {means[best]:.3f} at {where:,.0f} samples to {means[-1]:.3f}"
    expected = f"twice the samples would change the score by {gain.low:+.3f} to {gain.high:+.3f}"
    if gain.low >= min_gain:
        return "go on", expected
    return ("stop" if gain.high < min_gain else "cannot tell"), f"{expected}; {min_gain:+.3f} is worth it"


def to_text(curve: LearningCurve | None) -> str:
    """Say in words what a curve shows."""
    if curve is None:
        return f"cannot tell: fewer than {MIN_VALIDATIONS} validations; lower validation.every_steps"
    return (
        f"{curve.advice}: {curve.reason}; ceiling {curve.ceiling}, now {curve.scores[-1]:.3g}; midpoint "
        f"{curve.midpoint} of {curve.samples[-1]:,.0f} samples; efficiency {curve.efficiency}; 90 % intervals"
    )
