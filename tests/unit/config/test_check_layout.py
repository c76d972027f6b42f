"""Each rule of a layout, by its message."""

import re

import pytest

from megarl.config.check_model import check_stages
from megarl.config.parse import from_dict
from megarl.config.schema import ActorConfig, Config, LayoutConfig
from megarl.config.setting import check_values
from megarl.errors import ConfigError


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            LayoutConfig(sequence_parallel=True),
            "x.sequence_parallel: got true with tp=1, but it shards over tensor-parallel ranks; set "
            "x.sequence_parallel=false or x.tp >= 2",
        ),
        (
            LayoutConfig(first_stage_layers=2),
            "x.first_stage_layers: got 2 with pp=1, but there is only one stage; remove it or set x.pp >= 2",
        ),
        (
            LayoutConfig(virtual_pp=2),
            "x.virtual_pp: got 2 with pp=1, but there is only one stage; remove it or set x.pp >= 2",
        ),
        (
            LayoutConfig(pp=4, virtual_pp=2, last_stage_layers=1),
            "x.last_stage_layers: uneven stages do not combine with virtual_pp=2; remove one of them, or set "
            "x.pipeline_layout instead",
        ),
        (
            LayoutConfig(pipeline_layout="EttL"),
            "x.pipeline_layout: got EttL with pp=1, but there is only one stage; remove it or set x.pp >= 2",
        ),
        (
            LayoutConfig(pp=2, pipeline_layout="Et|tL", first_stage_layers=1),
            "x.first_stage_layers: is set, but x.pipeline_layout says it too; remove one of them",
        ),
        (
            LayoutConfig(pp=2, virtual_pp=2, pipeline_layout="E(t|)*2L", overlap_p2p=True),
            "x.pipeline_layout: got E(t|)*2L, whose chunks have 1, 1, 0 layers, expected at least one in each of "
            "pp 2 × virtual_pp 2 = 4; change one of them",
        ),
        (
            LayoutConfig(pp=2, virtual_pp=2, overlap_p2p=False),
            "x.virtual_pp: got 2 at pp=2 without overlapped communication, which Megatron computes silently wrong; "
            "set x.overlap_p2p=true",
        ),
    ],
)
def test_unsound_layouts(layout: LayoutConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        layout.check("x")


@pytest.mark.parametrize(
    "layout",
    [
        LayoutConfig(tp=2, sequence_parallel=True, cp=2, dp=3),
        LayoutConfig(pp=2, virtual_pp=2, overlap_p2p=True),
        LayoutConfig(pp=4, virtual_pp=2),
        LayoutConfig(pp=2, first_stage_layers=3),
        LayoutConfig(pp=2, virtual_pp=2, overlap_p2p=True, pipeline_layout="Ettt|(t|)*2,t*2L"),
    ],
)
def test_sound_layouts(layout: LayoutConfig) -> None:
    layout.check("x")


@pytest.mark.parametrize(
    ("layout", "num_layers"),
    [
        (LayoutConfig(), 5),
        (LayoutConfig(pp=2), 4),
        (LayoutConfig(pp=2, first_stage_layers=3), 5),
        (LayoutConfig(pp=2, first_stage_layers=2, last_stage_layers=3), 5),
        (LayoutConfig(pp=4, first_stage_layers=1, last_stage_layers=2), 9),
        (LayoutConfig(pp=2, virtual_pp=2), 8),
        (LayoutConfig(pp=2, virtual_pp=2, pipeline_layout="Ettt|(t|)*2,t*2L"), 7),
    ],
)
def test_layers_that_fill_the_stages(layout: LayoutConfig, num_layers: int) -> None:
    check_stages(layout, {"num_hidden_layers": num_layers}, "x")


@pytest.mark.parametrize(
    ("layout", "num_layers", "message"),
    [
        (
            LayoutConfig(pp=2),
            5,
            "5 layers do not split over pp=2 stages (first_stage_layers=None, last_stage_layers=None)",
        ),
        (
            LayoutConfig(pp=2, first_stage_layers=5),
            5,
            "5 layers do not split over pp=2 stages (first_stage_layers=5, last_stage_layers=None)",
        ),
        (
            LayoutConfig(pp=2, first_stage_layers=2, last_stage_layers=2),
            5,
            "5 layers do not split over pp=2 stages (first_stage_layers=2, last_stage_layers=2)",
        ),
        (
            LayoutConfig(pp=2, virtual_pp=2),
            6,
            "6 layers do not split over pp=2 stages of 2 chunks (first_stage_layers=None, last_stage_layers=None)",
        ),
    ],
)
def test_layers_that_do_not(layout: LayoutConfig, num_layers: int, message: str) -> None:
    remedy = "choose another pp, or set x.first_stage_layers or last_stage_layers so that the rest divides evenly"
    with pytest.raises(ConfigError, match=f"^{re.escape(f'x: {message}; {remedy}')}$"):
        check_stages(layout, {"num_hidden_layers": num_layers}, "x")


def test_a_pipeline_layout_has_all_layers() -> None:
    layout = LayoutConfig(pp=2, pipeline_layout="Ett|ttL")
    message = "x.pipeline_layout: got Ett|ttL with 4 layers, expected the model's num_hidden_layers=5; change it"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_stages(layout, {"num_hidden_layers": 5}, "x")


@pytest.mark.parametrize("text", ["tt|ttL", "Ett|tt", "Ett|mttL", "E|L(tt)"])
def test_a_pipeline_layout_is_in_megatrons_notation(text: str) -> None:
    tree = {"actor": {"layout": {"pp": 2, "pipeline_layout": text}}}
    message = f"actor.layout.pipeline_layout: got {text!r}, expected a layout such as Ett|(ttt|)*2tL"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_values(from_dict(Config, tree), ("actor",))


def test_chunks_of_rows_share_no_prefixes() -> None:
    message = "x.share_prefixes: got true with x.layout.cp=2, but ranks of context parallelism have chunks of each row"
    with pytest.raises(ConfigError, match=re.escape(message)):
        ActorConfig(share_prefixes=True, layout=LayoutConfig(cp=2)).check("x")
    ActorConfig(share_prefixes=False, layout=LayoutConfig(cp=2)).check("x")
