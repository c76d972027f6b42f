"""Losses and the log-prob head on torch's meta device, whose tensors have no values: what would mix devices, or wait
for numbers of the device, fails there as on no CPU. The head's ranks are those of torch's `fake` process group.
"""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.algos import build_algorithm
from megarl.config import load_config
from megarl.parallel.head import differentiable
from megarl.parallel.head.logprobs import HeadOptions, vocab_parallel_logprobs
from megarl.parallel.head.memory_mode import HeadMemoryMode
from megarl.parallel.head.statistics import vocab_shard
from megarl.types import PolicyOutputs, RowBatch
from tests.helpers.steps import MAX_RESPONSE_TOKENS, VOCAB_SIZE, problem_of, random_step

META = torch.device("meta")
CONFIGS = Path(__file__).parents[3] / "configs" / "algo"
TP, RANK, ROWS_PER_RANK, VOCAB = 4, 3, 256, 1000
NUM_TOKENS, HIDDEN = 37, 64


@pytest.fixture
def tensor_parallel() -> Iterator[dist.ProcessGroup]:
    """The group of the last of four ranks. Collectives return at once."""
    dist.init_process_group("fake", rank=RANK, world_size=TP, store=FakeStore())
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("own_rows", [False, True], ids=["all rows", "own rows"])
@pytest.mark.parametrize("with_main_grad", [False, True], ids=["autograd", "main_grad"])
@pytest.mark.parametrize("entropy", [False, True], ids=["no-entropy", "entropy"])
@pytest.mark.parametrize("memory_mode", HeadMemoryMode)
def test_the_head_leaves_no_device(
    tensor_parallel: dist.ProcessGroup, memory_mode: HeadMemoryMode, entropy: bool, with_main_grad: bool, own_rows: bool
) -> None:
    counts = (10, 9, 9, 9) if own_rows else None
    hidden = torch.empty(counts[RANK] if counts else NUM_TOKENS, HIDDEN, dtype=torch.bfloat16, device=META)
    weight = torch.empty(ROWS_PER_RANK, HIDDEN, dtype=torch.bfloat16, device=META)
    main_grad = torch.empty_like(weight, dtype=torch.float32) if with_main_grad else None
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()

    def gradients(logprobs: torch.Tensor, entropies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return logprobs.cos(), entropies.cos() if entropy else None

    out = vocab_parallel_logprobs(
        hidden,
        weight,
        torch.empty(NUM_TOKENS, dtype=torch.int64, device=META),
        shard=vocab_shard(tensor_parallel, ROWS_PER_RANK, VOCAB),
        options=HeadOptions(
            temperature=0.7,
            memory_mode=memory_mode,
            chunk_tokens=16,
            entropy_needs_grad=entropy,
            row_counts=counts,
            main_grad=main_grad,
            loss_gradients=gradients if memory_mode is HeadMemoryMode.IN_CHUNK else None,
        ),
    )
    loss = out.logprobs.sin().sum() + (out.entropy.sin().sum() if entropy else 0)
    # The memory mode in_chunk compares its gradients with the loss's, once in a micro-batch; the comparison needs
    # values.
    with mock.patch.object(differentiable, "require_same_gradient"):
        loss.backward()
    assert {out.logprobs.device, out.entropy.device} == {META}
    assert out.logprobs.shape == out.entropy.shape == (NUM_TOKENS,)
    assert hidden.grad is not None
    assert (hidden.grad.device, hidden.grad.dtype, hidden.grad.shape) == (META, torch.bfloat16, hidden.shape)
    assert (weight.grad is None) == with_main_grad


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_losses_leave_no_device(name: str, tmp_path: Path) -> None:
    """Of every algorithm that comes with megarl, on the quantities of a step on the host."""
    run_file = tmp_path / "run.yaml"
    run_file.write_text(f"use: {{algo: {CONFIGS / name}.yaml}}\n", encoding="utf-8")
    algorithm = build_algorithm(
        load_config(run_file).algo, max_response_tokens=MAX_RESPONSE_TOKENS, vocab_size=VOCAB_SIZE
    )
    problem = problem_of(algorithm, random_step([3, 4], 0, demonstrations=True))[0]
    counts, on_device = algorithm.denominators(problem.rows()), problem.transformed(lambda x: x.to(META))
    logprobs, entropy = on_device.logprobs.requires_grad_(), on_device.entropy.requires_grad_()
    batch = RowBatch(
        labels=tuple(f"q/{i}" for i in range(len(problem.mask))),
        loss_mask=on_device.mask,
        quantities=on_device.quantities,
    )
    beside = {"teacher_logprobs": logprobs.detach()}
    out = PolicyOutputs(logprobs=logprobs, entropy=entropy, divergence=logprobs.square(), comparison=beside)
    parts = algorithm.loss(batch, out, algorithm.initial_state())
    loss = parts.total(counts)
    loss.backward()
    assert loss.device == META
    assert {value.device for part in parts.metrics.values() for value in part.values()} <= {META}
