"""The page "From 8 to 512 H100s" has what `megarl plan` and `--dry-run` print, and its run files are accepted."""

from pathlib import Path

import pytest

from megarl.config.check import check_train
from megarl.config.check_model import check_model
from megarl.config.load import load_config
from megarl.forecast.plan_layouts import GIB, layout_text
from megarl.forecast.search import find_layouts
from megarl.plan.build import plan_run
from megarl.weights.families import read_model_spec
from tests.unit.forecast.test_plan_layouts import search_for

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/scaling.md"
SIZES = {"qwen3-8b": 8, "qwen3-30b-a3b": 16, "qwen3-32b": 32, "qwen3-235b-a22b": 128, "deepseek-v3": 512}
# A search over many GPUs and a plan of their sync take many seconds.
models = pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.long) if gpus > 32 else name for name, gpus in SIZES.items()]
)


def assert_on_the_page(*cells: str) -> None:
    line = f"| {' | '.join(cells)} |"
    assert line in PAGE.read_text(encoding="utf-8").splitlines(), f"docs/scaling.md is stale; the command prints {line}"


@models
def test_seconds_are_those_of_the_first_choice(model: str) -> None:
    choice = find_layouts(search_for(model, SIZES[model]), most=1)[0]
    config, cost = choice.config, choice.cost
    assert_on_the_page(
        str(SIZES[model]),
        f"`{model}`",
        layout_text(config.actor.layout),
        choice.engine.layout,
        f"{config.trainer.prompts_per_step * config.rollout.num_samples:,}",
        *(f"{seconds:.1f}" for seconds in (cost.generate, cost.train)),
        f"{cost.sync:.2f}",
        ", ".join(max(parts, key=parts.__getitem__) for parts in (cost.generate_parts, cost.train_parts)),
    )


@models
def test_memory_is_that_of_the_run_file(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(Path(f"configs/run/gsm8k-{model}.yaml"))
    plan = plan_run(config, device_bytes=80 * GIB)
    sizes = (
        max(phase.total for device in plan.devices for phase in device.phases.values()),
        max(node.offloaded for node in plan.nodes),
        max(node.checkpoint for node in plan.nodes),
        plan.bridge.max_received_bytes,
    )
    assert sizes[0] < 0.9 * 80 * GIB
    assert_on_the_page(
        str(config.actor.layout.world_size),
        f"`gsm8k-{model}`",
        layout_text(config.actor.layout),
        plan.engine.layout,
        *(f"{size / GIB:.1f}" for size in sizes),
    )


@pytest.mark.parametrize("model", SIZES)
def test_run_files_suit_their_models(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(Path(f"configs/run/gsm8k-{model}.yaml"))
    check_train(config)
    check_model(config, read_model_spec(f"configs/model/hf/{model}").hf_config)
    assert config.actor.layout.world_size == SIZES[model]
