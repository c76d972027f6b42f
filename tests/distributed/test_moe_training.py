"""The balance loss, metrics of load, replayed routing and frozen routers, against transformers and by hand."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, MoeConfig
from megarl.types import Row
from tests.helpers import ranks
from tests.helpers.family_parity import (
    Reference,
    assert_equals_transformers,
    make_rows,
    run_ranks,
    run_transformers,
)
from tests.helpers.hf_models import make_model
from tests.helpers.measure import Measured
from tests.helpers.rank_pool import RankPool
from tests.helpers.routers import Routers

NUM_LAYERS, NUM_EXPERTS, PER_TOKEN = 5, 6, 2
COEF = 0.7
# Of the last, the first pipeline stage has no experts at all.
DENSE_LAYERS = {"mixed": [1], "dense-stage": [0, 1, 2]}
MODELS: dict[str, dict[str, Any]] = {
    name: {"norm_topk_prob": name != "mixed", "mlp_only_layers": DENSE_LAYERS.get(name, [])}
    for name in ("normalized", "mixed", "dense-stage")
}
LAYOUTS = {
    "tp1": LayoutConfig(),
    "ep2": LayoutConfig(dp=2, ep=2),
    "tp2-sp ep2": LayoutConfig(tp=2, sequence_parallel=True, ep=2),
    "tp2-sp": LayoutConfig(tp=2, sequence_parallel=True),
    "pp2": LayoutConfig(pp=2, first_stage_layers=3),
    "tp2-sp pp2 dp2 ep2": LayoutConfig(tp=2, sequence_parallel=True, pp=2, first_stage_layers=3, dp=2, ep=2),
}

GetPool = Callable[[int], RankPool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What transformers makes of the rows, and what its routers did."""

    reference: Reference
    routers: Routers


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(
        lambda name: make_model(tmp_path_factory.mktemp(name), "qwen3_moe", tied=False, **MODELS[name])
    )


@pytest.fixture(scope="module")
def watched(path: Callable[[str], Path]) -> Callable[[str], Watched]:
    @functools.cache
    def get(name: str) -> Watched:
        routers = Routers(coef=COEF)
        return Watched(reference=run_transformers(path(name), routers), routers=routers)

    return get


def other_experts() -> list[np.ndarray]:
    """By row, [tokens, layers, k]: any two experts for two tokens in three, and nothing for the others."""
    rng = np.random.default_rng(5)
    forced = []
    for row in make_rows():
        ranked = rng.random((row.num_tokens, NUM_LAYERS, NUM_EXPERTS)).argsort(-1).astype(np.int16)
        experts = ranked[..., :PER_TOKEN].copy()
        experts[2::3] = -1
        forced.append(experts)
    return forced


def with_experts(rows: Sequence[Row], experts: Sequence[np.ndarray]) -> list[Row]:
    return [replace(row, routed_experts=each) for row, each in zip(rows, experts, strict=True)]


def assert_metrics(measured: Sequence[Measured], routers: Routers) -> None:
    """Every rank that reports says the same of all rows."""
    expected = routers.metrics()
    assert expected["moe/load_max_over_mean"] > 1.05
    reported = [each.metrics for each in measured if each.metrics]
    assert reported
    for metrics in reported:
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "layout", "recompute"),
    [
        pytest.param("normalized", "tp1", "none", marks=pytest.mark.long),
        ("normalized", "ep2", "full"),
        pytest.param("normalized", "tp2-sp ep2", "full", marks=pytest.mark.long),
        pytest.param("normalized", "tp2-sp", "none", marks=pytest.mark.long),
        pytest.param("normalized", "pp2", "none", marks=pytest.mark.long),
        ("dense-stage", "pp2", "none"),
        ("mixed", "tp2-sp ep2", "none"),
        pytest.param("mixed", "tp2-sp pp2 dp2 ep2", "full", marks=pytest.mark.long),
    ],
)
def test_balance_loss_and_metrics(
    rank_pool: GetPool, watched: Callable[[str], Watched], tmp_path: Path, name: str, layout: str, recompute: str
) -> None:
    """Gradients of loss and balance loss, whatever the micro-batches; counts are exact."""
    expected = watched(name)
    measured = assert_equals_transformers(
        rank_pool(LAYOUTS[layout].world_size),
        expected.reference,
        LAYOUTS[layout],
        tmp_path,
        moe=MoeConfig(aux_loss_coef=COEF),
        recompute=recompute,
    )
    assert_metrics(measured, expected.routers)


def test_ranks_reduce_their_counts_once_a_step(
    rank_pool: GetPool, path: Callable[[str], Path], watched: Callable[[str], Watched], tmp_path: Path
) -> None:
    """Not in every layer and micro-batch, if no loss needs them there; the metrics stay."""
    layout = LAYOUTS["tp2-sp"]
    found = run_ranks(
        rank_pool(layout.world_size), path("normalized"), layout, tmp_path, make_rows(), MoeConfig(), "none"
    )
    assert [measured.num_reductions for measured in found] == [1, 1]
    assert_metrics(found, watched("normalized").routers)


def test_balance_loss_is_seen(path: Callable[[str], Path], watched: Callable[[str], Watched]) -> None:
    """The comparison above would fail without it: it is much of the routers' gradients."""
    without = run_transformers(path("normalized")).gradients
    key = "model.layers.2.mlp.gate.weight"
    difference = (watched("normalized").reference.gradients[key] - without[key]).abs().max()
    assert difference > 0.1 * without[key].abs().max()


@pytest.mark.parametrize(
    "layout", ["ep2", *(pytest.param(layout, marks=pytest.mark.long) for layout in ("tp1", "tp2-sp ep2", "pp2"))]
)
def test_forced_experts_equal_a_dense_computation(
    rank_pool: GetPool, path: Callable[[str], Path], watched: Callable[[str], Watched], tmp_path: Path, layout: str
) -> None:
    """Log-probs, and gradients through the probabilities of forced experts, balance loss included."""
    forced = other_experts()
    routers = Routers(coef=COEF, forced=forced)
    expected = run_transformers(path("normalized"), routers)
    changed = np.abs(np.concatenate(expected.logprobs) - np.concatenate(watched("normalized").reference.logprobs))
    assert changed.max() > 0.1
    measured = assert_equals_transformers(
        rank_pool(LAYOUTS[layout].world_size),
        expected,
        LAYOUTS[layout],
        tmp_path,
        rows=with_experts(make_rows(), forced),
        moe=MoeConfig(aux_loss_coef=COEF, replay_routing=True),
        recompute="full" if layout == "ep2" else "none",
    )
    assert_metrics(measured, routers)


def score(pool: RankPool, path: Path, rows: Sequence[Row], *, replay_routing: bool, cp: int = 1) -> list[np.ndarray]:
    actor = ActorConfig(layout=LayoutConfig(cp=cp), moe=MoeConfig(replay_routing=replay_routing))
    model = ModelConfig(path=str(path), dtype="float32", vocab_multiple=4)
    batches = [[i, i + 1] for i in range(0, len(rows), 2)]
    result = pool.run(ranks.forward_actor, actor, model, rows, batches, temperature=1.0)[0]
    return [result.quantities["logprobs"][i] for i in range(len(rows))]


@pytest.mark.parametrize("cp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_routers_own_experts_change_nothing(
    rank_pool: GetPool, path: Callable[[str], Path], watched: Callable[[str], Watched], cp: int
) -> None:
    """Also where nothing is forced, and where the setting is off; equal bits."""
    rows, routers = make_rows(), watched("mixed").routers
    own = []
    for i, row in enumerate(rows):
        experts = np.full((row.num_tokens, NUM_LAYERS, PER_TOKEN), -1, dtype=np.int16)
        for layer, indices in routers.experts[i].items():
            experts[:, layer] = indices.numpy()
        own.append(experts)
    pool, directory = rank_pool(cp), path("mixed")
    free = score(pool, directory, rows, replay_routing=False, cp=cp)
    nothing = [np.full_like(each, -1) for each in own]
    for experts in (own, nothing):
        for got, expected in zip(
            score(pool, directory, with_experts(rows, experts), replay_routing=True, cp=cp), free, strict=True
        ):
            assert np.array_equal(got, expected)
    others = with_experts(rows, other_experts())
    assert all(map(np.array_equal, score(pool, directory, others, replay_routing=False, cp=cp), free))
    forced = score(pool, directory, others, replay_routing=True, cp=cp)
    assert max(np.abs(a - b).max() for a, b in zip(forced, free, strict=True)) > 0.1
