"""The balance loss by transformers' own function, by hand, and over ranks that share rows; metrics of load."""

import math

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.parallel.moe.routing import balance_loss, load_metrics, row_sums

NUM_EXPERTS, PER_TOKEN = 6, 2


def routed(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logits).scatter(1, logits.topk(PER_TOKEN).indices, 1).bool()


def members_of(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    return (rows[:, None] == torch.arange(num_rows)).float()


def balance(logits: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    return balance_loss(*row_sums(routed(logits), logits.softmax(-1), members_of(rows, num_rows)))


def test_a_row_of_a_layer_is_what_transformers_computes() -> None:
    """Which does not divide by the experts per token."""
    logits = torch.randn(11, NUM_EXPERTS, generator=torch.Generator().manual_seed(0))
    got = balance(logits, torch.zeros(11, dtype=torch.int64), 1) / 11
    expected = (
        transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func((logits,), NUM_EXPERTS, PER_TOKEN)
        / PER_TOKEN
    )
    assert got.item() == pytest.approx(float(expected), rel=1e-6)


def test_rows_add_up_by_their_tokens() -> None:
    """Whatever their order in a pack; padding does not count."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(10, NUM_EXPERTS, generator=generator)
    rows = torch.tensor([1, 1, 1, 0, 0, -1, 0, 0, 1, -1])
    parts = [balance(logits[rows == i], torch.zeros(4, dtype=torch.int64), 1) for i in (0, 1)]
    assert balance(logits, rows, 2).item() == pytest.approx(sum(part.item() for part in parts), rel=1e-6)
    changed = logits.clone()
    changed[rows < 0] = 9.0
    assert balance(changed, rows, 2).item() == balance(logits, rows, 2).item()
    # A row that has no token here, and a pack that has none at all.
    assert balance(logits, rows, 3).item() == balance(logits, rows, 2).item()
    assert balance(logits, torch.full((10,), -1), 0).item() == 0


def test_by_hand() -> None:
    """Two experts, one per token; of three tokens two go to expert 0, whose probabilities are 3/4, 3/4 and 1/4."""
    odds = math.log(3)
    logits = torch.tensor([[odds, 0.0], [odds, 0.0], [0.0, odds]])
    chosen = torch.tensor([[True, False], [True, False], [False, True]])
    loads, probabilities = row_sums(chosen, logits.softmax(-1), torch.ones(3, 1))
    assert loads.tolist() == [[2.0, 1.0]]
    torch.testing.assert_close(probabilities, torch.tensor([[1.75, 1.25]]))
    # E · Σ f·P = 2 · (2/3 · 7/12 + 1/3 · 5/12) = 19/18, times three tokens.
    assert balance_loss(loads, probabilities).item() == pytest.approx(3 * 19 / 18, rel=1e-6)
    # 1 where all experts are used alike; a result for each layer.
    even = balance_loss(torch.full((2, 1, 2), 1.5), torch.full((2, 1, 2), 1.5))
    assert even.tolist() == [3.0, 3.0]


def test_ranks_with_parts_of_a_row_add_up() -> None:
    """Loads are those of all ranks, probabilities each rank's own; so are the gradients."""
    logits = torch.randn(9, NUM_EXPERTS, generator=torch.Generator().manual_seed(2)).requires_grad_()
    rows = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    loads, summed = row_sums(routed(logits), logits.softmax(-1), members_of(rows, 2))
    whole = balance_loss(loads, summed)
    parts = [
        balance_loss(loads, row_sums(routed(logits[part]), logits[part].softmax(-1), members_of(rows[part], 2))[1])
        for part in (slice(0, 3), slice(3, 9))
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)  # type: ignore[union-attr]
    (gradient,) = torch.autograd.grad(whole, logits, retain_graph=True)
    (summed,) = torch.autograd.grad(sum(parts), logits)  # type: ignore[arg-type]
    torch.testing.assert_close(summed, gradient)


class Operations(TorchDispatchMode):
    """Records the operations of torch, and whether one picks by a boolean mask."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.masks = set[str](), False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.names.add(name)
        self.masks |= name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        return function(*args, **(kwargs or {}))


def test_no_host_waits_for_the_sums() -> None:
    """As it would for the size of what a mask picks, or for a number."""
    logits, rows = torch.randn(10, NUM_EXPERTS), torch.tensor([1, 1, 1, 0, 0, -1, 0, 0, 1, -1])
    with Operations() as seen:
        balance(logits, rows, 2)
    assert "mm" in seen.names
    assert not seen.names & {"nonzero", "masked_select", "_local_scalar_dense", "item"}
    assert not seen.masks


def test_metrics_by_hand() -> None:
    loads = torch.tensor([[4, 0, 2, 2], [2, 2, 2, 2]], dtype=torch.float64)
    found = load_metrics(loads, torch.tensor([12.0, 8.0], dtype=torch.float64), num_tokens=8)
    assert found == {
        "moe/load_max_over_mean": 1.5,
        "moe/load_max_over_mean_worst_layer": 2.0,
        "moe/idle_experts": 0.125,
        "moe/aux_loss": 1.25,
    }
