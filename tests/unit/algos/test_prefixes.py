"""How long prefixes are: the public schedules, and draws that repeat."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algos.prefixes import (
    PREFIX_STRATEGIES,
    Slot,
    keeps_demonstration,
    num_prefixed,
    prefix_length,
    prefix_ratios,
)
from megarl.config.algo import DemonstrationConfig
from megarl.errors import ConfigError


def windows(case: dict[str, Any]) -> list[list[float]]:
    params = case["params"]
    cfg = DemonstrationConfig(decay_steps=params["prefix_steps"], max_ratio=params["prefix_linear_max_ratio"])
    strategy = PREFIX_STRATEGIES.get(params["strategy"])
    found = [strategy.window(Slot(step=step, index=0, count=1), cfg) for step in case["inputs"]["global_step"]]
    return [[window.low, window.high] for window in found]


@pytest.mark.parametrize("name", ["linear_max", "reverse_linear"])
def test_window_golden(name: str, golden: Any, check_golden: Any) -> None:
    case = golden(f"E.prefix.{name}")
    check_golden(windows(case), case["expected"], case)


def test_linear_golden(golden: Any, check_golden: Any) -> None:
    case = golden("E.prefix.linear")
    check_golden(windows(case), [[ratio, ratio] for ratio in case["expected"]], case)


def ratios(num_samples: int, *, uid: str = "q", step: int = 1, run_seed: int = 0, **cfg: Any) -> tuple[float, ...]:
    return prefix_ratios(DemonstrationConfig(**cfg), uid=uid, step=step, num_samples=num_samples, run_seed=run_seed)


def test_fixed_golden(golden: Any, check_golden: Any) -> None:
    case = golden("E.prefix.fixed")
    params = case["params"]
    got = ratios(
        case["inputs"]["n"],
        strategy="fixed",
        num_prefixed=params["n_prefix"],
        min_ratio=params["min_prefix_ratio"],
        max_ratio=params["max_prefix_ratio"],
    )
    check_golden(got, case["expected"], case)


def test_lengths_golden(golden: Any) -> None:
    case = golden("E.prefix.len")
    # The end token counts; a prompt without a target has none.
    lengths = [n + 1 if n else 0 for n in case["inputs"]["target_len"]]
    got = [prefix_length(n, ratio) for n, ratio in zip(lengths, case["inputs"]["ratio"], strict=True)]
    assert got == case["expected"]


def test_a_product_that_is_whole_is_not_rounded_down() -> None:
    assert 0.29 * 100 < 29
    assert prefix_length(100, 0.29) == 29


def test_a_single_fixed_prefix_has_the_largest_ratio() -> None:
    assert ratios(4, strategy="fixed", num_prefixed=1, max_ratio=1.0) == (1.0, 0.0, 0.0, 0.0)


def test_none_of_the_samples() -> None:
    assert ratios(2, strategy="random", num_prefixed=0, min_ratio=0.5, shared=True) == (0.0, 0.0)
    assert ratios(2, strategy="none", max_ratio=1.0) == (0.0, 0.0)


def test_more_prefixes_than_samples_are_refused() -> None:
    cfg = DemonstrationConfig(strategy="random", num_prefixed=5)
    with pytest.raises(ConfigError, match=r"num_prefixed: got 5, expected <= rollout.num_samples=4; lower it"):
        num_prefixed(cfg, 4)
    assert num_prefixed(cfg, 5) == 5
    assert num_prefixed(DemonstrationConfig(), 4) == 4


@given(st.integers(0, 2**63), st.integers(1, 1000), st.text(max_size=8))
def test_random_ratios_lie_in_their_window_and_repeat(run_seed: int, step: int, uid: str) -> None:
    cfg = {"strategy": "random", "min_ratio": 0.2, "max_ratio": 0.6}
    got = ratios(4, uid=uid, step=step, run_seed=run_seed, **cfg)
    assert all(0.2 <= ratio <= 0.6 for ratio in got)
    assert len(set(got)) == 4
    assert got == ratios(4, uid=uid, step=step, run_seed=run_seed, **cfg)
    # A sample's ratio does not depend on how many others there are.
    assert got[:2] == ratios(2, uid=uid, step=step, run_seed=run_seed, **cfg)


def test_ratios_depend_on_all_that_identifies_a_sample() -> None:
    cfg: dict[str, Any] = {"strategy": "random", "max_ratio": 1.0}
    base = ratios(1, **cfg)
    assert len({base, ratios(1, uid="r", **cfg), ratios(1, step=2, **cfg), ratios(1, run_seed=1, **cfg)}) == 4


def test_shared_ratios_are_equal() -> None:
    got = ratios(4, strategy="random", shared=True, num_prefixed=3)
    assert got[0] == got[1] == got[2] > 0
    assert got[3] == 0


def test_random_ratios_are_uniform() -> None:
    values = [ratios(1, uid=str(i), strategy="random", max_ratio=1.0)[0] for i in range(4000)]
    # Mean 1/2 and variance 1/12; the mean's standard error is 0.0046.
    mean = sum(values) / len(values)
    assert abs(mean - 0.5) < 5 * math.sqrt(1 / 12 / len(values))
    assert max(values) > 0.99
    assert min(values) < 0.01


def test_linear_variance_stays_around_the_schedule_and_within_bounds() -> None:
    cfg: dict[str, Any] = {"strategy": "linear_variance", "max_ratio": 0.8, "variance": 0.3, "decay_steps": 300}
    middle = [ratios(1, uid=str(i), step=151, **cfg)[0] for i in range(200)]
    assert all(0.1 <= ratio <= 0.7 for ratio in middle)
    assert max(middle) - min(middle) > 0.5
    ends = [ratios(1, uid=str(i), step=step, **cfg)[0] for i in range(200) for step in (1, 301)]
    assert max(ends) == 1.0
    assert min(ends) == 0.0


@pytest.mark.parametrize(("share", "kept"), [(0.0, 0), (1.0, 2000)])
def test_keeping_all_or_no_demonstrations(share: float, kept: int) -> None:
    cfg = DemonstrationConfig(keep_frac=share)
    assert sum(keeps_demonstration(cfg, uid=str(i), run_seed=0) for i in range(2000)) == kept


def test_keeping_some_demonstrations() -> None:
    half = DemonstrationConfig(keep_frac=0.5)
    kept = {i for i in range(2000) if keeps_demonstration(half, uid=str(i), run_seed=3)}
    assert abs(len(kept) - 1000) < 5 * math.sqrt(500)
    # Raising the share keeps those that were kept.
    more = DemonstrationConfig(keep_frac=0.7)
    assert all(keeps_demonstration(more, uid=str(i), run_seed=3) for i in kept)


def test_unknown_strategies_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"algo.demonstrations.strategy: unknown prefix strategy 'linaer'"):
        ratios(1, strategy="linaer")
