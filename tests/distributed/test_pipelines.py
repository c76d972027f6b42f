"""Stages of uneven chunks, whose micro-batches differ in length, have the gradients of a single rank."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.weights.shards import stage_layers
from tests.helpers.family_parity import make_rows
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.recompute_ranks import backward_of


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
def test_two_chunks_on_each_of_four_stages(rank_pool: Callable[[int], RankPool], tmp_path: Path, overlap: bool) -> None:
    path = make_model(tmp_path, "qwen3", tied=False, num_hidden_layers=9)
    model, rows = ModelConfig(path=str(path), dtype="float32", vocab_multiple=4), make_rows()
    batches = [[i] for i in range(8)]
    assert len({rows[i].num_tokens for i in range(4)}) == 4
    layout = LayoutConfig(pp=4, virtual_pp=2, overlap_p2p=overlap, pipeline_layout="Et|t|t|t|tt|t|t|tL")
    (expected,) = rank_pool(1).run(backward_of, ActorConfig(), model, rows, batches)
    seen = set[str]()
    for stage, got in enumerate(rank_pool(4).run(backward_of, ActorConfig(layout=layout), model, rows, batches)):
        layers = stage_layers(layout, 9, stage)
        for name, gradient in got.gradients.items():
            chunk, *parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(layers[int(parts[2]) + (int(chunk) and layout.chunk_layers(9)[0][stage])])
            whole = ".".join(["0", *parts])
            seen.add(whole)
            error, largest = (gradient - expected.gradients[whole]).abs().max(), expected.gradients[whole].abs().max()
            assert error <= 1e-6 * largest, name
    assert seen == expected.gradients.keys()


@pytest.mark.parametrize("overlap", [False, True])
def test_what_stages_sent_on_is_freed_and_changes_no_bit(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, overlap: bool
) -> None:
    """What is still on its way must stay: freed, it reached the next stage changed."""
    path = make_model(tmp_path, "qwen3", tied=False, num_hidden_layers=4)
    model, rows = ModelConfig(path=str(path), dtype="float32", vocab_multiple=4), make_rows()
    layout, run = LayoutConfig(pp=2, virtual_pp=1 + overlap, overlap_p2p=overlap), rank_pool(2).run
    freed, kept = (
        run(backward_of, ActorConfig(layout=layout), model, rows, [[i] for i in range(4)], keeps)
        for keeps in (False, True)
    )
    for one, other in zip(freed, kept, strict=True):
        assert one.gradients.keys() == other.gradients.keys()
        assert all(torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items())
    assert (max(freed[0].left) == 1) is not overlap
    assert min(kept[0].left) > 1
