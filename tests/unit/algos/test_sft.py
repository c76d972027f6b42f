import pickle
from collections.abc import Callable

import pytest
import torch

from megarl.algos import SftAlgorithm
from megarl.types import Algorithm, AlgoState, PolicyOutputs, Row, RowBatch, ScoredBatch

MASK = torch.tensor([[True, True, False], [False, True, False]])


def test_cross_entropy_over_loss_tokens(
    make_rows: Callable[[torch.Tensor], list[Row]], make_batch: Callable[..., RowBatch]
) -> None:
    algorithm: Algorithm = SftAlgorithm()
    logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-9.0, -6.0, -9.0]], requires_grad=True)
    sums = algorithm.loss(make_batch(MASK), PolicyOutputs(logprobs=logprobs, entropy=None), AlgoState())
    counts = algorithm.denominators(make_rows(MASK))
    loss = sums.total(counts)
    loss.backward()
    assert loss.item() == 3.0
    assert sums.metrics["tokens"]["sft/nll"].item() / counts["tokens"] == 3.0
    assert not sums.metrics["tokens"]["sft/nll"].requires_grad
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -MASK.float() / 3)


def test_needs_no_quantities_and_keeps_its_state() -> None:
    algorithm = SftAlgorithm()
    assert algorithm.requires() == frozenset()
    assert not algorithm.entropy_needs_grad
    state = algorithm.initial_state()
    assert algorithm.after_step(state, {}, 8) == state
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm


def test_has_no_advantages(make_scored: Callable[..., ScoredBatch]) -> None:
    with pytest.raises(TypeError, match="no advantages"):
        SftAlgorithm().advantages(make_scored(["a"], [1.0]), AlgoState())


def test_no_loss_tokens(make_rows: Callable[[torch.Tensor], list[Row]], make_batch: Callable[..., RowBatch]) -> None:
    mask = torch.zeros_like(MASK)
    out = PolicyOutputs(logprobs=torch.zeros(MASK.shape), entropy=None)
    assert SftAlgorithm().loss(make_batch(mask), out, AlgoState()).objective["tokens"].item() == 0.0
    assert SftAlgorithm().denominators(make_rows(mask))["tokens"] == 1.0
