"""Stages of uneven chunks, whose micro-batches differ in length, have the gradients of a single rank."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from tests.helpers.family_parity import make_rows
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.recompute_ranks import backward_of


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
