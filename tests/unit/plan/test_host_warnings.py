"""What is said of a host before a run starts on it, by the same rule as in dry runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config import load_config
from megarl.plan.build import host_warnings, open_task, plan_run, start_warnings
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, generate
from tests.helpers.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[3]
LESS = "host memory: a node needs at least "


def test_a_start_says_what_a_dry_run_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_checkpoint(tmp_path / "model", tied=False)
    monkeypatch.setattr("megarl.plan.build.host_memory", lambda: 1000)
    config = load_config(ROOT / "configs/run/sums-rl.yaml", [f"model.path={model}"])
    (said,) = start_warnings(config)
    assert said.startswith(LESS)
    assert said in plan_run(config, host_bytes=1000, with_data=False).warnings
    rows = generate(TASKS.get("sums"), tmp_path, GenerateConfig(seed=0, num_sft=256, num_train=1, num_val=1)).sft
    overrides = [f"model.path={model}", f"sft.train=[{rows}]"]
    opened, _ = open_task("sft", load_config(ROOT / "configs/run/sums-sft.yaml", overrides))
    assert [each for each in opened.inputs.warnings if each.startswith(LESS)]


def test_more_ranks_than_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(ROOT / "configs/run/sums-rl.yaml", ["actor.layout.dp=8", "placement.trainer.num_nodes=2"])
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    assert list(host_warnings(config.placement, config.actor.layout, {}, 0)) == [
        "actor.layout: 4 ranks on a node take turns on the 3 CPUs of this host; use fewer"
    ]
    fewer = replace(config.actor.layout, dp=6)
    assert list(host_warnings(config.placement, fewer, {}, 0)) == []
