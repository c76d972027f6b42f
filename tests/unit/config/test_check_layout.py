"""Each rule of a layout, by its message."""

import pytest

from megarl.config.check_layout import check_layout, check_stages
from megarl.config.schema import LayoutConfig
from megarl.errors import ConfigError


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            LayoutConfig(sequence_parallel=True),
            r"x\.sequence_parallel: got true with tp=1, .*; set x\.sequence_parallel=false",
        ),
        (LayoutConfig(first_stage_layers=2), r"x\.first_stage_layers: got 2 with pp=1, .* remove it or set x\.pp >= 2"),
        (LayoutConfig(virtual_pp=2), r"x\.virtual_pp: got 2 with pp=1"),
        (
            LayoutConfig(pp=4, virtual_pp=2, last_stage_layers=1),
            r"x\.last_stage_layers: uneven stages do not combine with virtual_pp=2",
        ),
        (LayoutConfig(pp=2, virtual_pp=2), r"x\.virtual_pp: got 2 at pp=2 .* silently wrong; set x\.overlap_p2p=true"),
    ],
)
def test_unsound_layouts(layout: LayoutConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(layout, "x")


@pytest.mark.parametrize(
    "layout",
    [
        LayoutConfig(tp=2, sequence_parallel=True, cp=2, dp=3),
        LayoutConfig(pp=2, virtual_pp=2, overlap_p2p=True),
        LayoutConfig(pp=4, virtual_pp=2),
        LayoutConfig(pp=2, first_stage_layers=3),
    ],
)
def test_sound_layouts(layout: LayoutConfig) -> None:
    check_layout(layout, "x")


@pytest.mark.parametrize(
    ("layout", "num_layers"),
    [
        (LayoutConfig(), 5),
        (LayoutConfig(pp=2), 4),
        (LayoutConfig(pp=2, first_stage_layers=3), 5),
        (LayoutConfig(pp=2, first_stage_layers=2, last_stage_layers=3), 5),
        (LayoutConfig(pp=4, first_stage_layers=1, last_stage_layers=2), 9),
        (LayoutConfig(pp=2, virtual_pp=2), 8),
    ],
)
def test_layers_that_fill_the_stages(layout: LayoutConfig, num_layers: int) -> None:
    check_stages(layout, {"num_hidden_layers": num_layers}, "x")


@pytest.mark.parametrize(
    ("layout", "num_layers"),
    [
        (LayoutConfig(pp=2), 5),
        (LayoutConfig(pp=2, first_stage_layers=5), 5),
        (LayoutConfig(pp=2, first_stage_layers=2, last_stage_layers=2), 5),
        (LayoutConfig(pp=2, virtual_pp=2), 6),
    ],
)
def test_layers_that_do_not(layout: LayoutConfig, num_layers: int) -> None:
    with pytest.raises(ConfigError, match=rf"x: {num_layers} layers do not split over pp=2 stages"):
        check_stages(layout, {"num_hidden_layers": num_layers}, "x")
