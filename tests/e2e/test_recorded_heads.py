"""A run whose loss reads the engine's recorded head: killed and resumed, and sampled again, it is equal to the bit."""

from pathlib import Path

import numpy as np
import pytest

from megarl.rollout.replay import read_record, record_path
from megarl.types import row_from_sample
from tests.helpers.kill_resume import SmallRun, assert_survives, make_inputs

NUM_STEPS, K = 3, 8
REWARD = Path(__file__).with_name("even_length.py")
SETTINGS = (
    f"trainer.total_steps={NUM_STEPS}",
    "algo.policy_loss.name=score_centering",
    "algo.policy_loss.center_weight=tis",
    # The tiny model's distribution is nearly flat.
    "algo.policy_loss.max_head_error=null",
    f"rollout.head_tokens={K}",
    "rollout.record=true",
    f"rewards.custom.path={REWARD}",
    "rewards.custom.name=compute_score",
)


@pytest.mark.timeout(1200)
def test_a_killed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    whole = SmallRun(inputs=inputs, name="whole", settings=SETTINGS)
    assert whole.start().wait() == 0, whole.paths.root.with_suffix(".log").read_text()
    steps = [record.metrics for record in whole.records() if "actor/grad_norm" in record.metrics]
    for metrics in steps:
        assert 0 < metrics["actor/sc_engine_head_mass"] < 1
        # The engine has the policy's weights.
        assert metrics["actor/sc_policy_head_mass"] == pytest.approx(metrics["actor/sc_engine_head_mass"], abs=1e-5)
        assert metrics["actor/sc_importance_weight"] == pytest.approx(1, abs=1e-4)
        assert abs(metrics["actor/sc_engine_kl"]) < 1e-6
        assert metrics["actor/sc_tail_mass"] == pytest.approx(1 - metrics["actor/sc_engine_head_mass"], abs=1e-5)
    assert any(metrics["actor/sc_error_bound"] > 0 for metrics in steps)
    for step in range(1, NUM_STEPS + 1):
        for row in map(row_from_sample, read_record(record_path(whole.paths.records, step)).samples):
            assert row.likely is not None
            assert row.likely.ids.shape == (row.num_response_tokens, K + 1)
            is_there = row.likely.ids == row.label_ids[:, None]
            assert (is_there.sum(1) == 1).all()
            np.testing.assert_array_equal(row.likely.logprobs[is_there], row.quantities["rollout_logprobs"])

    assert_survives(whole)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_policys_own_distribution_survives_a_kill(tmp_path: Path) -> None:
    """What ranks keep of it for a step's second update is in no checkpoint, as each step makes it anew; the weights of
    the version before, which sampled what the checkpoint has, are there.
    """
    of_heads = ("algo.policy_loss.max_head_error", "rollout.head_tokens")
    plain = tuple(each for each in SETTINGS if not each.startswith(of_heads))
    stale = ("placement.mode=split", "rollout.schedule.staleness=1", "algo.policy_loss.kept_versions=1")
    settings = (*plain, *stale, "algo.policy_loss.compared_with=trainer", "trainer.num_epochs=2")
    whole = SmallRun(inputs=make_inputs(tmp_path), name="whole", settings=settings)
    assert whole.start().wait() == 0, whole.paths.root.with_suffix(".log").read_text()
    steps = [record.metrics for record in whole.records() if "actor/grad_norm" in record.metrics]
    assert len(steps) == NUM_STEPS
    assert [metrics["staleness/lag_mean"] for metrics in steps] == [0.0, 1.0, 1.0]
    # The policy has moved away from what sampled: at first in a step's second update alone.
    assert all(metrics["actor/pg_loss"] != 0 for metrics in steps)
    away = [abs(metrics["actor/sc_importance_weight"] - 1) for metrics in steps]
    assert away[0] < away[1]
    assert_survives(whole)


@pytest.mark.timeout(1200)
def test_whole_supports_and_divergences(tmp_path: Path) -> None:
    """With top-k and top-p the head is all that was left, so that C has no tail; DPPO reads the same heads."""
    inputs, two_updates = make_inputs(tmp_path), "trainer.num_epochs=2"
    cut = (f"rollout.top_k={K}", "rollout.top_p=0.9")
    centered = SmallRun(inputs=inputs, name="cut", settings=(*SETTINGS, *cut, two_updates))
    assert centered.start().wait() == 0, centered.paths.root.with_suffix(".log").read_text()
    for record in centered.records():
        if "actor/grad_norm" in record.metrics:
            assert record.metrics["actor/sc_engine_head_mass"] == pytest.approx(1, abs=1e-6)
            assert record.metrics["actor/sc_policy_head_mass"] == pytest.approx(1, abs=1e-6)
            assert record.metrics["actor/sc_tail_mass"] == record.metrics["actor/sc_error_bound"] == 0
    widths = [
        (row.likely.ids >= 0).sum(1)
        for row in map(row_from_sample, read_record(record_path(centered.paths.records, 1)).samples)
        if row.likely is not None
    ]
    assert 1 <= np.concatenate(widths).min() < np.concatenate(widths).max() <= K

    loss = (
        "algo.policy_loss.name=dppo_top_tv",
        "algo.correction.name=rollout_ratio",
        "algo.policy_loss.clip_high=1e-9",
    )
    plain = tuple(each for each in SETTINGS if not each.startswith("algo."))
    masked = SmallRun(inputs=inputs, name="dppo", settings=(*plain, *loss, two_updates))
    assert masked.start().wait() == 0, masked.paths.root.with_suffix(".log").read_text()
    steps = [record.metrics for record in masked.records() if "actor/grad_norm" in record.metrics]
    # The second of two updates has moved some tokens further than that.
    assert steps
    assert all(0 < metrics["actor/pg_clipfrac"] < 1 for metrics in steps)
