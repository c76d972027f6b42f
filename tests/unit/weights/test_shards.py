"""Places, stages and parameters of a model counted by hand."""

from pathlib import Path

import pytest

from megarl.config.schema import LayoutConfig
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.shards import (
    Place,
    groups_of,
    num_stage_layers,
    num_stage_parameters,
    padded_vocab,
    place_of,
    stage_layers,
)

CONFIGS = Path(__file__).parents[3] / "configs/model/hf"


def test_ranks_count_tp_first_then_cp_dp_pp() -> None:
    layout = LayoutConfig(tp=2, cp=2, dp=3, pp=2)
    assert place_of(layout, 0) == Place(tp=0, cp=0, dp=0, pp=0)
    assert place_of(layout, 1) == Place(tp=1, cp=0, dp=0, pp=0)
    assert place_of(layout, 2) == Place(tp=0, cp=1, dp=0, pp=0)
    assert place_of(layout, 4) == Place(tp=0, cp=0, dp=1, pp=0)
    assert place_of(layout, 12) == Place(tp=0, cp=0, dp=0, pp=1)
    assert place_of(layout, 23) == Place(tp=1, cp=1, dp=2, pp=1)
    assert all(layout.dp_rank_of(rank) == place_of(layout, rank).dp for rank in range(24))


def test_groups() -> None:
    layout = LayoutConfig(tp=2, dp=2, pp=2)
    assert groups_of(layout, "tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups_of(layout, "dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups_of(layout, "pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (LayoutConfig(), [12]),
        (LayoutConfig(pp=3), [4, 4, 4]),
        (LayoutConfig(pp=3, first_stage_layers=2), [2, 5, 5]),
        (LayoutConfig(pp=3, first_stage_layers=3, last_stage_layers=1), [3, 8, 1]),
        (LayoutConfig(pp=2, first_stage_layers=7, last_stage_layers=5), [7, 5]),
        (LayoutConfig(pp=2, virtual_pp=3, overlap_p2p=True), [6, 6]),
        (LayoutConfig(pp=2, virtual_pp=2, pipeline_layout="Et|(tttt|)*2,tttL"), [5, 7]),
    ],
)
def test_layers_of_stages(layout: LayoutConfig, expected: list[int]) -> None:
    assert num_stage_layers(layout, 12) == expected


def test_layers_of_uneven_chunks() -> None:
    """The first chunks of both stages, then their second ones, one after another."""
    layout = LayoutConfig(pp=2, virtual_pp=2, pipeline_layout="Et|(tttt|)*2,tttL")
    assert [stage_layers(layout, 12, stage) for stage in (0, 1)] == [[0, 5, 6, 7, 8], [1, 2, 3, 4, 9, 10, 11]]


def test_vocabulary_padding() -> None:
    assert padded_vocab(10, LayoutConfig(), 4) == 12
    assert padded_vocab(10, LayoutConfig(tp=2), 4) == 16
    assert padded_vocab(16, LayoutConfig(tp=2), 4) == 16


# Per layer: norms 8 + 8 and q/k norms 2 + 2 on every rank (20); split: q 8·8 + k 4·8 + v 4·8 (128), o 8·8 (64), gate
# and up 2·12·8 (192), down 8·12 (96): 480. Embedding and head with 12 rows: 96 each, with 16 rows: 128. Norm: 8.
def test_parameters_of_one_rank(small: ModelSpec) -> None:
    assert num_stage_parameters(small, LayoutConfig(), 0, vocab_multiple=4).total == 4 * (20 + 480) + 96 + 8 + 96


def test_parameters_under_tensor_parallelism(small: ModelSpec) -> None:
    layout = LayoutConfig(tp=2, dp=3)
    assert num_stage_parameters(small, layout, 0, vocab_multiple=4).total == 4 * (20 + 240) + 64 + 8 + 64


def test_parameters_of_stages(small: ModelSpec, small_tied: ModelSpec) -> None:
    layout = LayoutConfig(pp=2, first_stage_layers=1)
    assert [num_stage_parameters(small, layout, stage, vocab_multiple=4).total for stage in (0, 1)] == [
        500 + 96,
        3 * 500 + 8 + 96,
    ]
    # Tied, one stage: the head is the embedding. Two stages: the last has a copy of it.
    assert num_stage_parameters(small_tied, LayoutConfig(), 0, vocab_multiple=4).total == 4 * 500 + 96 + 8
    assert num_stage_parameters(small_tied, layout, 1, vocab_multiple=4).total == 3 * 500 + 8 + 96


def test_a_scalar_head_takes_the_place_of_the_output_embedding(small: ModelSpec) -> None:
    layout = LayoutConfig(tp=2)
    counted = num_stage_parameters(small, layout, 0, vocab_multiple=4, scalar_head=True).total
    # The scalar head's 8 weights are on every rank.
    assert counted == 4 * (20 + 240) + 64 + 8 + 8


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [("llama-3.1-8b", 8_030_261_248), ("qwen3-30b-a3b", 30_532_122_624), ("deepseek-v3", 671_026_419_200)],
)
def test_published_models(name: str, num_parameters: int) -> None:
    assert (
        num_stage_parameters(read_model_spec(CONFIGS / name), LayoutConfig(), 0, vocab_multiple=1).total
        == num_parameters
    )
