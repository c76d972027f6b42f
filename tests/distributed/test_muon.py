"""Muon moves matrices by their orthogonalized momentum, and all else as Adam does; a run continues to the bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from tests.helpers.muon_ranks import (
    first_updates,
    load_train_with_muon,
    shapes_of_critic,
    train_save_train_with_muon,
)
from tests.helpers.rank_pool import RankPool
from tests.helpers.rows import random_rows

Pools = Callable[[int], RankPool]
ROWS = random_rows([(5, 12), (3, 20), (9, 7), (4, 15), (6, 18), (2, 9), (8, 14), (7, 11)], holes=False)
LR, SCALE = 1e-2, 0.2


def actor_config(layout: LayoutConfig) -> ActorConfig:
    optimizer = OptimizerConfig(algorithm="muon", distributed=False, lr=LR, muon_scale=SCALE, weight_decay=0.0)
    return ActorConfig(layout=layout, optimizer=optimizer, micro_batch_tokens=64)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param(LayoutConfig(dp=2), "float32", id="two replicas"),
        pytest.param(LayoutConfig(tp=2), "bfloat16", id="two shards in bfloat16"),
    ],
)
def test_a_run_continues_itself(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path, layout: LayoutConfig, dtype: Any
) -> None:
    model, pool = ModelConfig(path=str(checkpoint(tied=False, dtype=dtype)), dtype=dtype), rank_pool(2)
    arguments = actor_config(layout), model, ROWS, str(tmp_path)
    expected = pool.run(train_save_train_with_muon, *arguments)
    assert [len(history) for history in expected if history] != []
    assert pool.run(load_train_with_muon, *arguments, same_layout=True) == expected


def test_updates_of_matrices_are_nearly_orthogonal(rank_pool: Pools, checkpoint: Callable[..., Path]) -> None:
    """The iteration leaves singular values of about one, up to 1.2 or so; those of no gradient stay small."""
    model = ModelConfig(path=str(checkpoint(tied=False)), dtype="float32")
    (updates,) = rank_pool(1).run(first_updates, actor_config(LayoutConfig()), model, ROWS)
    whole = ("linear_fc2.weight", "linear_proj.weight")
    matrices = [update for name, update in updates.items() if name.endswith(whole)]
    assert len(matrices) == 4
    for update in matrices:
        values = torch.linalg.svdvals(update / (LR * SCALE * max(update.shape) ** 0.5))
        assert 0.6 < values.max() < 1.3
        assert values.median() > 0.5
    # Adam's first step is lr in every number with a gradient.
    norm = updates["decoder.final_layernorm.weight"]
    torch.testing.assert_close(norm.abs(), torch.full_like(norm, LR), rtol=1e-3, atol=0)


def test_only_matrices_of_layers_are_muons(rank_pool: Pools, checkpoint: Callable[..., Path]) -> None:
    """Not a critic's head, which has one row, nor the embedding."""
    model = ModelConfig(path=str(checkpoint(tied=False)), dtype="float32")
    (shapes,) = rank_pool(1).run(shapes_of_critic, actor_config(LayoutConfig()), model)
    muons, adams = shapes
    hidden = next(shape[0] for shape in adams if len(shape) == 1)
    assert {len(shape) for shape in muons} == {2}
    assert (1, hidden) in adams
    assert (1, hidden) not in muons
    assert [shape for shape in adams if len(shape) == 2 and shape[0] > hidden] != []
