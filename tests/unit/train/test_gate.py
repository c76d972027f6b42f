"""The gate before the first update: engine and trainer must agree on what the engine sampled."""

import math
from typing import Literal

import numpy as np
import pytest

from megarl.config.algo import CorrectionConfig
from megarl.config.schema import EngineConfig, ModelConfig, TrainerConfig
from megarl.errors import MismatchError
from megarl.train.gate import MismatchGate, engine_metrics, mismatch_of
from megarl.types import Row

TIS, ROLLOUT_RATIO = CorrectionConfig(name="tis_upper"), CorrectionConfig(name="rollout_ratio")


def make_row(
    engine: list[float], trainer: list[float] | None = None, *, mask: list[bool] | None = None, given: int = 0
) -> Row:
    """A row with log-probs of the engine and perhaps of the trainer; its first `given` tokens are a demonstration's."""
    n = len(engine)
    quantities = {"rollout_logprobs": np.array(engine, np.float32)}
    if trainer is not None:
        quantities["old_logprobs"] = np.array(trainer, np.float32)
    if given:
        quantities["demonstration"] = (np.arange(n) < given).astype(np.float32)
    return Row(
        uid="q",
        sample_index=0,
        token_ids=np.arange(n + 1),
        num_prompt_tokens=1,
        loss_mask=np.array(mask or [True] * n),
        quantities=quantities,
    )


def gate(dtype: Literal["float32", "bfloat16"] = "float32", limit: float | None = None) -> MismatchGate:
    return MismatchGate(TrainerConfig(mismatch_gate_nats=limit), ModelConfig(dtype=dtype), EngineConfig())


def test_rows_of_different_lengths_are_compared_on_sampled_tokens() -> None:
    rows = [
        make_row([-1.0, -2.0, -3.0], [-1.5, -9.0, -3.0], mask=[True, False, True]),
        # No engine sampled the demonstration; what stands there for its log-prob is 0.
        make_row([0.0, -1.0], [-4.0, -0.75], given=1),
    ]
    got = mismatch_of(rows, [row.quantities["old_logprobs"] for row in rows])
    assert (got.num_tokens, got.num_rows) == (3, 2)
    # |0.5|, 0, |−0.25|; signed 0.5 and −0.25.
    assert got.metrics()["mismatch/abs_mean"] == pytest.approx(0.25)
    assert got.metrics()["mismatch/k1"] == pytest.approx(0.25 / 3)


@pytest.mark.parametrize(
    ("dtype", "limit", "difference", "passes"),
    [
        ("float32", None, 0.9e-4, True),
        ("float32", None, 1.1e-4, False),
        ("bfloat16", None, 0.049, True),
        ("bfloat16", None, 0.051, False),
        ("float32", 0.5, 0.49, True),
        ("bfloat16", 0.01, 0.011, False),
    ],
)
def test_limits(dtype: Literal["float32", "bfloat16"], limit: float | None, difference: float, passes: bool) -> None:
    checked, rows = gate(dtype, limit), [make_row([-1.0, -1.0], [-1.0 - difference, -1.0 + difference])]
    if passes:
        checked.check(rows)
    else:
        with pytest.raises(MismatchError, match=r"differ from the trainer's by .* nats on average before the first"):
            checked.check(rows)
    assert checked.passed == passes


def test_engines_in_bfloat16_have_its_limit_whatever_the_trainer_computes_in() -> None:
    checked = MismatchGate(TrainerConfig(), ModelConfig(dtype="float32"), EngineConfig(dtype="bfloat16"))
    checked.check([make_row([-1.0], [-1.049])])
    assert checked.passed


@pytest.mark.parametrize(
    "engine", [EngineConfig(quantization="fp8_per_channel"), EngineConfig(kv_cache_dtype="fp8_e4m3")]
)
@pytest.mark.parametrize(
    ("limit", "difference", "passes"), [(None, 0.19, True), (None, 0.21, False), (0.1, 0.11, False)]
)
def test_engines_that_round_to_float8_may_differ_more(
    engine: EngineConfig, limit: float | None, difference: float, passes: bool
) -> None:
    checked = MismatchGate(TrainerConfig(mismatch_gate_nats=limit), ModelConfig(), engine)
    rows = [make_row([-1.0], [-1.0 - difference])]
    if passes:
        checked.check(rows)
    else:
        with pytest.raises(MismatchError):
            checked.check(rows)


def test_the_message_has_both_numbers_and_the_key() -> None:
    message = r"by 2\.50e-01 nats .*, the limit is 1e-04 \(trainer\.mismatch_gate_nats\); check that both use the same"
    with pytest.raises(MismatchError, match=message):
        gate().check([make_row([-1.0], [-1.25])])


def test_nan_does_not_pass() -> None:
    with pytest.raises(MismatchError, match="by nan nats"):
        gate().check([make_row([-1.0], [math.nan])])


def test_the_mismatch_is_that_of_fresh_tokens() -> None:
    """Stale ones differ because of training; their drift is measured apart."""
    row = make_row([-1.0, -2.0, -3.0], [-1.5, -4.0, -3.25])
    stale = row.with_quantities(lag=np.array([0, 1, 0], np.float32))
    metrics = engine_metrics([stale], {0: np.zeros(3, np.float32)}, TIS)
    assert metrics["mismatch/abs_mean"] == pytest.approx(0.375)
    assert metrics["staleness/drift_abs_mean_lag_1"] == pytest.approx(2.0)
    assert metrics["staleness/spanning_frac"] == 1.0
    # The weights of a correction that knew the old log-probs were measured with it.
    assert not [name for name in metrics if name.startswith("is/")]


def test_no_mismatch_is_claimed_where_no_token_is_fresh() -> None:
    row = make_row([-1.0], [-1.5]).with_quantities(lag=np.array([1], np.float32))
    metrics = engine_metrics([row], {}, TIS)
    assert not [name for name in metrics if name.startswith("mismatch/")]
    assert metrics["staleness/frac_lag_1"] == 1.0
    assert metrics["staleness/drift_abs_mean_lag_1"] == pytest.approx(0.5)


def test_without_old_logprobs_the_first_mini_batch_tells_the_difference() -> None:
    """Nothing can be said of the second row: the policy had moved when its log-probs were computed."""
    rows = [
        make_row([-1.0, -2.0, -3.0], mask=[True, True, False]),
        make_row([-1.0]),
    ]
    before = {0: np.array([-1.0, -2.0 - math.log(2), 9.0], np.float32)}
    metrics = engine_metrics(rows, before, ROLLOUT_RATIO)
    assert metrics["mismatch/abs_mean"] == pytest.approx(math.log(2) / 2)
    # ρ is 1 and 1/2: mean ρ² − 1 = −3/8, the product's square − 1 = −3/4, and −mean ln ρ.
    assert metrics["is/chi2_token"] == pytest.approx(-3 / 8)
    assert metrics["is/chi2_seq"] == pytest.approx(-3 / 4)
    assert metrics["is/k3"] == pytest.approx((math.log(2) - 0.5) / 2)
    assert metrics["is/log_ppl_gap"] == pytest.approx(math.log(2) / 2)
    # No token is weighted or rejected.
    for name in ("accept_frac", "w_mean", "w_max", "ess"):
        assert metrics[f"is/{name}"] == 1.0
    for name in ("rejected_advantage_pos", "rejected_advantage_neg", "veto_frac"):
        assert metrics[f"is/{name}"] == 0.0


def test_lags_are_those_of_all_rows_and_drifts_those_of_compared_ones() -> None:
    first, second = (make_row([-1.0]) for _ in range(2))
    rows = [first.with_quantities(lag=np.array([1], np.float32)), second.with_quantities(lag=np.array([2], np.float32))]
    metrics = engine_metrics(rows, {0: np.array([-1.25], np.float32)}, ROLLOUT_RATIO)
    assert (metrics["staleness/lag_mean"], metrics["staleness/frac_lag_2"]) == (1.5, 0.5)
    assert metrics["staleness/drift_abs_mean_lag_1"] == pytest.approx(0.25)
    assert "staleness/drift_abs_mean_lag_2" not in metrics


def test_it_is_asked_once() -> None:
    """Later rows of an updated policy, and rows without old log-probs, are none of its business."""
    checked = gate()
    checked.check([make_row([-1.0], [-1.0])])
    checked.check([make_row([-1.0], [-9.0])])
    checked.check([make_row([-1.0], [-1.0]).only(())])


def test_rows_that_no_engine_sampled_prove_nothing() -> None:
    checked = gate()
    checked.check([make_row([0.0, 0.0], [-1.0, -2.0], given=2)])
    assert not checked.passed
    with pytest.raises(MismatchError):
        checked.check([make_row([-1.0], [-1.25])])
