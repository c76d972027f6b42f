"""Measures of held-out pairs."""

import math

import numpy as np
import pytest

from megarl.train.supervised import pair_metrics


def test_means_over_pairs() -> None:
    # Differences 1, 0, −1, of which one is in order; with margins 1, 0, −1 every likelihood is ½.
    numbers = (np.asarray(values, np.float32) for values in ([1, 2, 3], [0, 2, 4], [1, 0, -1]))
    assert pair_metrics(*numbers) == pytest.approx({"accuracy": 1 / 3, "margin": 0.0, "loss": math.log(2)})


def test_large_differences_stay_finite() -> None:
    chosen, rejected, margins = (np.asarray([value], np.float32) for value in (-2000, 2000, 0))
    assert pair_metrics(chosen, rejected, margins)["loss"] == 4000
