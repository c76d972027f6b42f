"""The gradient of a batch is the same in every layout, and one of which a part is wrong is named."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.bisect.gradients import GradientComparison, compare_gradients
from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import create_model_files, map_model, weight_specs
from tests.helpers import ranks
from tests.helpers.rank_pool import RankPool
from tests.helpers.requests import update_request, with_advantages
from tests.helpers.rows import random_rows

GetPool = Callable[[int], RankPool]
GetCheckpoint = Callable[..., Path]
ROWS = with_advantages(random_rows([(4, 6), (2, 9), (7, 3), (5, 5)]))
# Tensor parallelism splits the sums over heads of which the gradients of queries' and keys' norms are made.
MOST = {"dp2": 1e-6, "tp2-sp": 4e-6, "pp2": 1e-6}
LAYOUTS = {
    "dp2": LayoutConfig(dp=2),
    "tp2-sp": LayoutConfig(tp=2, sequence_parallel=True),
    "pp2": LayoutConfig(pp=2),
}


@pytest.fixture
def compared(rank_pool: GetPool, checkpoint: GetCheckpoint, tmp_path: Path) -> Callable[..., GradientComparison]:
    """The gradient on one rank and in a layout, where those of a layer's MLP may be doubled."""
    path = checkpoint(tied=True)

    def write(layout: LayoutConfig, dtype: str, doubled: str, directory: Path) -> list[Path]:
        files = create_model_files(directory, weight_specs(read_model_spec(path), "float32"))
        actor = ActorConfig(layout=layout, optimizer=OptimizerConfig(distributed=layout.dp > 1))
        model, request = ModelConfig(path=str(path), dtype=dtype), update_request(ROWS)
        pool = rank_pool(layout.world_size)
        pool.run(ranks.write_gradient, actor, model, ROWS, request, [str(file) for file in files], doubled)
        return files

    def compare(layout: LayoutConfig, dtype: str = "float32", doubled: str = "") -> GradientComparison:
        alone, split = write(LayoutConfig(), dtype, "", tmp_path / "a"), write(layout, dtype, doubled, tmp_path / "b")
        return compare_gradients(map_model(alone), map_model(split), dtype=dtype)

    return compare


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_layouts_have_the_same_gradient(compared: Callable[[LayoutConfig], GradientComparison], name: str) -> None:
    found = compared(LAYOUTS[name])
    assert found.verdict != "fault"
    assert all(group.norms[0] > 0 and group.size <= MOST[name] for group in found.groups), found.words()


@pytest.mark.parametrize(("dtype", "times"), [("float32", "2"), ("bfloat16", r"(2|1\.9\d+|2\.0\d+)")])
def test_a_wrong_scale_in_one_layer_is_named(
    compared: Callable[..., GradientComparison], dtype: str, times: str
) -> None:
    found = compared(LAYOUTS["tp2-sp"], dtype, doubled="decoder.layers.1.mlp")
    assert re.match(rf"fault: layer 1, mlp is {times} times as large, and nothing else", found.words())
