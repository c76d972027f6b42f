"""The forecast of a run file is that of `megarl plan` for the same settings."""

from pathlib import Path

import pytest

from megarl.config import load_config
from megarl.errors import ConfigError
from megarl.forecast.costs import planned_stop
from megarl.forecast.search import find_layouts
from megarl.plan.build import plan_run
from megarl.plan.sizes import size_run
from tests.unit.forecast.test_plan_layouts import planned_step, run_file, search_for

REPOSITORY = Path(__file__).parents[3]


def test_a_run_file_and_the_search_have_one_model_of_time(tmp_path: Path) -> None:
    for choice in find_layouts(search_for("qwen3-1.7b", 4), most=2):
        assert planned_step(load_config(run_file(tmp_path, choice))) == choice.cost


def test_what_a_run_would_refuse_has_no_forecast(tmp_path: Path) -> None:
    (choice,) = find_layouts(search_for("qwen3-1.7b", 4), most=1)
    with pytest.raises(ConfigError, match=r"actor\.layout"):
        planned_step(load_config(run_file(tmp_path, choice), ["actor.layout.dp=3"]))


def test_a_checkpoint_holds_weights_main_parameters_and_moments() -> None:
    """14 bytes of each parameter (32.76e9 of Qwen3-32B), written by four nodes at 1 GB/s."""
    overrides = ["placement.trainer.num_nodes=4"]
    config = load_config(REPOSITORY / "configs" / "run" / "gsm8k-qwen3-32b.yaml", overrides)
    stop = planned_stop(size_run(config))
    assert stop.checkpoint == pytest.approx(14 * 32.762e9 / 4e9, rel=1e-3)
    assert 0 < stop.uncut < stop.step
    # Eight ranks of a node have a sixteenth of the weights each (2 bytes), and half of that of the optimizer (12).
    for what in ("the offloaded trainer", "a checkpoint in the making"):
        assert stop.host[what] == pytest.approx(8 * (2 / 16 + 12 / 32) * 32.762e9, rel=1e-2)
    # These are 122.05 GiB each.
    plan = plan_run(config, device_bytes=80 << 30, host_bytes=200 << 30, with_data=False)
    assert any("122 for the offloaded trainer, 122 for a checkpoint in the making" in text for text in plan.warnings)
