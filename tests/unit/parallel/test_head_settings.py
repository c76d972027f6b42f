"""What the log-prob head refuses, and which memory_mode and chunk it takes."""

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.parallel.head.logprobs import vocab_parallel_logprobs
from megarl.parallel.head.memory_mode import HeadMemoryMode, automatic_chunk, choose_memory_mode
from megarl.parallel.head.statistics import vocab_shard
from tests.helpers.head import head_problem
from tests.helpers.head_ranks import one_rank_arguments

PADDED_ROWS = 16


def group_of(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"row_counts": (6,)}, "hidden has 6 rows, labels 7", id="labels"),
        pytest.param(
            {"row_counts": (3, 4), "shard": vocab_shard(group_of(1, 2), 8, 11)},
            r"hidden has 7 rows on rank 1 of 2, expected those of \(3, 4\)",
            id="own rows",
        ),
        pytest.param({"row_counts": (7, 0)}, r"hidden has 7 rows on rank 0 of 1, .* \(7, 0\)", id="other ranks"),
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


@pytest.mark.parametrize(
    ("num_rows", "hidden", "num_logits", "itemsize", "expected"),
    [
        (8192, 4096, 76032, 2, 2048),
        (8192, 1000, 76032, 4, 448),
        (8192, 4096, 76032, 4, 1728),
        (8192, 4096, 1 << 22, 4, 64),
        (10, 4096, 76032, 2, 10),
        (0, 4096, 76032, 2, 1),
    ],
)
def test_automatic_chunk(num_rows: int, hidden: int, num_logits: int, itemsize: int, expected: int) -> None:
    assert automatic_chunk(num_rows, hidden=hidden, num_logits=num_logits, itemsize=itemsize) == expected
