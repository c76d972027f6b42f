"""What the log-prob head refuses, and which memory_mode and chunk it takes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.parallel.head.logprobs import vocab_parallel_logprobs
from megarl.parallel.head.memory_mode import HeadMemoryMode, automatic_chunk, choose_memory_mode
from megarl.parallel.head.statistics import vocab_shard
from tests.helpers.head import head_problem
from tests.helpers.head_ranks import one_rank_arguments

PADDED_ROWS = 16


def group_of(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def row_mean_loss(logprobs: torch.Tensor) -> torch.Tensor:
    """As GSPO's ratio: all tokens of a row share one factor."""
    return -torch.exp(logprobs.mean())


def half_loss(logprobs: torch.Tensor) -> torch.Tensor:
    return 0.5 * logprobs.sum()


@pytest.mark.parametrize(
    ("told", "loss"),
    [
        pytest.param(row_mean_loss, row_mean_loss, id="a row's mean"),
        pytest.param(lambda logprobs: logprobs.sum(), half_loss, id="scaled"),
        pytest.param(lambda logprobs: 0.0 * logprobs.sum(), half_loss, id="told of none"),
    ],
)
def test_a_loss_that_is_no_sum_over_tokens_is_refused(
    told: Callable[[torch.Tensor], torch.Tensor], loss: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    problem = head_problem()

    def gradients(logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            values = logprobs.detach().clone().requires_grad_()
            return torch.autograd.grad(told(values), values)[0], None

    out = vocab_parallel_logprobs(
        problem.hidden.clone().requires_grad_(),
        problem.padded_weight(PADDED_ROWS),
        **one_rank_arguments(problem, PADDED_ROWS, memory_mode=HeadMemoryMode.IN_CHUNK, loss_gradients=gradients),
    )
    message = r"in_chunk.*log-probs of kept row \d.*not a sum over tokens.*recompute or keep"
    with pytest.raises(ValueError, match=message):
        loss(out.logprobs).backward()


def test_a_loss_of_the_entropy_that_is_no_sum_over_tokens_is_refused() -> None:
    problem = head_problem()

    def gradients(logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(logprobs), entropy / len(entropy)

    out = vocab_parallel_logprobs(
        problem.hidden.clone().requires_grad_(),
        problem.padded_weight(PADDED_ROWS),
        **one_rank_arguments(problem, PADDED_ROWS, memory_mode=HeadMemoryMode.IN_CHUNK, loss_gradients=gradients),
    )
    with pytest.raises(ValueError, match="with respect to the entropy"):
        out.entropy.mean().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"row_counts": (6,)}, "hidden has 6 rows, labels 7", id="labels"),
        pytest.param(
            {"row_counts": (3, 4), "shard": vocab_shard(group_of(1, 2), 8, 11)},
            r"hidden has 7 rows on rank 1 of 2, expected those of \(3, 4\)",
            id="own rows",
        ),
        pytest.param(
            {"row_counts": (4, 0, 3), "shard": vocab_shard(group_of(0, 2), 8, 11)},
            r"hidden has 7 rows on rank 0 of 2, expected those of \(4, 0, 3\)",
            id="other ranks",
        ),
        pytest.param(
            {"memory_mode": HeadMemoryMode.IN_CHUNK},
            "loss_gradients belong to in_chunk, which needs them",
            id="missing",
        ),
        pytest.param(
            {"loss_gradients": lambda logprobs, entropy: (logprobs, None)},
            "memory_mode recompute: loss_gradients belong to in_chunk",
            id="recompute",
        ),
        pytest.param(
            {"memory_mode": HeadMemoryMode.KEEP, "loss_gradients": lambda logprobs, entropy: (logprobs, None)},
            "memory_mode keep: loss_gradients belong to in_chunk",
            id="keep",
        ),
    ],
)
def test_arguments_that_do_not_agree(options: dict[str, Any], message: str) -> None:
    problem = head_problem()
    hidden = problem.hidden.clone().requires_grad_()
    given = {name: value for name, value in options.items() if name != "shard"}
    arguments = one_rank_arguments(problem, PADDED_ROWS, **given)
    arguments["shard"] = options.get("shard", arguments["shard"])
    with pytest.raises(ValueError, match=message):
        vocab_parallel_logprobs(hidden, problem.padded_weight(PADDED_ROWS), **arguments)


@pytest.mark.parametrize(
    ("setting", "logits_bytes", "token_local", "expected"),
    [
        # Named: whatever there is room for.
        ("recompute", 0, True, HeadMemoryMode.RECOMPUTE),
        ("keep", 101, True, HeadMemoryMode.KEEP),
        ("in_chunk", 0, True, HeadMemoryMode.IN_CHUNK),
        ("auto", 0, False, HeadMemoryMode.KEEP),
        ("auto", 100, True, HeadMemoryMode.KEEP),
        ("auto", 101, True, HeadMemoryMode.IN_CHUNK),
        ("auto", 101, False, HeadMemoryMode.RECOMPUTE),
    ],
)
def test_choice_of_the_memory_mode(
    setting: str, logits_bytes: int, token_local: bool, expected: HeadMemoryMode
) -> None:
    got = choose_memory_mode(setting, logits_bytes=logits_bytes, memory_bytes=100, token_local=token_local)
    assert got is expected


def test_no_memory_mode_of_that_name() -> None:
    with pytest.raises(ValueError, match="'all' is not a valid HeadMemoryMode"):
        choose_memory_mode("all", logits_bytes=0, memory_bytes=0, token_local=True)


@pytest.mark.parametrize(
    ("num_rows", "hidden", "num_logits", "itemsize", "expected"),
    [
        # Half of the hidden size.
        (8192, 4096, 76032, 2, 2048),
        (8192, 512, 76032, 4, 256),
        # 500 rows, in multiples of 64.
        (8192, 1000, 76032, 4, 448),
        # 512 MiB hold 2²⁹ / (76032 · 4) = 1765 rows; 27 times 64 fit.
        (8192, 4096, 76032, 4, 1728),
        # 32 rows are fewer than a GEMM at speed wants: by the hidden size, and by 2²⁹ / (2²² · 4).
        (8192, 64, 264, 4, 64),
        (8192, 4096, 1 << 22, 4, 64),
        (10, 4096, 76032, 2, 10),
        # Chunks of no rows would never end.
        (0, 4096, 76032, 2, 1),
        (5, 64, 0, 4, 5),
    ],
)
def test_automatic_chunk(num_rows: int, hidden: int, num_logits: int, itemsize: int, expected: int) -> None:
    assert automatic_chunk(num_rows, hidden=hidden, num_logits=num_logits, itemsize=itemsize) == expected
