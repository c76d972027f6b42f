"""Communication overlaps with computation by default where it can, on CUDA."""

import re
from pathlib import Path

import pytest
import torch

from megarl.config import load_config
from megarl.config.optimizer import OptimizerConfig
from megarl.config.schema import LayoutConfig
from megarl.errors import ConfigError
from megarl.host.device.platform import assuming
from megarl.parallel.optimizers import optimizer_settings
from megarl.plan.sizes import size_run

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("settings", "on_cuda", "on_cpu"),
    [
        ({}, True, False),
        ({"overlap_param_gather": False}, False, False),
        ({"overlap_grad_reduce": False}, False, False),
        ({"overlap_grad_reduce": True}, True, False),
        ({"overlap_grad_reduce": True, "overlap_param_gather": True}, True, True),
        ({"distributed": False}, False, False),
        ({"distributed": False, "algorithm": "muon"}, False, False),
        ({"offload_fraction": 0.5}, False, False),
    ],
)
def test_gathers_of_weights(settings: dict[str, bool], on_cuda: bool, on_cpu: bool) -> None:
    optimizer = OptimizerConfig(**settings)  # type: ignore[arg-type]
    for name, expected in (("cuda", on_cuda), ("cpu", on_cpu)):
        with assuming(name):
            assert optimizer_settings(optimizer, torch.bfloat16)["overlap_param_gather"] is expected


@pytest.mark.parametrize(
    ("layout", "on_cuda", "on_cpu"),
    [
        (LayoutConfig(), False, False),
        (LayoutConfig(pp=2), False, False),
        # Megatron computes two stages of several chunks right only so.
        (LayoutConfig(pp=2, virtual_pp=2), True, True),
        (LayoutConfig(pp=4, virtual_pp=2), True, False),
        (LayoutConfig(pp=4, virtual_pp=2, overlap_p2p=False), False, False),
        (LayoutConfig(pp=4, virtual_pp=2, overlap_p2p=True), True, True),
    ],
)
def test_messages_between_stages(layout: LayoutConfig, on_cuda: bool, on_cpu: bool) -> None:
    for name, expected in (("cuda", on_cuda), ("cpu", on_cpu)):
        with assuming(name):
            layout.check("actor.layout")
            assert layout.overlaps_p2p is expected


def test_stages_of_one_chunk_have_nothing_to_compute_meanwhile() -> None:
    message = "x.overlap_p2p: got true with virtual_pp=1, but only stages of several chunks have something to compute"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)} meanwhile; remove it or set x.virtual_pp >= 2$"):
        LayoutConfig(pp=2, overlap_p2p=True).check("x")


def test_sizes_say_what_is_derived() -> None:
    def derived(*overrides: str) -> dict[str, object]:
        config = load_config(ROOT / "configs/run/gsm8k-qwen3-30b-a3b.yaml", overrides)
        with assuming("cuda"):
            sized = size_run(config, 80 << 30)
        return {each.key: each.value for each in sized.derived if "overlap" in each.key}

    gathers, messages = "actor.optimizer.overlap_param_gather", "actor.layout.overlap_p2p"
    assert derived() == {gathers: True}
    assert derived("actor.layout.virtual_pp=2") == {gathers: True, messages: True}
    assert derived("actor.layout.virtual_pp=2", f"{messages}=true", f"{gathers}=true") == {}
