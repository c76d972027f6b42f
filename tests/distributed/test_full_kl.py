"""KL over a vocabulary in shards, and of paired rows through the worker, against dense distributions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megarl.config.schema import ActorConfig, HeadConfig, LayoutConfig, ModelConfig
from megarl.types import Row
from tests.helpers import rank_parts, ranks
from tests.helpers.checkpoints import VOCAB_SIZE, load_hf
from tests.helpers.compare import assert_within
from tests.helpers.rank_pool import RankPool
from tests.helpers.replays import merge
from tests.helpers.rows import random_rows

GetPool = Callable[[int], RankPool]
GetCheckpoint = Callable[..., Path]

# --- two shards of a vocabulary of 11, in float64 where nothing else is said


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense_kl(hidden: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """[N] Σ p (log p − log q)."""
    p, q = ((h.double() @ weight.double().t() / temperature).log_softmax(-1) for h in (hidden, other))
    return F.kl_div(q, p, log_target=True, reduction="none").sum(-1)


def assert_kl_is_exact(
    pool: RankPool,
    hidden: torch.Tensor,
    other: torch.Tensor,
    weight: torch.Tensor,
    *,
    rows_per_rank: int = 8,
    chunk_tokens: int = 3,
    atol: float = 1e-12,
) -> None:
    # Padding that would matter if it were read.
    padding = randn(2 * rows_per_rank - len(weight), weight.shape[1], seed=9).to(weight.dtype)
    arguments = (hidden, other, torch.cat([weight, padding]), len(weight))
    first, second = pool.run(rank_parts.full_kl, *arguments, temperature=0.5, chunk_tokens=chunk_tokens)
    assert torch.equal(first, second)
    assert_within("KL", first, dense_kl(hidden, other, weight, 0.5), atol=atol)


@pytest.mark.parametrize("num_rows", [0, 1, 7])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7])
def test_two_shards(rank_pool: GetPool, num_rows: int, chunk_tokens: int) -> None:
    hidden, other = randn(num_rows, 6, seed=0), randn(num_rows, 6, seed=1)
    assert_kl_is_exact(rank_pool(2), hidden, other, randn(11, 6, seed=2), chunk_tokens=chunk_tokens)


def test_a_shard_of_padding_alone(rank_pool: GetPool) -> None:
    hidden, other = randn(7, 6, seed=0), randn(7, 6, seed=1)
    assert_kl_is_exact(rank_pool(2), hidden, other, randn(11, 6, seed=2), rows_per_rank=16)


def test_float32(rank_pool: GetPool) -> None:
    hidden, other, weight = (randn(*shape, seed=i).float() for i, shape in enumerate([(7, 6), (7, 6), (11, 6)]))
    assert_kl_is_exact(rank_pool(2), hidden, other, weight, atol=1e-5)


@pytest.mark.parametrize("shard", [0, 1])
def test_all_mass_on_one_shard(rank_pool: GetPool, shard: int) -> None:
    """The logits of one shard are near −2000 in both distributions: its exponentials underflow in any format."""
    hidden, other, weight = randn(7, 6, seed=0), randn(7, 6, seed=1), randn(11, 6, seed=2)
    hidden[:, 0] = other[:, 0] = 1.0
    weight[:, 0] = 0.0
    weight[slice(8, 11) if shard == 0 else slice(0, 8), 0] = -1000.0
    assert_kl_is_exact(rank_pool(2), hidden, other, weight, atol=1e-9)


def test_disjoint_distributions(rank_pool: GetPool) -> None:
    """All mass of one on the first shard and of the other on the second: the KL is the gap between the logits."""
    weight = torch.zeros(11, 2, dtype=torch.float64)
    weight[0, 0], weight[10, 1] = 100.0, 100.0
    hidden, other = torch.eye(2, dtype=torch.float64)[[0, 1]], torch.eye(2, dtype=torch.float64)[[1, 0]]
    first, _ = rank_pool(2).run(
        rank_parts.full_kl, hidden, other, F.pad(weight, (0, 0, 0, 5)), 11, temperature=0.5, chunk_tokens=3
    )
    assert_within("KL", first, torch.full((2,), 200.0), atol=1e-9)


# --- rows and their twins with other prompts

TOLERANCE = 1e-5
TEMPERATURE = 0.7
# (prompt, response) tokens, and how many tokens the twin's prompt has more.
LENGTHS = [(9, 6), (1, 1), (1, 20), (4, 1), (3, 2), (17, 8), (2, 3)]
HINT_TOKENS = [5, 1, 0, 12, 2, 7, 3]
WITHOUT_LABELS = 6
PAIRS = [[[0, 3, 1], [6], [5, 2, 4]]]
LAYOUTS = {
    "tp1": LayoutConfig(),
    "tp2": LayoutConfig(tp=2),
    "tp2-sp": LayoutConfig(tp=2, sequence_parallel=True),
    "pp2": LayoutConfig(pp=2),
    "cp2": LayoutConfig(cp=2),
    "tp2-sp cp2": LayoutConfig(tp=2, sequence_parallel=True, cp=2),
    "tp2-sp pp2": LayoutConfig(tp=2, sequence_parallel=True, pp=2),
}


def pairs_of_rows() -> list[Row]:
    """Rows, then in the same order their twins: same response, a longer prompt. One row is its own twin, and one has
    no loss tokens."""
    rows, rng = random_rows(LENGTHS), np.random.default_rng(4)
    blind = rows[WITHOUT_LABELS]
    rows[WITHOUT_LABELS] = replace(blind, loss_mask=np.zeros_like(blind.loss_mask))
    twins = [
        replace(
            row,
            token_ids=np.insert(row.token_ids, 1, rng.integers(0, VOCAB_SIZE, num_tokens)),
            num_prompt_tokens=row.num_prompt_tokens + num_tokens,
        )
        for row, num_tokens in zip(rows, HINT_TOKENS, strict=True)
    ]
    return [*rows, *twins]


@torch.no_grad()
def dense_logprobs(path: Path, rows: Sequence[Row]) -> list[np.ndarray]:
    """[R] log-probs of the responses in transformers, 0 outside the loss mask."""
    model, found = load_hf(path), []
    for row in rows:
        ids = torch.from_numpy(row.token_ids)
        log_p = (model(ids[None]).logits[0, row.num_prompt_tokens - 1 : -1].double() / TEMPERATURE).log_softmax(-1)
        found.append(np.where(row.loss_mask, log_p.gather(1, ids[row.num_prompt_tokens :, None])[:, 0].numpy(), 0))
    return found


@torch.no_grad()
def dense_pairs(path: Path, rows: Sequence[Row]) -> list[np.ndarray]:
    """[R] KL(twin ‖ row) of transformers' distributions, in float64 and 0 outside the loss mask."""
    model, half = load_hf(path), len(rows) // 2

    def log_p(row: Row) -> torch.Tensor:
        logits = model(torch.from_numpy(row.token_ids)[None]).logits[0, row.num_prompt_tokens - 1 : -1]
        return (logits.double() / TEMPERATURE).log_softmax(-1)

    divergences = [
        F.kl_div(log_p(row), log_p(twin), log_target=True, reduction="none").sum(-1).numpy()
        for row, twin in zip(rows[:half], rows[half:], strict=True)
    ]
    return [np.where(row.loss_mask, kl, 0) for row, kl in zip(rows, divergences, strict=False)]


def with_twins(plan: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
    return [[[*indices, *(len(LENGTHS) + i for i in indices)] for indices in batches] for batches in plan]


def assert_pairs(pool: RankPool, path: Path, layout: LayoutConfig, plan: Sequence[Sequence[Sequence[int]]]) -> None:
    rows = pairs_of_rows()
    actor = ActorConfig(layout=layout, head=HeadConfig(chunk_tokens=7))
    model = ModelConfig(path=str(path), dtype="float32")
    results = pool.run(ranks.forward_pairs, actor, model, rows, with_twins(plan), temperature=TEMPERATURE)
    reported = [result for result in results if result is not None]
    assert len(reported) == layout.dp
    assert all(set(result.quantities) == {"logprobs", "entropy", "kl"} for result in reported)
    logprobs = merge([result.quantities["logprobs"] for result in reported], len(rows))
    for values, dense in zip(logprobs, dense_logprobs(path, rows), strict=True):
        assert_within("log-probs", values, dense, atol=TOLERANCE)
    got, expected = merge([result.quantities["kl"] for result in reported], len(rows)), dense_pairs(path, rows)
    for kl, dense in zip(got, expected, strict=False):
        assert_within("KL", kl, dense, atol=TOLERANCE)
    # Twins answer nothing.
    assert not np.concatenate(got[len(LENGTHS) :]).any()
    # Far from equal, so that equality means something.
    assert np.median(np.concatenate(expected)[np.concatenate([r.loss_mask for r in rows[: len(LENGTHS)]])]) > 0.01


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if LAYOUTS[n].world_size > 2 else ()) for n in LAYOUTS]
)
def test_paired_rows(rank_pool: GetPool, checkpoint: GetCheckpoint, name: str) -> None:
    layout = LAYOUTS[name]
    assert_pairs(rank_pool(layout.world_size), checkpoint(tied=False), layout, PAIRS)


def test_tied_embeddings(rank_pool: GetPool, checkpoint: GetCheckpoint) -> None:
    layout = LAYOUTS["tp2-sp"]
    assert_pairs(rank_pool(2), checkpoint(tied=True), layout, PAIRS)


def test_a_rank_without_pairs(rank_pool: GetPool, checkpoint: GetCheckpoint) -> None:
    nothing: list[list[int]] = [[], [], []]
    assert_pairs(rank_pool(2), checkpoint(tied=False), LayoutConfig(dp=2), [nothing, *PAIRS])
