"""Trees of conversations whose shared prefixes are computed once, against transformers on every row by itself."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, MoeConfig, OptimizerConfig
from megarl.data.hints import HintedPrompt, hinted_rows
from megarl.types import ExpertArray, Row
from megarl.types.forks import Fork
from megarl.types.prefixes import counted_once, held_prefixes
from tests.distributed.test_adapters import LR, assert_equals_merged, case_of, merged, write_adapters
from tests.helpers.adapter_ranks import run_adapters
from tests.helpers.compare import assert_within
from tests.helpers.family_parity import (
    assert_equals_transformers,
    assert_gradients,
    assert_rows,
    run_ranks,
    run_transformers,
    split_rows,
)
from tests.helpers.forests import forest_errors, outputs_apart, pairs_and_hints_apart, random_tree
from tests.helpers.hf_models import VOCAB_SIZE, make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.requests import update_request, with_advantages
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
def test_two_hundred_trees_equal_rows_apart(rank_pool: GetPool, tmp_path: Path) -> None:
    """Up to six nodes deep, with up to 64 leaves, each in one micro-batch."""
    path = make_model(tmp_path / "model", "qwen3", tied=False)
    trees = [random_tree(seed) for seed in range(200)]
    assert {len(tree) for tree in trees} >= {1, 2, 3, 4}
    assert max(len(tree) for tree in trees) > 60
    assert_trees(rank_pool(1), path, actor_of(LayoutConfig()), trees, whole=True)


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


def conversation(seed: int) -> Row:
    """Three branches and a root of given tokens, of which some have no labels; no experts of each third token."""
    rng = np.random.default_rng(seed)
    starts = np.sort(rng.choice(np.arange(9, 36, 3), 4, replace=False))
    root = rng.integers(4)
    forks = tuple(Fork(start, -1 if i == root else int(rng.integers(start - 1))) for i, start in enumerate(starts))
    mask = rng.random(35) < 0.6
    mask[starts[root] - 5] = False
    experts = rng.random((40, NUM_LAYERS, NUM_EXPERTS)).argsort(-1).astype(np.int16)[..., :PER_TOKEN]
    experts[seed::3] = -1
    return Row(
        uid=f"c{seed}",
        sample_index=0,
        token_ids=rng.integers(0, VOCAB_SIZE, 40).astype(np.int32),
        num_prompt_tokens=5,
        loss_mask=mask,
        forks=forks,
        routed_experts=experts,
    )


def paths_apart(row: Row) -> list[tuple[Row, list[int]]]:
    """Each branch of a row behind what stands before it, as a row without forks, and the tokens of the row in it."""
    assert row.routed_experts is not None
    before = {fork.start: fork.after for fork in row.forks}
    ends = [start - 1 for start in before] + [row.num_tokens - 1]
    found = []
    for end in ends:
        path, token = list[int](), end
        while token >= 0:
            path.insert(0, token)
            token = before.get(token, token - 1)
        begin = max([0, *(start for start in before if start <= end)])
        labels = np.array([token >= begin and token >= 5 and bool(row.loss_mask[token - 5]) for token in path[1:]])
        alone = Row(
            uid=row.uid,
            sample_index=len(found),
            token_ids=row.token_ids[path],
            num_prompt_tokens=1,
            loss_mask=labels,
            routed_experts=row.routed_experts[path],
        )
        found.append((alone, path))
    return found


@pytest.mark.parametrize(
    ("layout", "num_rows"),
    [
        ("tp2-sp ep2", 2),
        *(pytest.param(name, 4, marks=pytest.mark.long) for name in ("tp2-sp ep2", "pp2 ep2", "tp2-sp pp2 ep2")),
    ],
)
def test_recorded_experts_of_conversations_are_replayed_on_every_path(
    rank_pool: GetPool, tmp_path: Path, layout: str, num_rows: int
) -> None:
    rows = [conversation(seed) for seed in range(num_rows)]
    apart = [paths_apart(row) for row in rows]
    paths = [row for each in apart for row, _ in each]
    routers = Routers(forced=[row.routed_experts for row in paths if row.routed_experts is not None])
    expected = run_transformers(make_model(tmp_path / "model", "qwen3_moe", tied=False), routers, rows=paths)
    free = run_transformers(tmp_path / "model", rows=paths)
    assert np.abs(np.concatenate(expected.logprobs) - np.concatenate(free.logprobs)).max() > 0.1
    wanted, logprobs = [np.zeros(35, np.float32) for _ in rows], iter(expected.logprobs)
    for own, each in zip(wanted, apart, strict=True):
        for row, path in each:
            own[np.array(path[1:])[row.loss_mask] - 5] = next(logprobs)[row.loss_mask]
    chosen = WITH_EXPERTS[layout]
    pool, moe = rank_pool(chosen.world_size), MoeConfig(replay_routing=True)
    measured = run_ranks(pool, expected.path, chosen, tmp_path, rows, moe, "none")
    assert_rows("log-probs", [each.logprobs for each in measured], wanted)
    assert_gradients(tmp_path / "gradients/model.safetensors", expected.gradients)


@pytest.mark.long
def test_adapters_of_trees_equal_merged_weights(rank_pool: GetPool, tmp_path: Path) -> None:
    rows, path = with_advantages(forest()), make_model(tmp_path / "model", "qwen2", tied=True)
    expected = merged(path, tmp_path / "adapters", write_adapters(tmp_path / "adapters", path), rows)
    case = replace(case_of(expected, TP2), rows=rows, micro_batches=split_rows(len(rows), 1))
    outcomes = rank_pool(2).run(run_adapters, replace(case, request=update_request(rows, lr=LR)))
    assert_equals_merged(outcomes, expected)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v2-lite"])
def test_values_and_hinted_pairs_equal_those_of_rows_apart(rank_pool: GetPool, tmp_path: Path, name: str) -> None:
    """A critic's values, and the KL to the same tokens behind a hint that begins within the prompt."""
    rows = forest()
    hints = [np.append(row.token_ids[: row.num_prompt_tokens], [7, 8, 9]).astype(np.int32) for row in rows]
    hinted = [
        replace(
            row,
            token_ids=np.append(hint, row.token_ids[row.num_prompt_tokens :]),
            num_prompt_tokens=len(hint),
        )
        for row, hint in zip(rows, hints, strict=True)
    ]
    path = make_model(tmp_path / "model", name, tied=False)
    model = ModelConfig(path=str(path), dtype="float32", vocab_multiple=4)
    values, values_apart, pairs, pairs_apart = rank_pool(2).run(outputs_apart, model, actor_of(TP2), rows, hinted)[0]
    assert pairs.keys() == {"logprobs", "entropy", "kl"}
    for got, expected in ((values, values_apart), (pairs, pairs_apart)):
        for quantity, by_row in expected.items():
            merged_got, wanted = (np.concatenate([each[i] for i in sorted(by_row)]) for each in (got[quantity], by_row))
            assert_within(quantity, merged_got, wanted, atol=1e-5)
            assert np.abs(wanted).max() > 0.1


def forked_rows() -> list[Row]:
    """Four conversations whose branches leave a turn of the policy, the prompt, and nothing at all."""
    rng, rows = np.random.default_rng(5), []
    # Prompt; then by turns what the policy wrote and what it read, from the branches' starts on.
    mask = np.repeat([True, False, True, False, True, False, True], [4, 2, 3, 1, 3, 2, 3])
    for i in range(4):
        ref = rng.normal(-5.5, 0.3, len(mask)).astype(np.float32)
        row = Row(
            uid=f"p{i % 2}",
            sample_index=i,
            token_ids=rng.integers(0, VOCAB_SIZE, 6 + len(mask)).astype(np.int32),
            num_prompt_tokens=6,
            loss_mask=mask,
            forks=(Fork(10, 7), Fork(15, 3), Fork(19, -1)),
        )
        rows.append(row.with_quantities(ref_logprobs=ref))
    return rows


@pytest.mark.parametrize(
    "layout", ["tp2-sp", pytest.param("pp2", marks=pytest.mark.long), pytest.param("cp2", marks=pytest.mark.long)]
)
def test_conversations_that_fork_train_as_pairs_and_behind_hints(
    rank_pool: GetPool, tmp_path: Path, layout: str
) -> None:
    """The hint stands at the end of the prompt, so only branches from there on read it."""
    rows = forked_rows()
    hints = {row.uid: HintedPrompt(token_ids=np.append(row.token_ids[:6], [7, 8, 9]).astype(np.int32)) for row in rows}
    # Both rows of a prompt have the first one's tokens before their responses.
    rows = [
        replace(row, token_ids=np.append(hints[row.uid].token_ids[:6], row.token_ids[6:]).astype(np.int32))
        for row in rows
    ]
    hinted = hinted_rows(rows, hints).rows
    assert {row.forks for row in hinted} == {(Fork(13, 10), Fork(18, 3), Fork(22, -1))}
    path = make_model(tmp_path / "model", "qwen3", tied=False)
    model, actor = ModelConfig(path=str(path), dtype="float32", vocab_multiple=4), actor_of(LAYOUTS[layout])
    found = rank_pool(actor.layout.world_size).run(pairs_and_hints_apart, model, actor, rows, hinted, 0.5)
    loss, gradients, logprobs, kls = np.array(found).max(0).tolist()
    print(f"DPO: loss {loss:.1e}, gradients {gradients:.1e}; log-probs {logprobs:.1e}, KLs {kls:.1e}")
    assert max(loss, gradients, logprobs, kls) <= 1e-5
