"""`megarl train --dry-run`: the plan of a small run by hand, of the published configurations, and its errors."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.config import from_dict, load_config
from megarl.config.algo import CpoConfig, DistillConfig, HintConfig
from megarl.config.batches import max_row_tokens
from megarl.config.generation import SyncConfig
from megarl.config.judges import JudgeConfig, JudgeServerConfig
from megarl.config.load import with_overrides
from megarl.config.lora import LoraConfig
from megarl.config.schema import Config, LayoutConfig, ReferenceConfig
from megarl.errors import ConfigError, DataError
from megarl.host.device.platform import PLATFORMS, assuming
from megarl.plan import build, sizes
from megarl.plan.build import plan_run
from megarl.plan.recompute import usable_bytes
from megarl.plan.render import ranges, to_json, to_text
from megarl.plan.run_plan import RunPlan
from megarl.record.performance import forward_flops
from megarl.train.inputs import open_train_inputs
from megarl.weights.families import read_model_spec
from megarl_lab.recipes.public_files import write_parquet
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model
from tests.helpers.small_model import write_config

ROOT = Path(__file__).parents[3]
GIB = 2**30
ENGINES = {"num_engines": 2, "tp": 2, "gpu_memory_utilization": 0.6}


def small_config(directory: Path) -> Config:
    """8 ranks on two nodes; rows of 12 tokens, two to a micro-batch of 24."""
    tree = {
        "model": {"path": "elsewhere", "config_path": str(write_config(directory)), "vocab_multiple": 4},
        "data": {"train": ["train.parquet"], "max_prompt_tokens": 4},
        "algo": {"kl": {"where": "loss"}},
        "actor": {"layout": {"tp": 2, "dp": 2, "pp": 2}, "micro_batch_tokens": 24, "head": {"chunk_tokens": 6}},
        "rollout": {"num_samples": 4, "max_response_tokens": 8, "engine": ENGINES},
        "placement": {"trainer": {"num_nodes": 2}},
        "trainer": {"total_steps": 10, "prompts_per_step": 8, "mini_batch_prompts": 4, "num_epochs": 3},
    }
    return from_dict(Config, tree)


def test_an_engine_of_two_stages_over_two_nodes_by_hand(tmp_path: Path) -> None:
    """The last stage has most: two layers of 500 parameters, the last norm and the head; of 8 ranks the first four."""
    config = small_config(tmp_path)
    engine = replace(config.rollout.engine, num_engines=1, tp=2, pp=2)
    nodes = replace(config.placement, trainer=replace(config.placement.trainer, num_nodes=4))
    plan = plan_run(replace(config, rollout=replace(config.rollout, engine=engine), placement=nodes))
    assert [(node.ranks, node.engines) for node in plan.nodes] == [
        ((0, 1), (0,)),
        ((2, 3), (0,)),
        ((4, 5), ()),
        ((6, 7), ()),
    ]
    assert (plan.engine.pp, plan.engine.nodes_per_engine) == (2, 2)
    assert plan.engine.weights == 2 * (2 * 500 + 80 + 8) // 2
    one = plan_run(config).engine
    assert plan.engine.kv_bytes_per_token == one.kv_bytes_per_token // 2
    rounded = replace(engine, quantization="fp8_per_block", kv_cache_dtype="fp8_e4m3")
    algo = replace(config.algo, correction=replace(config.algo.correction, name="tis_upper"))
    rollout = replace(config.rollout, engine=rounded)
    in_float8 = plan_run(replace(config, rollout=rollout, algo=algo, placement=nodes)).engine
    # All of a layer but two norms of 8, and two of 2 that queries and keys have.
    assert in_float8.weights == (2 * (500 - 20) + 2 * (2 * 20 + 80 + 8)) // 2
    assert in_float8.kv_bytes_per_token == plan.engine.kv_bytes_per_token // 2
    assert "engines    1 × tp 2 × pp 2, each over 2 nodes, on the trainer's devices: " in to_text(plan)


def test_a_small_plan_by_hand(tmp_path: Path) -> None:
    plan = plan_run(small_config(tmp_path), device_bytes=100_000)
    assert [(node.ranks, node.engines, node.offloaded) for node in plan.nodes] == [
        ((0, 1, 2, 3), (0, 1), 0),
        ((4, 5, 6, 7), (), 0),
    ]
    assert [(r.name, r.trainable) for r in plan.roles] == [("actor", True), ("reference", False)]
    # 4 layers of 500, embedding and head of 80, norm of 8.
    num_parameters = 4 * 500 + 2 * 80 + 8
    assert {r.num_parameters for r in plan.roles} == {num_parameters}
    assert plan.sync_bytes == 2 * num_parameters
    steps = plan.steps
    assert (steps.rows_per_step, steps.rows_per_optimizer_step) == (8 * 4, 4 * 4)
    assert (steps.optimizer_steps_per_step, steps.optimizer_steps) == (3 * 2, 10 * 3 * 2)
    # 16 rows over two replicas, two rows to a micro-batch.
    assert (steps.max_row_tokens, steps.micro_batches_at_full_length) == (12, 4)
    (layout,) = plan.layouts
    assert (layout.roles, layout.num_ranks) == (("actor", "reference"), 8)
    assert [(shard.role, shard.stage) for shard in plan.shards] == [
        ("actor", 0),
        ("actor", 1),
        ("reference", 0),
        ("reference", 1),
    ]
    first, last, reference, _ = plan.shards
    assert (first.ranks, last.ranks) == ((0, 1, 2, 3), (4, 5, 6, 7))
    # 16 padded rows of 8 over two ranks: 64 for the embedding on the first stage, and for the head on the last.
    count = 2 * (20 + 240) + 64
    assert (first.num_parameters, last.num_parameters) == (count, count + 8)
    assert first.resident == {"params": 2 * count, "grads": 4 * count, "optimizer": 12 * count // 2}
    assert reference.resident == {"params": 2 * count}
    assert (reference.activations, reference.head) == (0, 0)
    # Two layers, two micro-batches in flight, 24 tokens of 68 elements (tp 2 without sequence parallelism).
    assert first.activations == 2 * 2 * 2 * 24 * 68
    assert last.activations == 2 * 2 * 24 * 68
    # The logits of 24 tokens, which fit the budget; and their hidden states.
    assert (first.head, last.head) == (0, 2 * 24 * 8 + 2 * 24 * 8)
    engine = plan.engine
    assert (engine.weights, engine.kv_cache) == (num_parameters, 60_000 - num_parameters)
    assert [alike.devices for alike in plan.devices] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    phases = plan.devices[0].phases
    assert list(phases) == ["generate", "score reference", "score actor", "update actor", "sync"]
    assert phases["update actor"].total == 14 * count + first.activations + 60_000
    assert phases["score actor"].total == phases["score reference"].total == 14 * count + 2 * 24 * 68 + 60_000
    assert phases["generate"].total == 14 * count + 60_000
    # GPUs send messages from their own memory.
    assert phases["sync"].total == 14 * count + 60_000 + plan.staging.device > phases["generate"].total


def test_roles_on_the_base_of_adapters_by_hand(tmp_path: Path) -> None:
    """A reference has no memory of its own there, and a critic that of its adapters.

    Of a layer a rank of tp 2 has, with rank 3: A of q, k and v, of gate and up, whole, and its half of B; its half of
    A of o and of down, and B whole. The sizes are those of the file: hidden 8, q 8, kv 4, ffn 12.
    """
    config, lora = small_config(tmp_path), LoraConfig(rank=3, sync="merged")
    actor = replace(config.actor, lora=lora)
    algo = replace(config.algo, advantage=replace(config.algo.advantage, estimator="gae"))
    config = replace(config, actor=actor, critic=replace(config.critic, lora=lora), algo=algo)
    shards = {(shard.role, shard.stage): shard for shard in plan_run(config).shards}
    spec = read_model_spec(tmp_path).dims
    hidden, q, kv, ffn = spec.hidden, spec.dim("q"), spec.dim("kv"), spec.ffn
    inputs = 3 * hidden + 2 * hidden + q // 2 + ffn // 2
    outputs = (q + 2 * kv + 2 * ffn) // 2 + 2 * hidden
    adapters = 2 * 3 * (inputs + outputs)
    base = 2 * (20 + 240) + 64
    of = {name: shards[name, 0] for name in ("actor", "reference", "critic")}
    assert of["actor"].resident["params"] == 2 * (base + adapters)
    assert of["reference"].resident == {}
    assert of["critic"].resident["params"] == 2 * adapters
    assert of["critic"].resident["grads"] == 4 * adapters
    assert of["critic"].resident["optimizer"] == 12 * adapters // 2


def test_ranks_of_several_layouts_add_up_on_their_devices(tmp_path: Path) -> None:
    """The reference in one stage of tp 2 on the first four devices: all layers there, nothing on the others."""
    config = small_config(tmp_path)
    reference = ReferenceConfig(layout=LayoutConfig(tp=2, dp=2), micro_batch_tokens=12)
    plan = plan_run(replace(config, reference=reference), device_bytes=100_000)
    assert [(layout.roles, layout.num_ranks) for layout in plan.layouts] == [(("actor",), 8), (("reference",), 4)]
    assert plan.layouts[1].groups["dp"] == ((0, 2), (1, 3))
    shard = plan.shards[-1]
    assert (shard.role, shard.stage, shard.ranks, shard.num_layers) == ("reference", 0, (0, 1, 2, 3), 4)
    # Four layers, embedding and head, the last norm.
    actor, count = 2 * (20 + 240) + 64, 4 * (20 + 240) + 2 * 64 + 8
    assert shard.num_parameters == count
    first, second = plan.devices
    assert (first.devices, second.devices) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (first.resident, second.resident) == (12 * actor + 2 * count, 12 * (actor + 8))
    # 12 tokens of one layer, and the head: logits of 6 rows, hidden states.
    forward = 2 * 12 * 68 + 2 * 6 * 8 + 2 * 12 * 8
    assert first.phases["score reference"].total == first.resident + forward + 60_000
    assert second.phases["score reference"].total == second.resident + 60_000
    assert "layout     reference: 4 ranks = tp 2 × cp 1 × dp 2 × pp 1, on devices 0-3\n" in to_text(plan)


def test_checkpoints_take_host_memory(tmp_path: Path) -> None:
    """Two replicas on each node. The first writes the bfloat16 weights of its shard, and what is gathered of it."""
    plan = plan_run(small_config(tmp_path))
    of_stage = (2 * (20 + 240) + 64, 2 * (20 + 240) + 64 + 8)
    assert [node.checkpoint for node in plan.nodes] == [2 * 2 * count + 4 * 6 * count for count in of_stage]
    assert [node.portable_checkpoint for node in plan.nodes] == [2 * (2 + 24) * count for count in of_stage]
    assert "checkpoint 0.0000 GiB of host memory more on a node while one is written, 0.0000 GiB if" in to_text(plan)


def test_a_share_of_the_optimizers_state_is_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of 16 bytes for each parameter of a shard, which two replicas divide; a node has four ranks."""
    monkeypatch.setattr("megarl.config.optimizer.require_kernels", lambda *_: None)
    config = small_config(tmp_path)
    optimizer = replace(config.actor.optimizer, offload_fraction=0.25)
    plan, whole = plan_run(replace(config, actor=replace(config.actor, optimizer=optimizer))), plan_run(config)
    of_shard = [shard.num_parameters for shard in plan.shards[:2]]
    assert [node.offloaded for node in plan.nodes] == [4 * (4 * count // 2) for count in of_shard]
    assert [node.offloaded for node in whole.nodes] == [0, 0]
    # On a device 12 bytes become 9.
    for shard, full, count in zip(plan.shards[:2], whole.shards[:2], of_shard, strict=True):
        assert full.resident["optimizer"] - shard.resident["optimizer"] == 3 * count // 2


def test_earlier_versions_take_host_memory(tmp_path: Path) -> None:
    """Two copies of 2 bytes for each parameter of a shard, on all four ranks of a node, and once more in checkpoints of
    the first of two replicas; while they are compared, output weights of three versions are on the last stage's device.
    """
    config = small_config(tmp_path)
    schedule = replace(config.rollout.schedule, staleness=2, on_update="continue")
    split = replace(config.placement, mode="split", offload=False)
    config = replace(config, rollout=replace(config.rollout, schedule=schedule), placement=split)
    loss = replace(config.algo.policy_loss, name="dppo_top_tv", compared_with="trainer", kept_versions=2)
    forced = replace(config.algo, correction=replace(config.algo.correction, forced=True))
    plan = plan_run(replace(config, algo=replace(config.algo, policy_loss=loss)))
    whole = plan_run(replace(config, algo=forced))
    for stage in range(2):
        count = plan.shards[stage].num_parameters
        assert plan.nodes[stage].offloaded == 4 * 2 * 2 * count
        assert plan.nodes[stage].checkpoint - whole.nodes[stage].checkpoint == 2 * 2 * 2 * count
        assert plan.shards[stage].head - whole.shards[stage].head == stage * 3 * 2 * 64
    assert "trained, and 2 earlier versions of its weights on hosts" in to_text(plan)


def test_offload_takes_turns(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config = replace(config, placement=replace(config.placement, offload=True))
    plan = plan_run(config, device_bytes=100_000)
    # The host keeps all but gradients, which are 4 bytes for each of the actor's parameters.
    kept = [plan.devices[i].resident - 4 * plan.shards[i].num_parameters for i in range(2)]
    assert [node.offloaded for node in plan.nodes] == [4 * kept[0], 4 * kept[1]]
    phases, held = plan.devices[0].phases, plan.devices[0].resident
    actor, _, reference, _ = (shard.resident for shard in plan.shards)
    assert (phases["generate"].trainer, phases["generate"].engine) == (0, 60_000)
    assert (phases["score reference"].trainer, phases["score reference"].engine) == (reference["params"], 0)
    assert (phases["update actor"].trainer, phases["update actor"].engine) == (
        held - reference["params"],
        0,
    )
    assert (phases["sync"].trainer, phases["sync"].engine) == (actor["params"], plan.engine.weights)


def test_engines_on_devices_of_their_own(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config = replace(config, placement=replace(config.placement, mode="split"))
    plan = plan_run(config, device_bytes=100_000)
    assert [(node.ranks, node.engines) for node in plan.nodes] == [((0, 1, 2, 3), ()), ((4, 5, 6, 7), ()), ((), (0, 1))]
    assert {phase.engine for phase in plan.devices[0].phases.values()} == {0}


def test_environment_workers_have_nodes_of_their_own(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config = replace(config, environment=replace(config.environment, hosts=5, nodes=2))
    plan = plan_run(config, device_bytes=100_000)
    assert [node.environments for node in plan.nodes] == [(), (), (0, 2, 4), (1, 3)]
    assert "node 2     environment workers 0,2,4" in to_text(plan)


def test_servers_of_judges_have_nodes_of_their_own(tmp_path: Path) -> None:
    server = JudgeServerConfig(model="m", replicas=4, num_nodes=2)
    config = small_config(tmp_path)
    judged = replace(
        config.rewards, manager="judge", judges={"quality": JudgeConfig(server="big")}, judge_servers={"big": server}
    )
    plan = plan_run(replace(config, rewards=judged))
    assert [(node.ranks, node.judge_servers) for node in plan.nodes[-2:]] == [
        ((), {"big": (0, 1)}),
        ((), {"big": (2, 3)}),
    ]
    assert f"node {len(plan.nodes) - 1}     judge server big, replicas 2-3\n" in to_text(plan)


def test_a_bridge_moves_what_workers_lack(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    plan = plan_run(config)
    # Each of two engines takes the model once, and norms once more: two of 8 and two of 2 per layer, one of 8.
    num_parameters, norms = 4 * 500 + 2 * 80 + 8, 4 * 20 + 8
    assert plan.bridge.wire_bytes + plan.bridge.local_bytes == 2 * 2 * (num_parameters + norms)
    # The first stage's ranks have half of the layers; no worker has more at hand.
    assert 0 < plan.bridge.local_bytes < plan.bridge.wire_bytes
    assert f"{plan.bridge.wire_bytes:,} bytes over the wire" in to_text(plan)
    assert json.loads(to_json(plan))["bridge"]["wire_bytes"] == plan.bridge.wire_bytes


def test_messages_are_staged_on_devices_where_these_send_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs in host memory; a sync's messages are in the peak of its phase."""
    config = small_config(tmp_path)
    here = plan_run(config)
    assert here.staging.device == 0 < here.staging.host
    assert [device.phases["sync"].activations for device in here.devices] == [0] * len(here.devices)
    monkeypatch.setattr("megarl.sync.transport.process_plans.platform", PLATFORMS["cuda"])
    there = plan_run(replace(config, sync=replace(config.sync, host_group="device")))
    assert there.staging.device > 0
    assert {device.phases["sync"].activations for device in there.devices} == {there.staging.device}
    assert json.loads(to_json(there))["staging"] == {"device": there.staging.device, "host": there.staging.host}


def test_what_is_derived_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path)
    assert "derived    sync.host_group=gloo: this machine is cpu; on CUDA it is device\n" in to_text(plan_run(config))
    for module in (build, sizes):
        monkeypatch.setattr(module, "platform", PLATFORMS["cuda"])
    plan = plan_run(config)
    assert "derived    sync.host_group=device: between hosts, NCCL uses" in to_text(plan)
    (found,) = (each for each in json.loads(to_json(plan))["derived"] if each["key"] == "sync.host_group")
    assert found["value"] == "device"
    # The second of two nodes has no engines, so that all comes to the first.
    asked = plan_run(replace(config, sync=replace(config.sync, host_group="gloo")))
    assert "derived    sync.host_group" not in to_text(asked)
    assert [warning for warning in asked.warnings if warning.startswith("sync.host_group: got gloo, which sends")]


@pytest.mark.parametrize(
    ("gib", "shared", "usable"),
    # Of 80 GiB an H100 reports 79.1; context and NCCL's buffers take 1.8 in a process, of trainer and engine.
    [(80, True, 79.1 - 3.6), (80, False, 79.1 - 1.8), (8, True, 7.2)],
)
def test_a_device_has_less_than_its_name_says(gib: int, shared: bool, usable: float) -> None:
    assert usable_bytes(gib << 30, shared=shared) / GIB == pytest.approx(usable, abs=0.01)


def test_a_named_gpu_means_the_defaults_of_cuda(tmp_path: Path) -> None:
    """NCCL between hosts, adapters that are sent alone, messages in the devices' memory; and only for that plan."""
    config = small_config(tmp_path)
    adapted = replace(config, actor=replace(config.actor, lora=LoraConfig(rank=8)))
    plan = plan_run(adapted, device_bytes=80 << 30)
    assert "derived    sync.host_group=device: between hosts, NCCL uses" in to_text(plan)
    assert plan.links is not None
    assert plan.links.link_settings.grouped
    assert plan.staging.device > 0 == plan.staging.host
    with pytest.raises(ConfigError, match=r"actor\.lora\.sync: got auto with model\.dtype=bfloat16 on cpu"):
        plan_run(adapted)


@pytest.mark.parametrize(
    ("placement", "device_bytes", "share", "reason"),
    [
        # The first stage's update takes 14 bytes of 584 parameters and 13,056 of activations; 0.9 are to be filled.
        ({}, 100_000, 0.65, "the trainer, which stays, takes 0.00 of 0.00 GiB (update actor)"),
        ({}, 22_000, 0.05, "the trainer, which stays, takes 0.00 of 0.00 GiB (update actor)"),
        ({"offload": True}, 22_000, 0.85, "nothing else is on the devices while engines generate"),
        ({"mode": "split"}, 22_000, 0.85, "engines have devices of their own"),
    ],
)
def test_engines_take_what_the_trainer_leaves(
    placement: dict[str, Any], device_bytes: int, share: float, reason: str, tmp_path: Path
) -> None:
    """32 bytes of a token on each device."""
    config = small_config(tmp_path)
    engine = replace(config.rollout.engine, gpu_memory_utilization=None)
    config = replace(
        config,
        rollout=replace(config.rollout, engine=engine),
        placement=replace(config.placement, **placement),
    )
    plan = plan_run(config, device_bytes=device_bytes)
    assert f"derived    rollout.engine.gpu_memory_utilization={share}: {reason}\n" in to_text(plan)
    weights = 4 * 500 + 2 * 80 + 8
    assert plan.engine.kv_cache == max(0, int(share * device_bytes) - weights)
    assert plan.engine.full_rows == plan.engine.kv_cache // (32 * 12)
    unknown = plan_run(config)
    assert unknown.engine.kv_cache is None
    assert "gpu_memory_utilization" not in to_text(unknown)


def test_a_cache_that_is_too_small_is_warned_of(tmp_path: Path) -> None:
    """Each of two engines gets 16 of 32 rows; 0.6 of 13,000 bytes leave 5,632 to keys and values: 14 rows."""
    config = small_config(tmp_path)
    plan = plan_run(config, device_bytes=13_000)
    expected = "max_num_seqs: got 256, but the KV cache of an engine holds 14 rows of full length (12 tokens)"
    assert [warning for warning in plan.warnings if expected in warning]
    assert "14 rows of full length (max_num_seqs: 256)" in to_text(plan)
    few = replace(config.rollout, engine=replace(config.rollout.engine, max_num_seqs=14))
    fitting = (replace(config, rollout=few), 13_000), (config, 14_000)
    for each, device_bytes in fitting:
        assert not [w for w in plan_run(each, device_bytes=device_bytes).warnings if "max_num_seqs" in w]


@pytest.mark.parametrize(("group", "within"), [("gloo", "PCIe"), ("device", "NVLink")])
def test_a_sync_between_gpus_is_estimated_by_its_links(group: str, within: str, tmp_path: Path) -> None:
    """Gloo's messages between hosts take PCIe too. What came over NCCL is copied once more, on the worker's device."""
    config = small_config(tmp_path)
    assert plan_run(config).links is None
    plan = plan_run(replace(config, sync=SyncConfig(host_group=group)), device_bytes=80 << 30)  # type: ignore[arg-type]
    assert plan.links is not None
    loads = {load.medium.value: load.num_bytes for load in plan.links.loads if load.num_bytes}
    wire, local = plan.bridge.wire_bytes, plan.bridge.local_bytes
    apart = loads["network"] if group == "device" else 0
    assert loads["network"] > 0
    assert loads[within] == wire - apart
    assert loads["same device"] == local + (wire if group == "device" else 0)
    assert plan.links.seconds >= plan.links.bound_seconds > 0
    text = to_text(plan)
    assert f"links      {within}: {loads[within]:,} bytes per sync, " in text
    assert "sync time  estimate " in text


def test_text_and_json_say_the_same(tmp_path: Path) -> None:
    plan = plan_run(small_config(tmp_path), device_bytes=100_000)
    fields = json.loads(to_json(plan))
    assert fields["devices"][0]["phases"]["sync"]["total"] == plan.devices[0].phases["sync"].total
    text = to_text(plan)
    assert "layout     actor, reference: 8 ranks = tp 2 × cp 1 × dp 2 × pp 2\n" in text
    assert "node 0     devices 0-3, engines 0-1\nnode 1     devices 4-7\n" in text
    assert "pp groups  4 of 2 ranks, 4 of them across nodes: [0,4] [1,5] [2,6] [3,7]\n" in text
    assert "batch      32 rows per step, 16 per optimizer step; 6 optimizer steps per step, 60 in all\n" in text


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([3], "3"), ([0, 1, 2], "0-2"), ([0, 1, 5], "0-1,5"), ([0, 4, 8, 12], "0,4,…,12"), ([1, 3], "1,3")],
)
def test_ranges(numbers: list[int], expected: str) -> None:
    assert ranges(numbers) == expected


RUNS = sorted(path.name for path in (ROOT / "configs/run").glob("*.yaml") if path.name.startswith(("gsm8k", "math")))
# As published on Hugging Face, where a tied head is not counted twice.
PARAMETERS = {"0.6b": 596_049_920, "1.7b": 1_720_574_976, "4b": 4_022_468_096}


@pytest.mark.parametrize(
    "size", ["1.7b", *(pytest.param(size, marks=pytest.mark.long) for size in PARAMETERS if size != "1.7b")]
)
def test_runs_on_math(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With thinking and without; the longest hint has room beside the longest row."""
    monkeypatch.chdir(ROOT)
    off = ["data.chat_template.enable_thinking=false", "rollout.max_response_tokens=4096"]
    for overrides, thinks in (([], True), (off, False)):
        config = load_config(Path(f"configs/run/math-qwen3-{size}.yaml"), ["use.algo=cpo", *overrides])
        assert config.data.chat_template == {"enable_thinking": thinks}
        assert {role.num_parameters for role in plan_run(config).roles} == {PARAMETERS[size]}
        hinted = max_row_tokens(config) + config.algo.cpo.hint.max_tokens
        assert hinted <= config.actor.micro_batch_tokens
        assert config.rollout.num_samples == 8


# Plans of many experts or hundreds of devices take from 2 to 30 s.
LARGE = re.compile(r"deepseek-v3|235b|kimi|minimax|80b|35b|120b|air")


def by_size(names: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.long) if LARGE.search(name) else name for name in names]


RECOMMENDED = ("qwen3-8b", "qwen3-30b-a3b", "qwen3-32b", "qwen3-235b-a22b", "deepseek-v3")
# Of the others a dense model, one with experts and one with adapters stay; the next test has further models.
QUICK = ("gsm8k-qwen3-8b.yaml", "gsm8k-qwen3-8b-lora.yaml", "gsm8k-qwen3-30b-a3b.yaml")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in RUNS]
)
def test_real_models_fit_devices_of_80_gib(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    main(["train", f"configs/run/{name}", "--dry-run", "--device-gib", "80", "--json"])
    plan = json.loads(capsys.readouterr().out)
    # Those whose layouts `megarl plan` recommends leave a tenth free.
    limit = 80 * GIB * (0.9 if name.removeprefix("gsm8k-").removesuffix(".yaml") in RECOMMENDED else 1.0)
    assert max(phase["total"] for alike in plan["devices"] for phase in alike["phases"].values()) < limit
    assert {len(node["ranks"]) for node in plan["nodes"]} == {1 if name.endswith("-lora.yaml") else 8}
    # Tensor-parallel groups do not leave their node.
    assert all(
        any(set(group) <= set(node["ranks"]) for node in plan["nodes"]) for group in plan["layouts"][0]["groups"]["tp"]
    )


# Models without a run file of their own.
OTHER_MODELS = sorted(
    path.stem
    for path in (ROOT / "configs/model").glob("*.yaml")
    if (ROOT / "configs/model/hf" / path.stem).exists() and not any(path.stem in run for run in RUNS)
)


@pytest.mark.parametrize("name", by_size(OTHER_MODELS))
def test_other_models_fit_devices_of_80_gib(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    overrides = [f"use.model={name}", "--dry-run", "--device-gib", "80", "--json"]
    if name == "olmo-2-7b":
        # It has 4,096 positions.
        overrides.append("rollout.max_response_tokens=2048")
    main(["train", "configs/run/gsm8k-qwen3-8b.yaml", *overrides])
    plan = json.loads(capsys.readouterr().out)
    assert max(phase["total"] for alike in plan["devices"] for phase in alike["phases"].values()) < 80 * GIB


def test_a_model_directory_goes_before_the_published_sizes(tmp_path: Path) -> None:
    config = small_config(tmp_path / "published")
    tree = {"path": str(write_config(tmp_path / "real", num_hidden_layers=2)), "config_path": config.model.config_path}
    config = replace(config, model=replace(config.model, **tree))
    assert plan_run(config).shards[0].num_layers == 1


def test_errors_are_those_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)

    def error(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["train", "configs/run/gsm8k-qwen3-8b.yaml", "--dry-run", *arguments])
        assert caught.value.code == 2
        return capsys.readouterr().err

    assert "actor.layout.tp: got 3, which does not divide" in error("actor.layout.tp=3", "rollout.engine.num_engines=6")
    assert "rollout.top_p: got 0.9, but rollout.top_k=-1 does not limit" in error("rollout.top_p=0.9")
    assert "model.path: nowhere/config.json: no such file" in error("model.path=nowhere", "model.config_path=null")
    assert "model architecture ['GPT2LMHeadModel'] is not supported" in error(
        f"model.config_path={write_config(tmp_path, architectures=['GPT2LMHeadModel'])}"
    )
    assert "--device-gib: got 0.0, expected > 0" in error("--device-gib", "0")
    assert "--profile-steps: got '3', expected FIRST:LAST, such as 3:5" in error("--profile-steps", "3")
    assert "logging.profile_steps: got [3, 999], expected first and last step" in error("--profile-steps", "3:999")


def test_a_run_file_anywhere_has_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("use: {model: qwen3-8b, algo: cpo}\ndata: {train: [a.parquet]}\n")
    monkeypatch.chdir(tmp_path)
    main(["train", "mine.yaml", "--dry-run", "--json"])
    (role,) = json.loads(capsys.readouterr().out)["roles"]
    assert role["model_config"] == str(ROOT.resolve() / "configs/model/hf/qwen3-8b/config.json")


def test_settings_may_follow_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    main(["train", "configs/run/gsm8k-qwen3-8b.yaml", "--dry-run", "--json", "run.name=other"])
    assert json.loads(capsys.readouterr().out)["run"] == "runs/other"
    with pytest.raises(SystemExit) as caught:
        main(["train", "configs/run/gsm8k-qwen3-8b.yaml", "--micro_train_batch_size", "4"])
    assert caught.value.code == 2
    assert "is OpenRLHF's name for 'actor.micro_batch_tokens'" in capsys.readouterr().err


def test_a_dry_run_fetches_a_config_from_the_hub_and_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str], **_: object) -> str:
        assert name == "org/tiny"
        patterns.append(allow_patterns)
        return str(write_config(tmp_path))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = small_config(tmp_path)
    config = replace(config, model=replace(config.model, path="org/tiny"))
    # A published config.json spares even that.
    assert plan_run(config).roles[0].model_path == "org/tiny"
    assert patterns == []
    plan = plan_run(replace(config, model=replace(config.model, config_path=None)))
    assert plan.roles[0].num_parameters == 4 * 500 + 2 * 80 + 8
    assert len(patterns) == 1
    assert {"*.json", "*.jinja", "*.txt", "*.model"} <= set(patterns[0])
    assert "*.safetensors" not in patterns[0]
    assert plan.missing[0].endswith("(model.path)")


def test_a_dry_run_warns_as_the_run_does_and_reads_the_data_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the warnings are about settings, which need no file; prompts and hints need model and data."""
    overrides = [
        f"run.dir={tmp_path}/runs",
        f"model.path={tmp_path}/model",
        f"model.config_path={write_config(tmp_path / 'published', max_position_embeddings=512)}",
        f"data.train=[{tmp_path}/data/train.parquet]",
        "data.val=[]",
        "data.on_long_prompt=drop",
        "data.max_prompt_tokens=70",
        "trainer.prompts_per_step=2",
        "actor.layout={tp: 1, sequence_parallel: false}",
        "rollout.engine.num_engines=1",
        "algo.reward.mask={ratio: 0.5, flip: false}",
    ]

    def lines(*more: str) -> list[str]:
        arguments = ["train", str(ROOT / "configs/run/sums-rl.yaml"), *overrides, *more, "--dry-run"]
        main(arguments)
        found = capsys.readouterr().out.splitlines()
        main([*arguments, "--json"])
        plan = json.loads(capsys.readouterr().out)
        ends = [line for line in found if line.startswith(("warning", "unchecked"))]
        assert [line[11:] for line in ends if line.startswith("warning")] == plan["warnings"]
        assert sum(line.startswith("unchecked") for line in ends) == bool(plan["missing"])
        return ends

    settings = "warning    algo.reward.mask.flip=false with algo.reward.mask.ratio=0.5: hidden rows have advantages"
    warned, unchecked = lines("use.algo=ppo")
    assert warned.startswith(settings)
    assert unchecked == (
        "unchecked  tokenizer, prompts, hints and ground truths, without "
        f"{tmp_path}/model (model.path), {tmp_path}/data/train.parquet (data.train)"
    )
    (tmp_path / "data").mkdir()
    make_tiny_model(tmp_path / "model", TinyModelConfig(), seed=0)
    rows = [
        {
            "prompt": [{"role": "user", "content": question}],
            "data_source": "megarl/sums",
            "reward_model": {"style": "rule", "ground_truth": "8"},
        }
        for question in ("3+5=?", "5+3=?", "three plus five, which is what?" * 3)
    ]
    write_parquet(tmp_path / "data/train.parquet", rows)
    warned, dropped = lines("use.algo=ppo")
    assert warned.startswith(settings)
    assert dropped == "warning    data.train: dropped 1 prompts over data.max_prompt_tokens=70"
    config = load_config(ROOT / "configs/run/sums-rl.yaml", [*overrides, "use.algo=ppo"])
    assert open_train_inputs(config).warnings == [warned[11:], dropped[11:]]
    with pytest.raises(DataError, match="hint"):
        plan_run(load_config(ROOT / "configs/run/sums-rl.yaml", [*overrides, "use.algo=cpo"]))
    rows[0]["extra_info"] = {"gold_solution": "3+5 = 8"}
    write_parquet(tmp_path / "data/train.parquet", rows)
    text = to_text(plan_run(load_config(ROOT / "configs/run/sums-rl.yaml", [*overrides, "use.algo=cpo"])))
    assert "\nhints      1 of 2 prompts have one\n" in text
    assert "\nwarning    data.train: 1 of 2 prompts train without a hint: expected text in extra_info.gold_s" in text


# --- forward passes before the update


def hinted_config(directory: Path, **changes: Any) -> Config:
    """The small run with CPO: 32 rows of 12 tokens per step on two replicas, and hints of up to 6 tokens."""
    config, cpo = small_config(directory), CpoConfig(method="mi", hint=HintConfig(max_tokens=6))
    return replace(
        config,
        algo=replace(config.algo, cpo=replace(cpo, **changes)),
        logging=replace(config.logging, peak_tflops=2.0),
    )


def test_hinted_rows_are_planned_too(tmp_path: Path) -> None:
    actor, reference = plan_run(hinted_config(tmp_path)).steps.forward
    assert (reference.role, reference.rows, reference.max_row_tokens) == ("reference", {"plain": 32}, {"plain": 12})
    # Two plain rows fit into 24 tokens: 16 rows of a replica make 8.
    assert (reference.micro_batches, reference.tokens) == (8, 32 * 12)
    assert (actor.rows, actor.max_row_tokens) == ({"plain": 32, "hinted": 32}, {"plain": 12, "hinted": 18})
    # A row of 18 fills a micro-batch, as no other fits beside it.
    assert (actor.micro_batches, actor.tokens) == (8 + 16, 32 * (12 + 18))
    dims = read_model_spec(str(write_config(tmp_path))).dims
    plain, hinted = (forward_flops(dims, num_tokens=n, num_head_tokens=8) for n in (12, 18))
    assert reference.flops == 32 * plain
    assert actor.flops == 32 * (plain + hinted)
    assert actor.seconds_at_peak == pytest.approx(actor.flops / (2e12 * 8))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_teacher_with_hints_reads_hinted_rows_alone(tmp_path: Path, frozen: bool) -> None:
    config = hinted_config(tmp_path, method="none")
    distill = DistillConfig(teacher="hint", shuffled_baseline=True)
    teacher = replace(config.teacher, model_path=config.model.path if frozen else None)
    plan = plan_run(replace(config, algo=replace(config.algo, distill=distill), teacher=teacher))
    (reader,) = (each for each in plan.steps.forward if each.role != "reference")
    assert (reader.role, reader.rows) == ("teacher" if frozen else "actor", {"hinted": 32, "shuffled": 32})
    assert reader.tokens == 32 * (18 + 18)


def test_the_update_has_room_for_rows_as_their_teacher_reads_them(tmp_path: Path) -> None:
    config = hinted_config(tmp_path, method="none")
    config = replace(config, algo=replace(config.algo, distill=DistillConfig(teacher="hint", mode="exact")))
    steps = plan_run(config).steps
    assert [each.role for each in steps.forward] == ["reference"]
    assert steps.micro_batches_at_full_length == steps.rows_per_optimizer_step // 2


def test_a_teacher_that_follows_the_policy_takes_float32_beside_its_weights(tmp_path: Path) -> None:
    config = hinted_config(tmp_path, method="none")

    def planned(rate: float) -> RunPlan:
        distill = DistillConfig(teacher="hint", teacher_update_rate=rate)
        taking_turns = replace(config.placement, offload=True)
        return plan_run(replace(config, algo=replace(config.algo, distill=distill), placement=taking_turns))

    still, moving = planned(0.0), planned(0.05)
    sizes = {each.stage: each.num_parameters for each in moving.shards if each.role == "teacher"}
    for plan, num_bytes in ((still, 2), (moving, 2 + 4)):
        teacher = {each.stage: each.resident for each in plan.shards if each.role == "teacher"}
        assert teacher == {stage: {"params": num_bytes * size} for stage, size in sizes.items()}
    # Each node has the first replica of a stage, on two tensor-parallel ranks.
    for before, after, size in zip(still.nodes, moving.nodes, sizes.values(), strict=True):
        assert after.checkpoint - before.checkpoint == 2 * 4 * size
        assert after.portable_checkpoint - before.portable_checkpoint == 2 * 4 * size
    # It has to be there when the actor's weights have moved.
    for before, after, size in zip(still.devices, moving.devices, sizes.values(), strict=True):
        assert after.phases["update actor"].trainer - before.phases["update actor"].trainer == 6 * size
        assert after.phases["score teacher"].trainer - before.phases["score teacher"].trainer == 4 * size
    assert ", moving average of the actor at rate 0.05, elsewhere" in to_text(moving)
    assert "moving average" not in to_text(still)


def test_another_prompts_hint_is_a_third_row(tmp_path: Path) -> None:
    actor, _ = plan_run(hinted_config(tmp_path, shuffled_baseline=True)).steps.forward
    assert actor.rows == {"plain": 32, "hinted": 32, "shuffled": 32}
    assert actor.tokens == 32 * (12 + 18 + 18)
    assert actor.micro_batches == 8 + 32
    text = to_text(plan_run(hinted_config(tmp_path, shuffled_baseline=True)))
    assert (
        "scoring    actor: 32 rows of up to 12 tokens, 32 rows with their hint of up to 18 tokens, 32 rows with "
        "another prompt's hint of up to 18 tokens; at most 40 forward passes of a replica and step, 1,536 tokens, "
    ) in text


def test_a_row_and_its_twin_share_half_a_micro_batch_each(tmp_path: Path) -> None:
    paired, alone = (plan_run(hinted_config(tmp_path, mi_estimator=name)) for name in ("full_kl", "pmi"))
    actor, _ = paired.steps.forward
    # Half of 24 tokens is the plain row's length: there is no room for hints, which opening the data refuses.
    assert actor.max_row_tokens == {"plain": 12, "hinted": 12}
    assert actor.micro_batches == 16
    # Twice the 6 rows of a chunk's logits, 8 columns of 2 bytes on a rank.
    assert [p.forward - a.forward for p, a in zip(paired.shards, alone.shards, strict=True)] == [0, 6 * 8 * 2, 0, 0]


def test_without_hints_nothing_changes(tmp_path: Path) -> None:
    steps = plan_run(small_config(tmp_path)).steps
    assert all(forward.rows == {"plain": 32} for forward in steps.forward)


@pytest.mark.parametrize(("mib", "device"), [(900_000, "GPU"), (900_000_000, "host")])
def test_a_cache_that_no_device_or_host_can_hold_is_refused(tmp_path: Path, mib: int, device: str) -> None:
    config = with_overrides(small_config(tmp_path), [f"rollout.engine.kv_cache_mib={mib}"])
    if device == "host":
        with pytest.raises(ConfigError, match=r"kv_cache_mib: got 900000000, for all engines [0-9,]+ MiB, but"):
            plan_run(config)
    else:
        with assuming("cuda"), pytest.raises(ConfigError, match="got 900000, but a device has 81,920 MiB; lower it"):
            plan_run(config, device_bytes=80 << 30)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .*config\.json: no such file"):
        plan_run(load_config(ROOT / "configs/run/sums-rl.yaml", [f"model.path={tmp_path}"]))


def test_options_of_the_dry_run_need_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", str(ROOT / "configs/run/sums-rl.yaml"), "--json"])
    assert caught.value.code == 2
    assert "--json, --device-gib and --calibration: go with --dry-run" in capsys.readouterr().err
