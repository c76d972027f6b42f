"""The limits of what the driver may cost."""

from dataclasses import replace

from megarl_lab.bench.driver import MAX_BYTES, MAX_CPU_S, DriverCost, exceeded

COST = DriverCost(
    size="64x16-32",
    million_tokens=1.0,
    cpu_s_per_million=MAX_CPU_S,
    bytes_per_token=MAX_BYTES,
    sent_bytes_per_token=18.0,
    wall_s=1.0,
    stages={},
    load=0.0,
)


def test_either_limit_can_be_exceeded() -> None:
    slow = replace(COST, size="slow", cpu_s_per_million=MAX_CPU_S + 0.01)
    large = replace(COST, size="large", bytes_per_token=MAX_BYTES + 1)
    assert exceeded([COST]) == []
    assert exceeded([COST, slow, large]) == ["slow", "large"]
