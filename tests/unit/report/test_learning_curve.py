"""Fitted learning curves: known curves are found, intervals hold the truth as often as they say, and advice follows."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from megarl.cli import main
from megarl.report.learning_curve import fit

Floats = npt.NDArray[np.float64]
# Where the midpoint lies, as a share of the samples: a curve that has flattened, one in its middle, one that begins.
MIDPOINTS = {"flat": (0.05, 0.4), "middle": (0.1, 1.5), "beginning": (0.5, 3.0)}


def sigmoid(x: Floats, start: float, ceiling: float, midpoint: float, efficiency: float) -> Floats:
    """Written as rises from 0: x^e / (x^e + m^e)."""
    return start + (ceiling - start) * x**efficiency / (x**efficiency + midpoint**efficiency)


def covered(stage: str, num_curves: int) -> tuple[float, float]:
    """Shares of random curves, with noise from independent to swings, whose true ceiling and gain are in intervals."""
    rng = np.random.default_rng(62)
    hits = np.zeros(2)
    for _ in range(num_curves):
        x = np.linspace(0, 1, rng.integers(8, 40)) * rng.integers(1_000, 100_000)
        ceiling, efficiency = rng.uniform(0.2, 1), rng.uniform(0.7, 3)
        start = rng.uniform(0, 0.8) * ceiling
        midpoint = x[-1] * np.exp(rng.uniform(*np.log(MIDPOINTS[stage])))
        exact = sigmoid(np.append(x, 2 * x[-1]), start, ceiling, midpoint, efficiency)
        noise, correlation = rng.uniform(0.005, 0.04) * rng.normal(size=len(x)), rng.uniform(0, 0.95)
        for i in range(1, len(x)):
            noise[i] = correlation * noise[i - 1] + np.sqrt(1 - correlation**2) * noise[i]
        curve, gain = fit(x, np.clip(exact[:-1] + noise, 0, 1)), exact[-1] - exact[-2]
        hits += curve.ceiling.low <= ceiling <= curve.ceiling.high, curve.gain.low <= gain <= curve.gain.high
    return hits[0] / num_curves, hits[1] / num_curves


def test_a_curve_without_noise_is_found() -> None:
    """0.2 + 0.6 · x² / (x² + 9 · 10⁶): half way at 3,000 samples; a fifth is left at 6,000, 1/17 at 12,000."""
    x = np.linspace(0, 6_000, 25)
    curve = fit(x, sigmoid(x, 0.2, 0.8, 3_000, 2))
    assert curve.ceiling.low < 0.8 < curve.ceiling.high
    assert curve.ceiling.high - curve.ceiling.low < 0.02
    assert curve.midpoint.median == pytest.approx(3_000, rel=0.02)
    assert curve.efficiency.median == pytest.approx(2, rel=0.02)
    assert curve.gain.median == pytest.approx(0.6 * (0.2 - 1 / 17), rel=0.02)
    assert curve.advice == "go on"


def test_the_unit_of_samples_does_not_matter() -> None:
    x = np.linspace(0, 6_000, 12)
    scores = sigmoid(x, 0.2, 0.8, 3_000, 2) + 0.01 * np.random.default_rng(0).normal(size=12)
    one, other = fit(x, scores), fit(1_000 * x, scores)
    assert other.midpoint.median == pytest.approx(1_000 * one.midpoint.median)
    assert other.ceiling.low == pytest.approx(one.ceiling.low)
    assert other.gain.high == pytest.approx(one.gain.high)


@pytest.mark.parametrize(
    ("scores", "advice", "reason"),
    [
        (np.full(12, 0.5), "stop", "twice the samples would change the score by"),
        (np.linspace(0.1, 0.6, 12), "go on", "twice the samples would change the score by"),
        (np.linspace(-5, -2, 12), "go on", "twice the samples would change the score by"),
        (np.array([0.1, 0.3, 0.5, 0.6, 0.65, 0.6, 0.4, 0.2, 0.1, 0.1]), "cannot tell", "the score fell from 0.617"),
        (np.array([0.2, 0.4, 0.2, 0.5, 0.3, 0.5, 0.4, 0.55]), "cannot tell", "is worth it"),
    ],
    ids=["flat", "rising", "not in [0, 1]", "collapsed", "noisy"],
)
def test_advice(scores: Floats, advice: str, reason: str) -> None:
    curve = fit(np.arange(len(scores)) * 64.0, scores)
    assert curve.advice == advice
    assert reason in curve.reason


@pytest.mark.parametrize("stage", MIDPOINTS)
def test_intervals_of_a_few_curves(stage: str) -> None:
    assert min(covered(stage, 8)) >= 0.5


@pytest.mark.long
@pytest.mark.parametrize("stage", MIDPOINTS)
def test_intervals_hold_the_truth_as_often_as_they_say(stage: str) -> None:
    """They are 90 % intervals: 85 to 95 % of 1,000 curves."""
    assert all(0.85 <= share <= 0.95 for share in covered(stage, 1_000))


def test_bands_and_advice_on_real_runs() -> None:
    """Validations every 3,200 samples of the runs of configs/study/offpolicy-float8.yaml, the later ones hidden.

    The bands of half a run hold the mean of the last five validations of 24 of 32: of the other eight, seven rose to
    above theirs. A gain is the difference between means of three validations.
    """
    runs: dict[str, list[float]] = json.loads((Path(__file__).parent / "study_a.json").read_text(encoding="utf-8"))
    right, held = [], []
    for scores in runs.values():
        for i in range(6, 11):
            curve = fit(3_200.0 * np.arange(i + 1), np.array(scores[: i + 1]))
            gain = np.mean(scores[2 * i - 2 : 2 * i + 1]) - np.mean(scores[i - 2 : i + 1])
            if curve.advice != "cannot tell":
                right.append((curve.advice == "go on") == (gain >= 0.01))
        low, high = (np.interp(3_200.0 * 18, curve.at, bound) for bound in (curve.low, curve.high))
        held.append(low <= np.mean(scores[-5:]) <= high)
    assert len(right) >= 10
    assert np.mean(right) >= 0.9
    assert np.mean(held) >= 0.7


def test_the_command_draws_runs_and_says_what_it_sees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten validations, of which those up to step 5 are six; a run of three cannot tell."""
    for name, num in (("long", 10), ("short", 3)):
        run = tmp_path / name
        run.mkdir()
        (run / "config.yaml").write_text("trainer: {prompts_per_step: 8}\nrollout: {num_samples: 4}\n", "utf-8")
        (run / "metrics.jsonl").write_text(
            "".join(
                f'{{"step": {step}, "time_s": {step}.0, "metrics": {{"val/test_score/sums": {0.08 * step}}}}}\n'
                for step in range(num)
            ),
            "utf-8",
        )
    main(["learning-curve", str(tmp_path / "long"), str(tmp_path / "short"), "--until", "5"])
    first, second, wrote = capsys.readouterr().out.strip().split("\n")
    assert first.startswith("long: go on: twice the samples would change the score by +0.")
    assert "of 160 samples" in first
    assert second == "short: cannot tell: fewer than 6 validations; lower validation.every_steps"
    assert wrote == f"wrote {tmp_path / 'long' / 'learning_curve.png'}"
    assert (tmp_path / "long" / "learning_curve.png").stat().st_size > 10_000
