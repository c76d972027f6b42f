"""Trees of conversations whose shared prefixes are computed once, against transformers on every row by itself."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, MoeConfig, OptimizerConfig
from megarl.types import ExpertArray, Row
from megarl.types.prefixes import counted_once, held_prefixes
from tests.helpers.family_parity import (
    assert_equals_transformers,
    run_transformers,
)
from tests.helpers.forests import forest_errors, random_tree
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.routers import Routers

GetPool = Callable[[int], RankPool]
Recompute = Literal["none", "selective", "full"]
NUM_LAYERS, NUM_EXPERTS, PER_TOKEN = 5, 6, 2
TP2 = LayoutConfig(tp=2, sequence_parallel=True)
LAYOUTS = {
    "tp2-sp": TP2,
    "tp2": LayoutConfig(tp=2),
    "pp2": LayoutConfig(pp=2, first_stage_layers=3),
    "tp2-sp pp2": replace(TP2, pp=2, first_stage_layers=3),
    "pp2-vpp2": LayoutConfig(pp=2, virtual_pp=2, overlap_p2p=True, pipeline_layout="Et|tt|t|tL"),
    "dp2": LayoutConfig(dp=2),
    # Shares nothing.
    "cp2": LayoutConfig(cp=2),
}
WITH_EXPERTS = {
    "tp2-sp ep2": replace(TP2, ep=2),
    "dp2 ep2": LayoutConfig(dp=2, ep=2),
    "pp2 ep2": LayoutConfig(pp=2, first_stage_layers=3, dp=2, ep=2),
    "tp2-sp pp2 ep2": replace(TP2, pp=2, first_stage_layers=3, ep=2),
}


def actor_of(layout: LayoutConfig) -> ActorConfig:
    return ActorConfig(layout=layout, optimizer=OptimizerConfig(distributed=False, clip_grad_norm=1e9))


def assert_trees(pool: RankPool, path: Path, actor: ActorConfig, trees: list[list[Row]], *, whole: bool) -> None:
    model = ModelConfig(path=str(path), dtype="float32", vocab_multiple=4)
    found = pool.run(forest_errors, model, actor, trees, whole=whole)
    worst = np.array(found).max((0, 1))
    print(f"{len(trees)} trees: relative errors of loss and gradients up to {worst[0]:.1e} and {worst[1]:.1e}")
    assert worst.max() <= 1e-5


def forest(*seeds: int) -> list[Row]:
    """Rows of trees deep and wide enough for parts that begin behind many tokens, in one mini-batch."""
    rows = [row for seed in seeds or (1, 4, 10) for row in random_tree(seed, max_leaves=12)]
    held = held_prefixes(rows)
    assert max(count for _, count in held) > 32
    return rows


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "tp2-sp" else pytest.mark.long) for name in LAYOUTS]
)
def test_trees_equal_rows_apart(rank_pool: GetPool, tmp_path: Path, layout: str) -> None:
    """The branches of a tree lie in two micro-batches of each replica, which repeat what they need."""
    path = make_model(tmp_path / "model", "qwen3", tied=False)
    actor = actor_of(LAYOUTS[layout])
    trees = [random_tree(seed, max_leaves=12) for seed in (0, 2, 3)]
    assert_trees(rank_pool(actor.layout.world_size), path, actor, trees, whole=False)


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "name", ["qwen3_5", "gemma2", "gemma3", "qwen3-windows", "deepseek_v2-lite", "deepseek_v3-yarn", "gpt_oss"]
)
def test_trees_of_families(rank_pool: GetPool, tmp_path: Path, name: str, recompute: Recompute) -> None:
    """Delta nets, capped scores, two kinds of rope, windows, latents with and without YaRN, sinks."""
    rows = forest()
    expected = run_transformers(make_model(tmp_path / "model", name, tied=False), rows=rows)
    assert_equals_transformers(rank_pool(2), expected, TP2, tmp_path, rows=rows, recompute=recompute)


def with_experts_by_node(rows: Sequence[Row]) -> list[Row]:
    """Any two experts for two tokens in three, and nothing recorded for the others; the same in all rows of a node."""
    rng, by_path = np.random.default_rng(5), dict[bytes, ExpertArray]()
    recorded = []
    for row in rows:
        experts = []
        for end in range(1, row.num_tokens + 1):
            drawn = rng.random((NUM_LAYERS, NUM_EXPERTS)).argsort(-1).astype(np.int16)[:, :PER_TOKEN]
            drawn[:] = drawn if end % 3 else -1
            experts.append(by_path.setdefault(row.token_ids[:end].tobytes(), drawn))
        recorded.append(replace(row, routed_experts=np.array(experts)))
    return recorded


@pytest.mark.parametrize(
    ("layout", "replays", "seeds"),
    [
        # A tree of eight rows.
        ("tp2-sp ep2", True, (0,)),
        pytest.param("tp2-sp ep2", True, (), marks=pytest.mark.long),
        pytest.param("dp2 ep2", True, (), marks=pytest.mark.long),
        pytest.param("pp2 ep2", True, (), marks=pytest.mark.long),
        pytest.param("tp2-sp ep2", False, (), marks=pytest.mark.long),
    ],
)
def test_each_token_is_routed_and_counted_once(
    rank_pool: GetPool, tmp_path: Path, layout: str, replays: bool, seeds: tuple[int, ...]
) -> None:
    """Experts as recorded or by the router, and the balance loss over the tokens that count, with its gradients."""
    rows = counted_once(with_experts_by_node(forest(*seeds)) if replays else forest(*seeds))
    assert sum(row.num_uncounted for row in rows) > sum(row.num_tokens for row in rows) // 3
    routers = Routers(
        coef=0.1,
        forced=[row.routed_experts for row in rows if row.routed_experts is not None] or None,
        uncounted=[row.num_uncounted for row in rows],
    )
    expected = run_transformers(make_model(tmp_path / "model", "qwen3_moe", tied=False), routers, rows=rows)
    measured = assert_equals_transformers(
        rank_pool(WITH_EXPERTS[layout].world_size),
        expected,
        WITH_EXPERTS[layout],
        tmp_path,
        rows=rows,
        moe=MoeConfig(aux_loss_coef=0.1, replay_routing=replays),
    )
    reported = [each.metrics for each in measured if each.metrics]
    assert reported
    for name, value in routers.metrics().items():
        assert [metrics[name] for metrics in reported] == pytest.approx([value] * len(reported), rel=1e-5)
