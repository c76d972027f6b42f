"""`megarl plan`: what fits, in which order, by hand; and the table of docs/slurm.md, which follows from it."""

import functools
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli import main
from megarl.config import from_dict, load_config
from megarl.config.recompute import RecomputeConfig
from megarl.config.schema import Config, LayoutConfig
from megarl.errors import ConfigError
from megarl.forecast.costs import (
    Constants,
    Hardware,
    StepCost,
    bubble,
    generate_parts,
    read_share,
    step_cost,
    train_parts,
)
from megarl.forecast.layout_search import LayoutSearch, new_search
from megarl.forecast.plan_layouts import host_bytes, layout_text, settings_of
from megarl.forecast.search import LayoutChoice, find_layouts
from megarl.host.device.platform import CudaPlatform, assuming
from megarl.plan.build import plan_run
from megarl.plan.recompute import recomputed_share
from megarl.plan.run_plan import EnginePlan
from megarl.plan.sizes import SizedRun, size_run
from megarl.types import TokenQuantity
from megarl.weights.families import read_model_spec
from tests.helpers.small_model import write_config

ROOT = Path(__file__).parents[3]
GIB = 2**30
# Nodes and model of layouts; the table has the first choices of some.
SMALL = ((1, "Qwen3-8B"), (1, "Qwen3-30B-A3B"), (2, "Qwen3-30B-A3B"), (4, "Qwen3-32B"))
LARGE = ((8, "Qwen3-32B"), (16, "Qwen3-32B"), (16, "Qwen3-235B-A22B"))
IN_TABLE = {(1, "Qwen3-8B"), (4, "Qwen3-32B"), (16, "Qwen3-235B-A22B"), (64, "DeepSeek-V3")}
LARGEST = ((64, "Qwen3-32B"), (64, "Qwen3-235B-A22B"), (64, "DeepSeek-V3"))


def search_for(model: str, gpus: int, *overrides: str, device_gib: float = 80.0) -> LayoutSearch:
    return new_search(model, gpus=gpus, per_node=8, device_gib=device_gib, overrides=overrides)


def sized(config: Config, num_passes: int = 0, engine: EnginePlan | None = None) -> SizedRun:
    """A run with so many passes over all rows before the update, and perhaps another engine."""
    run = size_run(config, None)
    return replace(run, needed=tuple(TokenQuantity)[:num_passes], engine=engine or run.engine)


def planned_step(config: Config, **how: Any) -> StepCost:
    with assuming("cuda"):
        return step_cost(size_run(config), **how)


def row_of(nodes: int, model: str, search: LayoutSearch, choice: LayoutChoice) -> str:
    """A line of the table in docs/slurm.md."""
    update, generate = (
        max(device.phases[name].total for device in choice.devices) / GIB for name in ("update actor", "generate")
    )
    cells = (
        str(nodes),
        model,
        layout_text(choice.run.config.actor.layout),
        choice.run.config.actor.in_words(),
        choice.engine.layout,
        f"{update:.1f}",
        f"{generate:.1f}",
        f"{host_bytes(search, choice) / GIB:.0f}",
        f"{choice.engine.full_rows}",
        f"{choice.run.config.trainer.prompts_per_step * choice.run.config.rollout.num_samples:,}",
    )
    return f"| {' | '.join(cells)} |"


def run_file(directory: Path, choice: LayoutChoice) -> Path:
    """A run file with the settings that the command prints, and those that it starts from."""
    file = directory / "run.yaml"
    config = choice.run.config
    tree: dict[str, Any] = {
        "model": {"path": config.model.path, "config_path": config.model.config_path, "dtype": "bfloat16"},
        "data": {"train": ["train.parquet"], "max_prompt_tokens": 1024, "on_long_prompt": "drop"},
        "trainer": {
            "total_steps": 1,
            "prompts_per_step": config.trainer.prompts_per_step,
            "mini_batch_prompts": config.trainer.mini_batch_prompts,
        },
        **settings_of(choice),
    }
    tree["rollout"] = {**tree["rollout"], "num_samples": 8, "max_response_tokens": 4096}
    file.write_text(json.dumps(tree))
    return file


def check_dry_run(directory: Path, choice: LayoutChoice) -> None:
    """A run file with these settings has the same memory in a dry run."""
    plan = plan_run(load_config(run_file(directory, choice)), device_bytes=80 * GIB)
    # Messages of a sync are staged too, where a plan of them says how large they are.
    for found, expected in zip(plan.devices, choice.devices, strict=True):
        staged = replace(expected.phases["sync"], activations=plan.staging.device)
        assert found == replace(expected, phases=expected.phases | {"sync": staged})
    peaks = [phase.total for device in plan.devices for phase in device.phases.values()]
    assert max(peaks) == choice.peak <= 80 * GIB


def test_memory_is_that_of_a_dry_run(tmp_path: Path) -> None:
    for choice in find_layouts(search_for("qwen3-1.7b", 4), most=3):
        check_dry_run(tmp_path, choice)


def test_what_does_not_fit_is_not_listed_and_the_order_is_that_of_cost() -> None:
    """32 B parameters on 8 GPUs: without tensor or pipeline parallelism, 61 GiB of weights and 122 of gradients."""
    choices = find_layouts(search_for("qwen3-32b", 8), most=1000)
    layouts = [choice.run.config.actor.layout for choice in choices]
    assert LayoutConfig(dp=8) not in layouts
    assert LayoutConfig(tp=8, sequence_parallel=True) in layouts
    assert all(choice.peak <= 0.9 * 80 * GIB for choice in choices)
    totals = [choice.cost.total for choice in choices]
    assert totals == sorted(totals)


def test_engines_apart_need_nodes_of_their_own_and_are_one_step_off() -> None:
    assert {c.run.config.placement.mode for c in find_layouts(search_for("qwen3-8b", 8), most=1000)} == {"colocated"}
    apart = [c for c in find_layouts(search_for("qwen3-8b", 16), most=1000) if c.run.config.placement.mode == "split"]
    assert {(c.run.config.placement.trainer.num_nodes, c.run.config.placement.engines.num_nodes) for c in apart} == {
        (1, 1)
    }
    for choice in apart:
        assert choice.run.config.rollout.schedule.staleness == 1
        assert choice.cost.total == max(choice.cost.generate, choice.cost.train) + choice.cost.sync


def test_links_within_a_node_and_between() -> None:
    hardware = Hardware(nvlink=100.0, network=10.0, per_node=8)
    assert hardware.seconds(1000, 1) == hardware.seconds(1000, 8) == 10.0
    # Of 15 others 8 are on the other node.
    assert hardware.seconds(1500, 16) == pytest.approx(800 / 10 + 700 / 100)
    # Four ranks, each four after the last: two on each node.
    assert hardware.seconds(300, 4, 4) == pytest.approx(200 / 10 + 100 / 100)


def test_a_pipeline_idles_while_it_fills_and_empties() -> None:
    assert bubble(LayoutConfig(pp=4), 8) == 3 / 8
    assert bubble(LayoutConfig(pp=4, virtual_pp=3), 8) == 3 / 24
    assert bubble(LayoutConfig(), 8) == 0


UNIT = Hardware(flops=1.0, hbm=1.0, nvlink=1.0, network=1.0, host=1.0, latency_s=0.0)
# Nothing but work, and all responses as long as they may be.
PLAIN = Constants(step_s=0.0, decode_s=0.0, half_tokens=0.0, stage_s=0.0, mean_share=1.0)


def small_config(directory: Path, *, layout: dict[str, int], micro_batch_tokens: int = 24) -> Config:
    """32 rows of 12 tokens, of which 8 are the response; two optimizer steps."""
    tree = {
        "model": {
            "path": "elsewhere",
            "config_path": str(write_config(directory)),
            "dtype": "bfloat16",
            "vocab_multiple": 4,
        },
        "data": {"train": ["train.parquet"], "max_prompt_tokens": 4},
        "actor": {"layout": layout, "micro_batch_tokens": micro_batch_tokens},
        "rollout": {
            "num_samples": 4,
            "max_response_tokens": 8,
            "engine": {"num_engines": 2, "tp": 2, "max_num_seqs": 4},
        },
        "trainer": {"total_steps": 10, "prompts_per_step": 8, "mini_batch_prompts": 4},
    }
    return from_dict(Config, tree)


# One row forward: the products of 4 layers, attention, and 8 rows of the head.
ROW_FLOPS = 2 * 12 * 4 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 12) + 4 * 2 * 8 * 12**2 + 2 * 8 * 10 * 8


def test_training_by_hand(tmp_path: Path) -> None:
    config = small_config(tmp_path, layout={"tp": 2, "pp": 2})
    parts = train_parts(sized(config, 1), hardware=UNIT, constants=PLAIN)
    # Forward, backward of twice as much, and one further pass, on four devices.
    compute = 4 * 32 * ROW_FLOPS / 4
    # Forward, backward and a further pass: 32 · 12 tokens of 8 bfloat16 through 2 layers, four halves of them each
    # time.
    tp = 3 * 32 * 12 * 8 * 2 * 2 * 4 / 2
    # In the same passes, a stage exchanges the hidden states of all tokens with its neighbour.
    pp = 3 * 32 * 12 * 2 * 8
    assert parts == {"compute": compute, "tp": tp, "pp": pp, "bubble": (compute + tp + pp) / 8}


def test_stages_of_several_chunks_by_hand(tmp_path: Path) -> None:
    """16 · 12 tokens in micro-batches of 36 would be 5.3 of them, but two stages of two chunks take an even number."""
    config = small_config(tmp_path, layout={"tp": 2, "pp": 2, "virtual_pp": 2}, micro_batch_tokens=36)
    parts = train_parts(sized(config, 1), hardware=UNIT, constants=PLAIN)
    compute, tp = 4 * 32 * ROW_FLOPS / 4, 3 * 32 * 12 * 8 * 2 * 2 * 4 / 2
    # What is sent overlaps.
    assert parts == pytest.approx({"compute": compute, "tp": tp, "bubble": (compute + tp) / (6 * 2)})
    # A micro-batch of 32 tokens reaches a half of what it could with constants of 32.
    seen = train_parts(sized(config, 1), hardware=UNIT, constants=replace(PLAIN, half_tokens=32.0))
    assert seen["compute"] == pytest.approx(2 * compute)


def test_stages_of_several_chunks_are_tried_unless_given() -> None:
    """Of the 94 layers of Qwen3-235B-A22B, 32 chunks have 3, but the first and the last 2."""
    choices = find_layouts(search_for("qwen3-235b-a22b", 128, "actor.layout.pp=16"), most=1000)
    chunked = [choice.run.config.actor.layout for choice in choices if choice.run.config.actor.layout.virtual_pp > 1]
    assert {(each.virtual_pp, each.pipeline_layout) for each in chunked} >= {(2, "Ett|(ttt|)*30ttL")}
    assert all(sum(map(sum, each.chunk_layers(94))) == 94 for each in chunked)
    assert layout_text(LayoutConfig(pp=2, virtual_pp=4, ep=2)) == "pp 2 × dp 1, ep 2, 4 chunks"
    one = find_layouts(search_for("qwen3-235b-a22b", 128, "actor.layout={pp: 16, virtual_pp: 1}"), most=1000)
    assert {choice.run.config.actor.layout.virtual_pp for choice in one} == {1}


def test_ranks_that_share_key_value_heads_gather_all_heads(tmp_path: Path) -> None:
    """Of four ranks two share one of the two key heads: 8 + 2·4 elements of a token, three quarters from others."""
    config = small_config(tmp_path, layout={"tp": 4})
    parts = train_parts(sized(config, 1), hardware=UNIT, constants=PLAIN)
    assert parts["tp"] == 3 * 32 * 12 * 2 * 4 * (4 * 8 + 8 + 2 * 4) * 3 / 4


def test_shares_that_are_computed_again_by_hand(tmp_path: Path) -> None:
    """Four layers: of the products 2·12·(192 + 288) the MLPs are 288/480; attention, 2·8·12² per layer, is no part."""
    dims = read_model_spec(write_config(tmp_path)).dims
    forward = 4 * (2 * 12 * (192 + 288) + 2 * 8 * 12**2)

    def share(**recompute: Any) -> float:
        return recomputed_share(RecomputeConfig(**recompute), dims, num_tokens=12, chunk_layers=4)

    assert (share(), share(recompute="full"), share(recompute="full", recompute_layers=3)) == (0, 1, 0.75)
    assert share(recompute="selective") == pytest.approx(4 * 2 * 12 * 288 / forward)
    assert share(recompute="selective", recompute_modules=("layernorm",)) == 0


def test_no_more_is_recomputed_than_makes_room() -> None:
    """Qwen3-32B at tp 4 × pp 4 on 32 GPUs: some of a stage's 16 layers; with one less it would not fit."""
    layout = LayoutConfig(tp=4, pp=4, dp=2, sequence_parallel=True)
    choices = find_layouts(search_for("qwen3-32b", 32), most=1000)
    actor = next(choice.run.config.actor for choice in choices if choice.run.config.actor.layout == layout)
    assert actor.recompute_layers is not None
    assert actor.in_words() == f"full, {actor.recompute_layers} layers"
    config = next(choice.run.config for choice in choices if choice.run.config.actor == actor)
    for layers, fits in ((actor.recompute_layers, True), (actor.recompute_layers - 1, False)):
        fewer = replace(config, actor=replace(actor, recompute_layers=layers))
        plan = plan_run(fewer, device_bytes=80 * GIB)
        peak = max(phase.total for device in plan.devices for phase in device.phases.values())
        assert (peak <= 0.9 * 80 * GIB) is fits


def test_gradients_of_replicas_by_hand(tmp_path: Path) -> None:
    config = small_config(tmp_path, layout={"dp": 4})
    run = sized(config)
    parts = train_parts(run, hardware=UNIT, constants=PLAIN)
    # 4 layers of 500, 12 padded rows of 8 in embedding and head, a norm: 4 + 2 bytes of each, three quarters, twice.
    compute, num_parameters = 3 * 32 * ROW_FLOPS / 4, 4 * 500 + 2 * 12 * 8 + 8
    assert parts == {"compute": compute, "dp": 2 * num_parameters * 6 * 3 / 4}
    # On CUDA the 2 bytes are gathered during a forward pass over the first of two micro-batches of an optimizer step.
    with assuming("cuda"):
        for flops, left in ((1.0, 0.0), (ROW_FLOPS / 1000, 2 * num_parameters * 3 / 4 - 2 * 1000)):
            own = replace(UNIT, flops=flops)
            parts = train_parts(run, hardware=own, constants=PLAIN)
            assert parts["dp"] == pytest.approx(2 * (4 * num_parameters * 3 / 4 + left))


@pytest.mark.parametrize(("cached_rows", "waves"), [(100, 4), (2, 8)])
def test_generation_by_hand(cached_rows: int, waves: int, tmp_path: Path) -> None:
    """16 rows on each engine, 4 at a time, or as many as its cache holds; 12 tokens of 32 bytes each."""
    config = small_config(tmp_path, layout={"tp": 2, "dp": 2})
    engine = EnginePlan(
        num_engines=2,
        tp=2,
        pp=1,
        nodes_per_engine=1,
        shares_devices=True,
        weights=1000,
        kv_cache=cached_rows * 12 * 32,
        kv_bytes_per_token=32,
        full_rows=cached_rows,
        max_num_seqs=4,
    )
    hardware = replace(UNIT, flops=1e30, nvlink=1e30)
    parts = generate_parts(sized(config, engine=engine), hardware=hardware, constants=PLAIN)
    assert parts["reading weights"] == 8 * waves * 1000
    # On average 8 tokens of each: 4 of the prompt, and half of the response.
    assert parts["reading keys and values"] == 8 * waves * min(4, cached_rows) * 8 * 32
    assert sum(parts.values()) == pytest.approx(parts["reading weights"] + parts["reading keys and values"])
    empty = replace(engine, kv_cache=100)
    assert generate_parts(sized(config, engine=empty), hardware=hardware, constants=PLAIN) == {"KV cache": float("inf")}


def test_generation_in_stages_by_hand(tmp_path: Path) -> None:
    """Four sequences go through two stages, two at a time: both stages are read twice for a token of each."""
    config = small_config(tmp_path, layout={"tp": 2, "dp": 2})
    engine_config = replace(config.rollout.engine, num_engines=1, pp=2)
    config = replace(config, rollout=replace(config.rollout, engine=engine_config))
    engine = EnginePlan(
        num_engines=1,
        tp=2,
        pp=2,
        nodes_per_engine=2,
        shares_devices=True,
        weights=500,
        kv_cache=100 * 12 * 16,
        kv_bytes_per_token=16,
        full_rows=100,
        max_num_seqs=4,
    )
    hardware = replace(UNIT, flops=1e30, nvlink=1e30)
    parts = generate_parts(sized(config, engine=engine), hardware=hardware, constants=PLAIN)
    # 32 rows, 4 at a time, of 8 tokens.
    assert parts["reading weights"] == 8 * 8 * 2 * 500
    assert parts["reading keys and values"] == 8 * 8 * 4 * 8 * 16
    # The hidden states of two sequences, 8 bfloat16 each.
    assert parts["between stages"] == 8 * 8 * 2 * 8 * 2


def test_what_engines_and_updates_cost_beside_their_work(tmp_path: Path) -> None:
    """One sequence of 8 tokens at a time: of each engine's 16, 15 wait; then steps go on while any is left."""
    config = small_config(tmp_path, layout={"tp": 2, "dp": 2})
    engine = replace(plan_run(config).engine, kv_cache=100 * 12 * 32, kv_bytes_per_token=32)
    one = replace(config.rollout, engine=replace(config.rollout.engine, max_num_seqs=1))
    free = replace(UNIT, flops=1e30, nvlink=1e30, hbm=1e30)
    slow = replace(PLAIN, decode_s=1.0)
    parts = generate_parts(sized(replace(config, rollout=one), engine=engine), hardware=free, constants=slow)
    assert parts["decode steps"] == pytest.approx(15 * 8 + 8)
    # Two micro-batches' worth of 24 tokens on a rank: with as many as reach half, products take twice as long.
    full, half = (
        train_parts(sized(config), hardware=UNIT, constants=constants)["compute"]
        for constants in (PLAIN, replace(PLAIN, half_tokens=24.0))
    )
    assert half == pytest.approx(2 * full)
    # On average 8 tokens of the response are 4: of the work on 12 tokens, that on 8 is left.
    short = train_parts(sized(config), hardware=UNIT, constants=replace(PLAIN, mean_share=0.5))
    row = 2 * 8 * 4 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 12) + 4 * 2 * 8 * 8**2 + 2 * 4 * 10 * 8
    assert short["compute"] == 3 * 32 * row / 4


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        (["placement.mode=split"], 16),
        (["placement.mode=split", "rollout.schedule.staleness=0"], 16),
        (["placement.mode=split", "placement.engines.num_nodes=1"], 24),
        (["placement.offload=false"], 8),
        (["actor.layout.tp=8"], 8),
        (["actor.layout.dp=2", "actor.layout.sequence_parallel=false"], 8),
        (["actor.recompute=full"], 8),
        (["rollout.engine.tp=8"], 8),
        (["rollout.engine.num_engines=2", "rollout.engine.gpu_memory_utilization=0.5"], 8),
        (["rollout.engine={tp: 2, max_num_seqs: 64}"], 8),
        (["actor.lora.rank=16"], 8),
    ],
)
def test_given_settings_are_kept(overrides: list[str], gpus: int) -> None:
    """Every printed choice has them, and still as many GPUs as were named."""
    search = search_for("qwen3-8b", gpus, *overrides)
    for choice in find_layouts(search, most=3):
        found = asdict(choice.run.config)
        for override in overrides:
            key, _, text = override.partition("=")
            value = functools.reduce(lambda tree, name: tree[name], key.split("."), found)
            wanted = yaml.safe_load(text)
            assert value == (value | wanted if isinstance(wanted, dict) else wanted)
        engine, split = choice.run.config.rollout.engine, choice.run.config.placement.mode == "split"
        used = choice.run.config.actor.layout.world_size + split * engine.num_engines * engine.num_workers
        assert used == gpus


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "actor.layout.tp=3",
            r"no layout of qwen3-8b with actor\.layout\.tp as given uses",
        ),
        (
            "actor.layout.dp=5",
            r"no layout of qwen3-8b with actor\.layout\.dp as given uses",
        ),
        ("rollout.engine.tp=16", r"no layout of qwen3-8b with rollout\.engine\.tp as given fits"),
        (
            "placement.mode=split",
            r"no layout of qwen3-8b with placement\.mode as given uses",
        ),
        ("trainer.mini_batch_prompts=100", r"trainer\.mini_batch_prompts"),
    ],
)
def test_what_cannot_be_kept_is_refused(override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        find_layouts(search_for("qwen3-8b", 8, override), most=3)


def test_engines_span_no_more_nodes_than_they_need() -> None:
    """1,250 GiB are 156 for each of 8 GPUs, and 78 for each of 16; 438 GiB are 55 for each of 8. 85 % of 80 are 68."""
    assert search_for("deepseek-v3", 512).num_stages == 4
    assert search_for("qwen3-235b-a22b", 512).num_stages == 1
    # 15.3 GiB for each of 4 GPUs, of which 14.9 or 17 are for engines.
    for device_gib, num_stages in ((17.5, 2), (20, 1)):
        search = new_search("qwen3-32b", gpus=64, per_node=4, device_gib=device_gib)
        assert {choice.engine.pp for choice in find_layouts(search, most=100)} == {search.num_stages} == {num_stages}


def test_experts_that_no_sequence_uses_are_not_read() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts of width 768 in 48 layers of 2,048."""
    dims = read_model_spec(ROOT / "configs/model/hf/qwen3-30b-a3b").dims
    experts = 48 * 128 * 3 * 2048 * 768
    # Attention's matrices and what it computes for one token, routers, and the head.
    others = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512) + 48 * 4096 + 48 * 2048 * 128 + 151936 * 2048
    assert read_share(dims, 1) == pytest.approx((others + experts / 16) / (others + experts))
    assert read_share(dims, 2) == pytest.approx((others + experts * (1 - (15 / 16) ** 2)) / (others + experts))
    assert read_share(read_model_spec(ROOT / "configs/model/hf/qwen3-8b").dims, 1) == 1


def test_the_command_prints_a_table_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--model", "Qwen/Qwen3-8B", "--gpus", "8", "--most", "2", "rollout.num_samples=4"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "layouts of Qwen/Qwen3-8B on 8 GPUs of 80 GiB, 8 per node; nothing was started"
    assert "1,024 rows of 5,120 tokens, 256 per optimizer step" in lines[1]
    assert sum(line.startswith("tp ") for line in lines) == 2
    assert [line.partition(":")[0] for line in lines[-3:]] == ["actor", "rollout", "placement"]


@pytest.mark.long
def test_engines_have_experts_that_vllm_does_not_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over eight workers, experts of 1,408 would be 176 wide, no multiple of 32, if GPUs asked for that."""
    monkeypatch.setattr(CudaPlatform, "expert_width_multiple", 32)
    (choice,) = find_layouts(search_for("glm-4.5-air", 64), most=1)
    assert choice.run.config.rollout.engine.tp <= 4


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--model", str(ROOT / "configs/model/hf/qwen3-8b"), "--gpus", "8", "--most", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["gpus"], len(found["choices"])) == (8, 2)
    seconds = found["choices"][0]["seconds"]
    assert seconds["total"] == pytest.approx(sum(seconds[name] for name in ("generate", "train", "sync", "fixed")))


@pytest.mark.parametrize(
    ("model", "gpus", "expected"),
    [
        ("qwen3-8c", 8, "--model: got 'qwen3-8c', expected a directory with a config.json, or one of deepseek-v3, "),
        ("qwen3-8b", 9, "--gpus 9 --gpus-per-node 8 --device-gib 80: expected at least one GPU, whole nodes"),
        # 671,026,419,200 parameters of 2 bytes over 8 GPUs.
        ("deepseek-v3", 8, r"--gpus 8: no layout of deepseek-v3 fits 72.0 GiB, .* an engine 156.2 GiB for its weights"),
    ],
)
def test_errors_say_what_is_missing(model: str, gpus: int, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        find_layouts(search_for(model, gpus), most=5)


def lines_of_the_table() -> dict[tuple[int, str], str]:
    lines = (ROOT / "docs/slurm.md").read_text(encoding="utf-8").splitlines()
    cells = {
        line: [cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| \d+ \|", line)
    }
    return {(int(row[0]), row[1]): line for line, row in cells.items()}


def check_line(nodes: int, model: str) -> LayoutChoice:
    """Find the first layout that the command recommends, which is that of the table, if this has it."""
    search = search_for(model, 8 * nodes)
    first = find_layouts(search, most=1)[0]
    row = row_of(nodes, model, search, first)
    assert lines_of_the_table().get((nodes, model), row) == row
    return first


@pytest.mark.parametrize(("nodes", "model"), [case for case in LARGE if case in IN_TABLE])
def test_the_table_has_what_the_command_recommends(nodes: int, model: str) -> None:
    check_line(nodes, model)


def test_the_table_has_no_other_lines() -> None:
    assert set(lines_of_the_table()) == IN_TABLE


@pytest.mark.parametrize(("nodes", "model"), SMALL)
def test_lines_of_the_table_pass_the_dry_run(nodes: int, model: str, tmp_path: Path) -> None:
    check_dry_run(tmp_path, check_line(nodes, model))


@pytest.mark.long
@pytest.mark.parametrize(("nodes", "model"), [*LARGE, *LARGEST])
def test_lines_of_many_nodes_pass_the_dry_run(nodes: int, model: str, tmp_path: Path) -> None:
    """Their plans of syncs take seconds each, and a search over 512 GPUs takes five."""
    check_dry_run(tmp_path, check_line(nodes, model))
