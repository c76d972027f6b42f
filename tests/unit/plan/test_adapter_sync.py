"""The plan of a sync that sends adapters alone: elements counted by hand."""

from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.sync_plan import bridge_plan, plan_input_of
from megarl.config import from_dict
from megarl.config.schema import Config
from megarl.plan.build import plan_run
from megarl.plan.render import to_text
from megarl.sync.plan.build import plan_statistics
from megarl.weights.families import read_model_spec
from tests.helpers.small_model import write_config
from tests.unit.plan.test_experts import EXPERTS

RANK = 3
# A [r, in] and B [out, r] of q, k, v, o, gate, up, down in 4 layers of h 8, q 8, k 4, f 12; two bytes each.
ADAPTERS = 2 * 4 * RANK * ((8 + 8) + 2 * (8 + 4) + (8 + 8) + 2 * (8 + 12) + (12 + 8))
# A worker of two has every A of q, k, v, gate, up and half of their B, and half of every A of o, down with their B.
OF_TWO = 2 * 4 * RANK * ((8 + 4) + 2 * (8 + 2) + (4 + 8) + 2 * (8 + 6) + (6 + 8))


def run(
    directory: Path, *, sync: str = "adapter", tp: int = 1, model: Any = (), lora: Any = (), **sections: Any
) -> Config:
    tree = {
        "model": {"path": "elsewhere", "config_path": str(write_config(directory, **dict(model)))},
        "data": {"train": ["train.parquet"], "max_prompt_tokens": 4},
        "actor": {
            "layout": {"tp": 2, "pp": 2, "sequence_parallel": True},
            "micro_batch_tokens": 24,
            "lora": {"rank": RANK, "sync": sync, **dict(lora)},
        },
        "rollout": {"max_response_tokens": 8, "engine": {"num_engines": 4 // tp, "tp": tp}},
        "placement": {"mode": "split"},
        "trainer": {"total_steps": 2, "prompts_per_step": 4},
        **sections,
    }
    return from_dict(Config, tree)


def test_bytes_on_the_wire_are_the_adapters_times_the_workers(tmp_path: Path) -> None:
    plan = plan_run(run(tmp_path))
    assert plan.sync_bytes == ADAPTERS
    assert (plan.bridge.wire_bytes, plan.bridge.local_bytes) == (4 * ADAPTERS, 0)
    assert f"sync       {ADAPTERS:,} bytes" in to_text(plan)
    assert plan_run(run(tmp_path, tp=2)).bridge.wire_bytes == 4 * OF_TWO
    merged = plan_run(run(tmp_path, sync="merged"))
    assert merged.sync_bytes == 2 * (4 * 500 + 2 * 80 + 8)
    # vLLM makes room for a rank of 8.
    assert plan.engine.weights == merged.engine.weights + ADAPTERS * 8 // RANK


def test_engines_that_have_read_their_weights_keep_them_on_the_host(tmp_path: Path) -> None:
    """While they sleep, which the ordinary sync does without."""
    shared = {"placement": {"mode": "colocated", "offload": True}}
    plan, merged = (plan_run(run(tmp_path, sync=sync, **shared)) for sync in ("adapter", "merged"))
    assert plan.nodes[0].offloaded == merged.nodes[0].offloaded + 4 * plan.engine.weights


@pytest.mark.parametrize("targets", [["attention"], ["experts"], ["attention", "mlp", "experts"]])
def test_workers_get_all_and_only_what_they_need(targets: list[str], tmp_path: Path) -> None:
    """Six experts of width 10, with rank max(1, 3 // 2) = 1."""
    config = run(tmp_path, model=EXPERTS, lora={"targets": targets})
    engine = config.rollout.engine
    plan_input = plan_input_of(read_model_spec(tmp_path), config.model, config.actor, engine, config.sync)
    plan = bridge_plan(plan_input, engine, config.placement)
    of_attention, of_experts = 2 * 4 * RANK * 56, 2 * 4 * 6 * (2 * (8 + 10) + (10 + 8))
    expected = of_attention * ("attention" in targets) + of_experts * ("experts" in targets)
    assert plan_statistics(plan).wire_bytes == 4 * expected
    assert all(".lora_" in name for name in plan_input.specs)
