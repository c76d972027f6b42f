"""`actor.recompute: auto`: the least that fits, by the plan's own memory, and that a run saves what was chosen."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.config import load_config
from megarl.config.load import with_overrides
from megarl.config.recompute import RecomputeConfig
from megarl.config.schema import Config
from megarl.config.target import Target, checked_for, pinned_packages
from megarl.forecast.layout_search import new_search
from megarl.host.device.platform import assuming
from megarl.plan.build import open_task, settle_run
from megarl.plan.devices import most_bytes
from megarl.plan.recompute import FILL, recomputed_share
from megarl.plan.sizes import SizedRun, needs_of, size_run
from megarl.run.resume import changed_settings
from tests.helpers.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[3]
GIB = 2**30
BESIDE = ["placement.offload=false"]
GIVEN_SHARE = [*BESIDE, "rollout.engine.gpu_memory_utilization=0.3"]


def run_of(name: str, *overrides: str) -> Config:
    return load_config(ROOT / f"configs/run/gsm8k-{name}.yaml", overrides)


def sized(config: Config, gib: float) -> SizedRun:
    with assuming("cuda"):
        return size_run(config, int(gib * GIB))


def peak_of(run: SizedRun) -> float:
    return most_bytes(run.devices())[0] / GIB


# By the memory of an update without any recompute, in GiB: 42.0, 53.4, 59.4; of the others, 62.2 and 50.2 with full.
@pytest.mark.parametrize(
    ("name", "expected"),
    [("qwen3-8b", "none"), ("qwen3-32b", "none"), ("qwen3-30b-a3b", "none"), ("qwen3-235b-a22b", "full")],
)
def test_shipped_runs_on_h100s(name: str, expected: str) -> None:
    run = sized(run_of(name), 80)
    assert run.config.actor.in_words() == expected
    assert {role.settings.recompute for role in run.roles} == {expected}
    assert any(each.key == "actor.recompute" and each.value == expected for each in run.derived)


@pytest.mark.parametrize(
    ("name", "overrides", "sizes"),
    [
        ("qwen3-8b", [], (28, 31, 36, 47)),
        pytest.param("qwen3-30b-a3b", [], (38, 46, 67), marks=pytest.mark.long),
        pytest.param("deepseek-v3", [], (116,), marks=pytest.mark.long),
        ("qwen3-8b", GIVEN_SHARE, (80,)),
        ("qwen3-8b", BESIDE, (141,)),
    ],
)
def test_nothing_that_costs_less_fits(name: str, overrides: list[str], sizes: tuple[int, ...]) -> None:
    config, shares, words = run_of(name, *overrides), list[float](), list[str]()
    for gib in sizes:
        run = sized(config, gib)
        dims, actor = run.actor.dims, run.config.actor
        most = max(map(max, actor.layout.chunk_layers(dims.num_layers)))

        def cost(way: RecomputeConfig, dims: Any = dims, most: int = most) -> float:
            return recomputed_share(way, dims, num_tokens=16384, chunk_layers=most)

        shares.append(cost(actor))
        words.append(actor.in_words())
        assert peak_of(run) <= FILL * gib
        cheaper = [RecomputeConfig()]
        # Of fewer layers the most, which fit if any do.
        cheaper += [RecomputeConfig(recompute="full", recompute_layers=count) for count in range(1, most)]
        cheaper = [cheaper[0], *[each for each in cheaper[1:] if cost(each) < cost(actor)][-1:]]
        parts = [("mlp",)] if dims.experts is None else [("moe",)]
        parts += [] if dims.latent is None else [("mla_up_proj",), ("moe", "mla_up_proj")]
        cheaper += [RecomputeConfig(recompute="selective", recompute_modules=each) for each in parts]  # type: ignore[arg-type]
        for way in (each for each in cheaper if cost(each) < cost(actor)):
            other = sized(replace(config, actor=replace(config.actor, **way.recompute_settings())), gib)
            lacks = not other.config.placement.offload and (other.engine.full_rows or 0) < 256
            assert lacks or peak_of(other) > FILL * gib, (gib, way)
    # With more memory never more.
    assert shares == sorted(shares, reverse=True)
    assert len(set(words)) == len(sizes), words


def test_products_of_experts_only_where_one_product_multiplies_them() -> None:
    """Without gates times up and norms the update takes 56.5 GiB, without what moe is, 41.0."""
    config = run_of("qwen3-30b-a3b")
    assert sized(config, 58 / FILL).config.actor.in_words() == "full, 2 layers"
    with checked_for(Target(platform="cuda", packages=pinned_packages())):
        assert sized(config, 58 / FILL).config.actor.in_words() == "moe_act, layernorm"


def test_a_machine_without_devices_recomputes_all_and_one_that_stands_for_gpus_as_an_h100() -> None:
    config = run_of("qwen3-8b")
    assert size_run(config, None).config.actor.in_words() == "full"
    with assuming("cuda"):
        assert size_run(config, None).config.actor.in_words() == "none"
    # What does not fit at all is planned, and the plan says so.
    run = sized(config, 8)
    assert run.config.actor.in_words() == "full"
    assert "even so too much" in run.derived[0].reason


def test_a_search_over_layouts_chooses_it_too() -> None:
    def given(*overrides: str) -> frozenset[str]:
        return new_search("qwen3-8b", gpus=8, per_node=8, device_gib=80, overrides=overrides).given

    assert given("actor.recompute=auto") == frozenset()
    assert given("actor.recompute=full") == {"actor.recompute"}


def test_a_run_saves_the_choice_and_is_resumed_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    auto = run_of("qwen3-8b", f"model.path={make_checkpoint(tmp_path / 'model', tied=False)}")
    needed, roles = needs_of(auto)
    config, settled = settle_run(auto, roles, needed)
    assert (config.actor.recompute, {role.settings.recompute for role in settled}) == ("full", {"full"})
    assert capsys.readouterr().out.startswith("derived    actor.recompute=full: no device is known")
    assert changed_settings(config, auto) == []
    other = with_overrides(config, ["actor.recompute=none"])
    assert changed_settings(config, other) == ["actor.recompute: full → none"]
    assert settle_run(config, settled, needed) == (config, settled)


def test_supervised_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"prompt": "1+1", "response": "2"}) + "\n")
    model = make_checkpoint(tmp_path / "model", tied=False)
    overrides = (f"model.path={model}", f"sft.train=[{data}]", "sft.val=[]", "sft.batch_size=1", "actor.recompute=auto")
    file = ROOT / "configs/run/sums-sft.yaml"
    opened, _ = open_task("sft", load_config(file, overrides))
    assert (opened.task.role.settings.recompute, opened.inputs.config.actor.recompute) == ("full", "full")
    main(["sft", str(file), *overrides, "--dry-run"])
    assert "derived    actor.recompute=full: no device is known" in capsys.readouterr().out
