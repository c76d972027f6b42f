"""What the benchmark of adapters plans and judges."""

from pathlib import Path

import pytest

from megarl_lab.bench.lora import PLANNED_CONFIG, Replacement, UpdateCost, limits, plan_bytes, tables


def cost(rank: int, seconds: float, num_bytes: int, model: str = "smollm2") -> UpdateCost:
    return UpdateCost(
        model=model,
        rank=rank,
        seconds=(9.0, seconds, 0.0),
        parameter_bytes=0,
        gradient_bytes=num_bytes,
        optimizer_bytes=2 * num_bytes,
    )


def test_qwen3_8b_sends_a_hundredth_and_holds_an_eighth() -> None:
    """36 layers with heads of 4096 and 1024 outputs, a hidden size of 4096 and MLPs of 12288."""
    plan = plan_bytes("qwen3-8b", Path(PLANNED_CONFIG), 32)
    # Of q, k, v, o and gate, up, down: inputs and outputs.
    a_layer = 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    assert plan.adapter_bytes == 2 * 36 * a_layer
    assert plan.weight_bytes == 2 * 8_190_735_360
    # 2 bytes of weights, and of what is trained 4 of gradients, 4 of main weights, 8 of moments.
    assert plan.held_bytes_full == pytest.approx(18 * 8_190_735_360, rel=1e-3)
    assert plan.held_bytes == pytest.approx(2 * 8_190_735_360 + 18 * 36 * a_layer, rel=1e-3)


def test_limits_compare_medians_and_state_with_those_of_all_weights() -> None:
    measured = [cost(0, 4.0, 100), cost(32, 3.2, 10), cost(0, 4.0, 100, "tiny"), cost(32, 8.0, 50, "tiny")]
    # A median of 30 ms for six million elements.
    replaced = [Replacement(model="smollm2", rank=32, num_elements=6_000_000, seconds=(0.01, 0.03, 0.09))]
    found = {each.name: each for each in limits(measured, [], replaced)}
    assert {name: (each.got, each.holds) for name, each in found.items()} == {
        "smollm2, rank 32: time of an update": (0.8, False),
        "smollm2, rank 32: gradients and optimizer": (0.1, True),
        "smollm2, rank 32: replacement in an engine": (pytest.approx(50.0), True),
    }
    assert len(tables(measured, [], replaced)) == 10
