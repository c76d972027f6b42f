"""How many responses are still decoding: the distribution of largest entropy with a mean and a limit."""

import pytest

from megarl.forecast.costs import POINTS, alive


@pytest.mark.parametrize("mean", [0.05, 0.3, 0.5, 0.51, 0.8, 0.95, 1.0])
def test_the_mean_is_the_integral_of_what_is_left(mean: float) -> None:
    shares = alive(mean)
    assert len(shares) == POINTS
    assert sum(shares) / POINTS == pytest.approx(mean, abs=0.01)
    assert list(shares) == sorted(shares, reverse=True)
    assert 0 <= shares[-1] <= shares[0] <= 1


def test_half_of_the_limit_is_a_uniform_distribution() -> None:
    assert alive(0.5) == pytest.approx([1 - (i + 0.5) / POINTS for i in range(POINTS)], abs=1e-5)
