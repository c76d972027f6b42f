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
# 90 % intervals leave half of the rest on either side.
BOUNDS = (0.05, 0.5, 0.95)
NUM_DRAWS = 4000
# Those of a validation's deviation from the curve with the deviation before.
CORRELATIONS = (0.0, 0.9)
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
    the way there is done. gain: of the curve, if the run had twice the samples. at, low, median, high: the score up to
    twice the samples, which is the curve and the policy's swings about it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draws:
    """Draws of equal weight from the posterior, each [d]: the curve, σ, and the correlation ρ of deviations."""

    start: Floats
    ceiling: Floats
    midpoint: Floats
    efficiency: Floats
    sigma: Floats
    rho: Floats

    def heights(self, x: Floats) -> Floats:
        """Return the curves at x [n]: [d, n]."""
        share = _progress(x, self.midpoint, self.efficiency)
        return self.start[:, None] * (1 - share) + self.ceiling[:, None] * share

    def levels(self, x: Floats, samples: Floats, scores: Floats, rng: np.random.Generator) -> Floats:
        """Return the score at x [n]: [d, n]. Deviations that are correlated are its own: those seen, and afterwards
        what is left of the last and new ones.
        """
        seen = scores - self.heights(samples)
        swing = np.array([np.interp(x, samples, each) for each in seen])
        left = self.rho[:, None] ** (np.maximum(x - samples[-1], 0) * (len(samples) - 1) / np.ptp(samples))
        new = (self.sigma * rng.normal(size=NUM_DRAWS))[:, None] * np.sqrt((1 - left**2) / (1 - self.rho[:, None] ** 2))
        return self.heights(x) + (self.rho > 0)[:, None] * (swing * left + new)


def fit(samples: Floats, scores: Floats, *, min_gain: float = MIN_GAIN) -> LearningCurve:
    """Fit the sigmoid to scores [n] at ascending numbers of samples [n].

    Validations deviate from the curve normally, equally at all points, and by an unknown size, which is integrated out
    (prior 1/σ), as is the start (uniform prior). A deviation is correlated with that of the validation before by one of
    `CORRELATIONS`, equally likely: policies swing for several validations. Ceilings have a uniform prior from the least
    score (or 0) to 1, or to as far above scores beyond 1 as they span twice; midpoints and efficiencies are uniform in
    their logarithms.
    """
    rng = np.random.default_rng(0)
    draws = _draw(samples, scores, rng)
    at = np.linspace(0, 2 * samples[-1], 25)
    low, median, high = np.quantile(draws.levels(at, samples, scores, rng), BOUNDS, axis=0)
    now, twice = draws.heights(samples[-1] * np.array([1.0, 2.0])).T
    gain = _interval(twice - now)
    advice, reason = _advise(samples, scores, gain, min_gain)
    return LearningCurve(
        samples=samples,
        scores=scores,
        ceiling=_interval(draws.ceiling),
        efficiency=_interval(draws.efficiency),
        midpoint=_interval(draws.midpoint),
        gain=gain,
        at=at,
        low=low,
        median=median,
        high=high,
        advice=advice,
        reason=reason,
    )


def _draw(samples: Floats, scores: Floats, rng: np.random.Generator) -> _Draws:
    top = 1.0 if scores.max() <= 1.0 else scores.max() + 2 * np.ptp(scores)
    box: list[tuple[float, float]] = [
        (np.log(samples[samples > 0][0] / 3), np.log(FURTHEST_MIDPOINT * samples[-1])),
        (np.log(EFFICIENCY_RANGE[0]), np.log(EFFICIENCY_RANGE[1])),
        (min(0.0, scores.min()), top),
    ]
    for _ in range(2):
        axes = [np.linspace(low, high, num) for (low, high), num in zip(box, NUM_VALUES, strict=True)]
        midpoint, efficiency = (np.exp(each).ravel() for each in np.meshgrid(axes[0], axes[1], indexing="ij"))
        start, squares, posterior = _posterior(_progress(samples, midpoint, efficiency), scores, axes[2])
        _, cell, column = np.nonzero(posterior > posterior.max() * NEGLIGIBLE)
        places = (cell // NUM_VALUES[1], cell % NUM_VALUES[1], column)
        box = [
            (axis[max(place.min() - 1, 0)], axis[min(place.max() + 1, len(axis) - 1)])
            for axis, place in zip(axes, places, strict=True)
        ]
    # Evenly spaced quantiles of the cells.
    cumulated = np.cumsum(posterior)
    drawn = np.searchsorted(cumulated, (np.arange(NUM_DRAWS) + 0.5) / NUM_DRAWS * cumulated[-1])
    rng.shuffle(drawn)
    correlation, cell, column = np.unravel_index(drawn, posterior.shape)
    return _Draws(
        start=start.ravel()[drawn],
        ceiling=axes[2][column],
        midpoint=midpoint[cell],
        efficiency=efficiency[cell],
        sigma=np.sqrt(squares.ravel()[drawn] / rng.chisquare(len(samples) - 1, NUM_DRAWS)),
        rho=np.array(CORRELATIONS)[correlation],
    )


def _progress(x: Floats, midpoint: Floats, efficiency: Floats) -> Floats:
    """Return the share of the way to the ceiling at x [n] for each midpoint and efficiency [g]: [g, n]."""
    with np.errstate(divide="ignore"):
        return 1 / (1 + (midpoint[:, None] / x[None]) ** efficiency[:, None])


def _posterior(done: Floats, scores: Floats, ceilings: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the likeliest start, the sum of squared deviations and the posterior, each [correlation, g, c].

    done [g, n]: the shares of the way to the ceiling. scores: [n]. ceilings: [c].
    """
    results = []
    for rho in CORRELATIONS:
        # Rows of this matrix make deviations independent.
        whiten = np.eye(len(scores)) - rho * np.eye(len(scores), k=-1)
        whiten[0, 0] = np.sqrt(1 - rho**2)
        way, left, seen = done @ whiten.T, (1 - done) @ whiten.T, whiten @ scores
        weight, overlap, offset = (left * left).sum(1)[:, None], (left * way).sum(1)[:, None], (left @ seen)[:, None]
        start = (offset - ceilings * overlap) / weight
        squares = seen @ seen - 2 * ceilings * (way @ seen)[:, None] + ceilings**2 * (way * way).sum(1)[:, None]
        squares = np.maximum(squares - start**2 * weight, 0) + LEAST_STD_ERROR**2
        # Integrating σ leaves a power of the squares, integrating the start the root of its precision.
        log_posterior = -0.5 * (len(scores) - 1) * np.log(squares) - 0.5 * np.log(weight / (1 - rho**2))
        results.append((start, squares, log_posterior))
    start, squares, log_posterior = (np.array(each) for each in zip(*results, strict=True))
    return start, squares, np.exp(log_posterior - log_posterior.max())


def _interval(values: Floats) -> CredibleInterval:
    low, median, high = map(float, np.quantile(values, BOUNDS))
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
