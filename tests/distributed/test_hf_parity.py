"""Logits, log-probs and entropies equal transformers' Qwen3, sequence by sequence."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.config.schema import ActorConfig, HeadConfig, LayoutConfig, ModelConfig
from megarl.types import Row
from tests.helpers import ranks
from tests.helpers.checkpoints import VOCAB_SIZE, load_hf
from tests.helpers.compare import assert_within
from tests.helpers.rank_pool import RankPool
from tests.helpers.rows import random_rows

LAYOUTS = [
    LayoutConfig(tp=1),
    LayoutConfig(tp=2),
    LayoutConfig(tp=2, sequence_parallel=True),
]
LAYOUT_IDS = ["tp1", "tp2", "tp2-sp"]
# (prompt, response) tokens: one-token prompts and responses, equal neighbours, 73 tokens in all.
LENGTHS = [(9, 6), (1, 1), (1, 20), (4, 1), (3, 2), (17, 8)]
TOLERANCE = 1e-5
TEMPERATURE = 0.7

GetPool = Callable[[int], RankPool]
GetCheckpoint = Callable[..., Path]


@torch.no_grad()
def hf_logits(path: Path, token_ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = load_hf(path)(token_ids[None]).logits[0]
    return logits


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
# Log-probs need the logits of a layout with tensor parallelism alone, too.
@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], pytest.param(LAYOUTS[1], marks=pytest.mark.long), LAYOUTS[2]], ids=LAYOUT_IDS
)
def test_logits(rank_pool: GetPool, checkpoint: GetCheckpoint, layout: LayoutConfig, tied: bool) -> None:
    path = checkpoint(tied=tied)
    rows = random_rows(LENGTHS)
    assert sum(row.num_tokens for row in rows) % 2 == 1
    model = ModelConfig(path=str(path), dtype="float32")
    got = rank_pool(layout.world_size).run(ranks.pack_logits, layout, model, rows)[0]

    sequences = list(itertools.pairwise(got.cu_seqlens))
    packed = [got.input_ids[start:stop].tolist() for start, stop in sequences]
    # Every row is there; under sequence parallelism one filler token makes the total even.
    assert sorted(packed[: len(rows)]) == sorted(row.token_ids.tolist() for row in rows)
    assert len(packed) - len(rows) == (1 if layout.sequence_parallel else 0)
    assert got.logits.shape == (got.cu_seqlens[-1], VOCAB_SIZE)
    expected = torch.cat([hf_logits(path, got.input_ids[start:stop]) for start, stop in sequences])
    # Far from uniform, so that equality means something.
    assert expected.std() > 0.7
    assert_within("logits", got.logits, expected, atol=TOLERANCE)


def dense_scores(path: Path, row: Row) -> tuple[np.ndarray, np.ndarray]:
    """[R] float64 log-probs and entropies of a row at `TEMPERATURE`, 0 outside the loss mask."""
    logits = hf_logits(path, torch.from_numpy(row.token_ids)).double() / TEMPERATURE
    log_p = logits.log_softmax(-1)[row.num_prompt_tokens - 1 : -1]
    labels = torch.from_numpy(row.token_ids[row.num_prompt_tokens :])
    logprobs = log_p.gather(1, labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return np.where(row.loss_mask, logprobs, 0), np.where(row.loss_mask, entropy, 0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_IDS)
def test_logprobs_and_entropy(rank_pool: GetPool, checkpoint: GetCheckpoint, layout: LayoutConfig) -> None:
    path = checkpoint(tied=False)
    # A row whose response is not trained on has no kept label; alone in a micro-batch it leaves the head no rows.
    rows = [*random_rows(LENGTHS), masked_out(random_rows([(2, 3)], seed=1)[0])]
    actor = ActorConfig(layout=layout, head=HeadConfig(chunk_tokens=7))
    model = ModelConfig(path=str(path), dtype="float32")
    micro_batches = [[0, 3, 1], [6], [5, 2, 4]]
    results = rank_pool(layout.world_size).run(
        ranks.forward_actor, actor, model, rows, micro_batches, temperature=TEMPERATURE
    )
    assert all(result is None for result in results[1:])
    assert (
        sorted(results[0].quantities["logprobs"]) == sorted(results[0].quantities["entropy"]) == list(range(len(rows)))
    )
    for i, row in enumerate(rows):
        logprobs, entropy = dense_scores(path, row)
        assert_within("log-probs", results[0].quantities["logprobs"][i], logprobs, atol=TOLERANCE)
        assert_within("entropy", results[0].quantities["entropy"][i], entropy, atol=TOLERANCE)


def masked_out(row: Row) -> Row:
    return Row(
        uid="masked-out",
        sample_index=0,
        token_ids=row.token_ids,
        num_prompt_tokens=row.num_prompt_tokens,
        loss_mask=np.zeros_like(row.loss_mask),
    )
