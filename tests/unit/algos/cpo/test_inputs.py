"""The same shaping on the host and in the loss."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.algos.cpo import inputs_from_batch, inputs_from_rows, loss_quantities, shape_advantages, shapes_in_loss
from megarl.config.algo import CpoConfig
from megarl.types import RowBatch, ScoredBatch

MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, False], [False, False, False]])
UIDS = ("a", "b", "a", "b")


def scored() -> ScoredBatch:
    g = torch.Generator().manual_seed(3)
    names = ("old_logprobs", "hint_logprobs", "shuffled_hint_logprobs", "old_entropy")
    quantities = {name: -torch.rand(4, 3, generator=g) * 3 for name in names}
    return ScoredBatch(
        uids=UIDS,
        rewards=torch.tensor([1.0, 0.0, 0.0, 0.0]),
        correct=torch.tensor([True, False, False, False]),
        loss_mask=MASK,
        quantities={**quantities, "old_entropy": -quantities["old_entropy"], "hint_kl": torch.rand(4, 3, generator=g)},
        step=7,
    )


@pytest.mark.parametrize("further", [{}, {"shuffled_baseline": True}, {"mi_estimator": "full_kl"}])
@pytest.mark.parametrize("method", ["mi3", "seq_kl", "negonly_mi3", "naive"])
def test_host_and_loss_agree(method: str, further: dict[str, Any]) -> None:
    """Given the same entropies, whatever rows a micro-batch has."""
    cfg = CpoConfig(method=method, entropy_source="current", ratio_clamp=1.5, **further)
    assert shapes_in_loss(cfg)
    assert not shapes_in_loss(CpoConfig(method=method, **further))
    batch, advantages = scored(), torch.where(MASK, -0.5, 0.0)
    excluded = torch.tensor([[0.0, 0.0, 1.0], *[[0.0] * 3] * 3])
    batch = replace(batch, quantities={**batch.quantities, "cpo_excluded": excluded})
    x = inputs_from_batch(batch, advantages, cfg, vocab_size=20)
    assert x.difficulty.tolist() == [0, -1, 0, -1]
    assert x.step == 6
    expected = shape_advantages(x, cfg)
    assert (expected != advantages).any()
    quantities = {**loss_quantities(x, cfg), "advantages": advantages}
    for rows in ([0, 1, 2, 3], [2, 0], [3]):
        micro = RowBatch(
            labels=tuple(f"r/{i}" for i in rows),
            loss_mask=MASK[rows],
            quantities={n: s[rows] for n, s in quantities.items()},
        )
        entropy = batch.quantity("old_entropy")[rows].requires_grad_()
        got = shape_advantages(inputs_from_rows(micro, entropy, vocab_size=20), cfg)
        assert not got.requires_grad
        assert torch.equal(got, expected[rows])


def test_micro_batch_without_responses() -> None:
    empty = torch.zeros(2, 0)
    names = ("advantages", "cpo_old_logprobs", "hint_logprobs", "cpo_correct", "cpo_difficulty")
    rows = RowBatch(labels=("a/0", "a/1"), loss_mask=empty.bool(), quantities=dict.fromkeys(names, empty))
    x = inputs_from_rows(rows, empty, vocab_size=9)
    assert shape_advantages(x, CpoConfig(method="mi3")).shape == (2, 0)
