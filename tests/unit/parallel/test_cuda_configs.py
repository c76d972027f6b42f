"""Megatron's configuration of every family as GPUs get it, which Megatron itself checks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.schema import LayoutConfig
from tests.helpers.cuda_configs import RECOMPUTES, rope_fusions
from tests.helpers.hf_models import MODELS, WITH_EXPERTS, make_model
from tests.helpers.rank_pool import RankPool

LAYOUTS = [
    LayoutConfig(),
    LayoutConfig(tp=2, dp=2, sequence_parallel=True),
    LayoutConfig(pp=2, first_stage_layers=3),
    LayoutConfig(cp=2),
]


@pytest.mark.parametrize("name", MODELS)
def test_megatron_accepts_every_family(rank_pool: Callable[[int], RankPool], tmp_path: Path, name: str) -> None:
    """It refuses fused rotary embeddings of latent attention, except with YaRN, where it calls them experimental."""
    path = make_model(tmp_path / "model", name, tied=False)
    layouts = [*LAYOUTS, LayoutConfig(tp=2, ep=2, sequence_parallel=True)] if name in WITH_EXPERTS else LAYOUTS
    (fused,) = rank_pool(1).run(rope_fusions, str(path), layouts)
    assert fused == [not name.startswith("deepseek")] * len(layouts) * len(RECOMPUTES)
