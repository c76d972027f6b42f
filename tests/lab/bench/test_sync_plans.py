"""Plans of large models: how long processes wait for each other, and what they stage, by the benchmark's own clock."""

import pytest

from megarl.sync.plan.links import Medium
from megarl_lab.bench.sync_plans import SCENARIOS, plan_scenario


@pytest.mark.parametrize(
    "number", [0, 1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
def test_buckets_in_turn_take_little_longer_than_the_bound(number: int) -> None:
    """8B on 8 devices, 30B on 32, 235B on 128 and 671B on 512."""
    planned = plan_scenario(SCENARIOS[number])
    assert planned.bytes_are_least
    assert planned.bound_seconds <= planned.links["NCCL"].seconds <= 1.15 * planned.bound_seconds
    assert planned.staging_bytes <= 1 << 30


def test_one_host_moves_no_byte_over_pcie() -> None:
    """Each of 8 devices holds a quarter of the 8B model, and its worker needs all of it: three quarters come over
    NVLink, at 450 GB/s. All of it is copied on the device.
    """
    planned = plan_scenario(SCENARIOS[0])
    loads = {load.medium: load for load in planned.links["NCCL"].loads}
    lacking = planned.received.most
    assert 0.749 * planned.model_bytes < lacking < 0.751 * planned.model_bytes
    assert loads[Medium.NVLINK].busiest_bytes == pytest.approx(lacking, rel=1e-3)
    assert loads[Medium.PCIE].num_bytes == loads[Medium.NETWORK].num_bytes == 0
    assert loads[Medium.DEVICE].num_bytes == 8 * planned.model_bytes
    assert planned.bound_seconds == pytest.approx(lacking / 450e9, rel=1e-3)
    assert planned.links["memory, TCP"].seconds > 40 * planned.links["NCCL"].seconds
