"""The log-prob head's regimes on one rank, against dense float64 log_softmax."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.parallel.head import given_teachers, logprobs
from megarl.parallel.head.distill import vocab_parallel_divergence
from megarl.parallel.head.given_teachers import TeacherLogits
from megarl.parallel.head.logprobs import HeadOptions, vocab_parallel_logprobs
from megarl.parallel.head.logprobs import head_inputs as inputs_of_head
from megarl.parallel.head.memory_mode import HeadMemoryMode
from megarl.parallel.head.statistics import HeadInputs, vocab_shard
from tests.helpers.compare import assert_within
from tests.helpers.head import HeadProblem, HeadResult, head_problem
from tests.helpers.head_ranks import (
    ONE_RANK,
    REGIMES,
    HeadCase,
    dense_token_loss,
    one_rank_arguments,
    token_gradients,
    token_loss,
)

PADDED_ROWS = 16
# The regimes that differentiate any loss, in backward.
DEFERRED = ("recompute", "keep")


def run_head(
    problem: HeadProblem, memory_mode: str, *, chunk_tokens: int | None = 3, padded_rows: int = PADDED_ROWS
) -> HeadResult:
    case = HeadCase(problem=problem, rows_per_rank=padded_rows, memory_mode=memory_mode, chunk_tokens=chunk_tokens)
    shard = vocab_shard(ONE_RANK, padded_rows, problem.vocab_size)
    result = case.differentiate(problem.padded_weight(padded_rows), shard)
    assert not result.grad_weight[problem.vocab_size :].any()
    return replace(result, grad_weight=result.grad_weight[: problem.vocab_size])


def assert_exact(got: HeadResult, problem: HeadProblem, *, atol: float) -> None:
    expected = dense_token_loss(problem)
    for name in ("logprobs", "entropy", "grad_hidden", "grad_weight"):
        assert_within(name, getattr(got, name), getattr(expected, name), atol=atol)


@pytest.mark.parametrize("memory_mode", REGIMES)
@pytest.mark.parametrize("with_entropy", [True, False], ids=["entropy", "no-entropy"])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, None])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients(
    dtype: torch.dtype, atol: float, chunk_tokens: int | None, with_entropy: bool, memory_mode: str
) -> None:
    problem = head_problem(with_entropy=with_entropy, dtype=dtype)
    got = run_head(problem, memory_mode, chunk_tokens=chunk_tokens)
    assert got.logprobs.dtype == got.entropy.dtype == got.grad_hidden.dtype == got.grad_weight.dtype == dtype
    assert_exact(got, problem, atol=atol)


@pytest.mark.parametrize("memory_mode", REGIMES)
@pytest.mark.parametrize("num_rows", [0, 1])
def test_few_rows(num_rows: int, memory_mode: str) -> None:
    problem = head_problem(num_rows=num_rows)
    got = run_head(problem, memory_mode)
    assert got.logprobs.shape == got.entropy.shape == (num_rows,)
    assert_exact(got, problem, atol=1e-12)


@pytest.mark.parametrize("memory_mode", REGIMES)
def test_all_logits_very_negative(memory_mode: str) -> None:
    problem = head_problem()
    problem.hidden[:, 0] = 1e3
    problem.weight[:, 0] = -100.0
    # Logits of 2e5 have float64 steps of 3e-11, and gradients multiply their errors by up to 1e3.
    assert_exact(run_head(problem, memory_mode), problem, atol=1e-7)


@given(
    num_rows=st.integers(0, 9),
    vocab_size=st.integers(1, 40),
    hidden_size=st.integers(1, 12),
    padding=st.integers(0, 5),
    chunk_tokens=st.one_of(st.none(), st.integers(1, 12)),
    temperature=st.floats(0.25, 4.0),
    memory_mode=st.sampled_from(REGIMES),
    with_entropy=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    num_rows: int,
    vocab_size: int,
    hidden_size: int,
    padding: int,
    chunk_tokens: int | None,
    temperature: float,
    memory_mode: str,
    with_entropy: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    problem = HeadProblem(
        hidden=randn(num_rows, hidden_size),
        weight=randn(vocab_size, hidden_size),
        labels=torch.randint(0, vocab_size, (num_rows,), generator=generator),
        temperature=torch.full((num_rows,), temperature, dtype=torch.float64),
        grad_logprobs=randn(num_rows),
        grad_entropy=randn(num_rows) if with_entropy else None,
    )
    got = run_head(problem, memory_mode, chunk_tokens=chunk_tokens, padded_rows=vocab_size + padding)
    # Logits of up to ~50, over a temperature of ¼, and as large factors in the gradients.
    assert_exact(got, problem, atol=1e-10)


@pytest.mark.parametrize("memory_mode", DEFERRED)
def test_gradcheck(memory_mode: str) -> None:
    problem = head_problem(num_rows=4, vocab_size=5)

    def function(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = vocab_parallel_logprobs(
            hidden,
            weight,
            **one_rank_arguments(
                problem, PADDED_ROWS, memory_mode=HeadMemoryMode(memory_mode), entropy_needs_grad=True
            ),
        )
        return out.logprobs, out.entropy

    inputs = (problem.hidden.clone().requires_grad_(), problem.padded_weight(PADDED_ROWS).requires_grad_())
    # Of two backward passes of keep, the second computes the logits again and sums in another order.
    assert torch.autograd.gradcheck(function, inputs, nondet_tol=1e-13)


def test_differences_of_a_loss_in_its_chunks() -> None:
    """`gradcheck` also differentiates 0 times the loss: another loss than in the chunks, which is refused."""
    problem = head_problem(num_rows=4, vocab_size=5)

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        given = {"memory_mode": HeadMemoryMode.IN_CHUNK, "loss_gradients": token_gradients(problem)}
        out = vocab_parallel_logprobs(hidden, weight, **one_rank_arguments(problem, PADDED_ROWS, **given))
        return token_loss(problem, out.logprobs, out.entropy)

    inputs = (problem.hidden.clone().requires_grad_(), problem.padded_weight(PADDED_ROWS).requires_grad_())
    grads = torch.autograd.grad(loss(*inputs), inputs)
    step = 1e-6
    with torch.no_grad():
        for grad, changed in zip(grads, inputs, strict=True):
            differences = torch.empty_like(changed)
            for place in range(changed.numel()):
                values = []
                for offset in (step, -2 * step):
                    changed.view(-1)[place] += offset
                    values.append(loss(*inputs))
                changed.view(-1)[place] += step
                differences.view(-1)[place] = (values[0] - values[1]) / (2 * step)
            assert_within("gradient", grad, differences, atol=1e-7)


@pytest.mark.parametrize("memory_mode", REGIMES)
def test_bfloat16_inputs_keep_float32_statistics(memory_mode: str) -> None:
    """A vocabulary of 4096: bfloat16 sums would stall, and their log-probs be off by tenths."""
    problem = replace(
        head_problem(num_rows=40, vocab_size=4096, dtype=torch.bfloat16),
        temperature=torch.ones(40, dtype=torch.float32),
    )
    got = run_head(problem, memory_mode, chunk_tokens=16, padded_rows=4096)
    assert got.logprobs.dtype == got.entropy.dtype == torch.float32
    assert got.grad_hidden.dtype == got.grad_weight.dtype == torch.bfloat16
    # The logits themselves are a bfloat16 matrix product, as in the sampling engine.
    log_p = (problem.hidden @ problem.weight.t()).double().log_softmax(-1)
    logprobs, entropy = log_p.gather(1, problem.labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    assert_within("log-probs", got.logprobs, logprobs, atol=1e-5)
    assert_within("entropy", got.entropy, entropy, atol=1e-5)

    by_logprobs, by_entropy = token_gradients(problem)(logprobs, entropy)
    assert by_entropy is not None
    p, one_hot = log_p.exp(), torch.nn.functional.one_hot(problem.labels, 4096)
    grad_logits = by_logprobs[:, None] * (one_hot - p) - by_entropy[:, None] * p * (log_p + entropy[:, None])
    for name, grad, expected in (
        ("hidden", got.grad_hidden, grad_logits @ problem.weight.double()),
        ("weight", got.grad_weight, grad_logits.t() @ problem.hidden.double()),
    ):
        scale = expected.abs().max()
        # Eight bits of mantissa.
        assert_within(f"gradient of {name}", grad.double() / scale, expected / scale, atol=2**-7)


@pytest.mark.parametrize("memory_mode", REGIMES)
def test_logits_in_float32_of_bfloat16_inputs(memory_mode: str) -> None:
    """`fp32_logits`: the head is that of the rounded inputs, to float32; bfloat16 logits are not."""
    problem = head_problem(num_rows=40, vocab_size=300, dtype=torch.bfloat16)
    hidden, weight = problem.hidden.clone().requires_grad_(), problem.weight.clone().requires_grad_()
    case = HeadCase(problem=problem, rows_per_rank=300, memory_mode=memory_mode, chunk_tokens=16)
    shard = vocab_shard(ONE_RANK, 300, 300)
    out = case.forward(hidden, weight, shard, fp32_logits=True)
    token_loss(problem, out.logprobs, out.entropy).backward()
    expected = dense_token_loss(problem)
    assert_within("log-probs", out.logprobs.detach(), expected.logprobs, atol=1e-5)
    assert_within("entropy", out.entropy.detach(), expected.entropy, atol=1e-5)
    for name, grad, exact in (
        ("hidden", hidden.grad, expected.grad_hidden),
        ("weight", weight.grad, expected.grad_weight),
    ):
        assert grad is not None
        assert grad.dtype == torch.bfloat16
        # Rounded once, by half of the last of eight bits at most, beside float32's errors.
        error = ((grad.double() - exact).abs() - 2**-8 * exact.abs()).max().item()
        assert error < 1e-5, f"gradient of {name}"
    rounded = case.forward(hidden, weight, shard)
    assert (rounded.logprobs - expected.logprobs).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_mode", REGIMES)
def test_main_gradient_is_added_to(memory_mode: str, dtype: torch.dtype) -> None:
    problem = head_problem(dtype=dtype)
    hidden = problem.hidden.clone().requires_grad_()
    weight = problem.padded_weight(PADDED_ROWS).requires_grad_()
    there = torch.randn(PADDED_ROWS, 6, generator=torch.Generator().manual_seed(5))
    main_grad = there.clone()
    address = main_grad.data_ptr()
    case = HeadCase(problem=problem, rows_per_rank=PADDED_ROWS, memory_mode=memory_mode)
    shard = vocab_shard(ONE_RANK, PADDED_ROWS, problem.vocab_size)
    # The logits of bfloat16 inputs in float32, so that the gradient is known to float32.
    out = case.forward(hidden, weight, shard, main_grad=main_grad, fp32_logits=True)
    token_loss(problem, out.logprobs, out.entropy).backward()
    expected = dense_token_loss(problem)
    assert weight.grad is None
    assert hidden.grad is not None
    assert main_grad.data_ptr() == address
    assert torch.equal(main_grad[11:], there[11:])
    assert_within("main gradient", main_grad[:11].double(), there[:11].double() + expected.grad_weight, atol=1e-5)
    assert not torch.equal(main_grad[:11], there[:11])


@pytest.mark.parametrize("memory_mode", REGIMES)
def test_bfloat16_main_gradient_is_summed_in_float32(memory_mode: str) -> None:
    """300 rows that are alike, one at a time: a bfloat16 sum would stall at a 256th of its next term."""
    row = head_problem(num_rows=1, dtype=torch.bfloat16)
    problem = replace(
        row,
        hidden=row.hidden.expand(300, -1).contiguous(),
        labels=row.labels.expand(300),
        temperature=torch.ones(300),
        grad_logprobs=torch.ones(300, dtype=torch.float64),
        grad_entropy=None,
    )
    main_grad = torch.zeros(11, 6)
    case = HeadCase(problem=problem, rows_per_rank=11, memory_mode=memory_mode, chunk_tokens=1)
    hidden, weight = problem.hidden.clone().requires_grad_(), problem.weight.clone().requires_grad_()
    out = case.forward(hidden, weight, vocab_shard(ONE_RANK, 11, 11), main_grad=main_grad)
    token_loss(problem, out.logprobs, out.entropy).backward()
    log_p = (problem.hidden @ problem.weight.t()).double().log_softmax(-1)
    one_hot = torch.nn.functional.one_hot(problem.labels, 11)
    by_logprobs = log_p.gather(1, problem.labels[:, None]).cos()
    # What is written over bfloat16 logits is bfloat16.
    grad_logits = (by_logprobs * (one_hot - log_p.exp())).bfloat16().double()
    expected = grad_logits.t() @ problem.hidden.double()
    scale = expected.abs().max()
    assert_within("main gradient", main_grad.double() / scale, expected / scale, atol=1e-3)


@pytest.mark.parametrize("memory_mode", REGIMES)
def test_frozen_weight_or_hidden_states(memory_mode: str) -> None:
    problem = head_problem()
    expected = dense_token_loss(problem)
    case = HeadCase(problem=problem, rows_per_rank=PADDED_ROWS, memory_mode=memory_mode)
    shard = vocab_shard(ONE_RANK, PADDED_ROWS, problem.vocab_size)

    def differentiate(*, hidden: bool, weight: bool, main_grad: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        inputs = (
            problem.hidden.clone().requires_grad_(hidden),
            problem.padded_weight(PADDED_ROWS).requires_grad_(weight),
        )
        out = case.forward(*inputs, shard, main_grad=main_grad)
        token_loss(problem, out.logprobs, out.entropy).backward()
        return [x.grad for x in inputs]

    main_grad = torch.zeros(PADDED_ROWS, 6, dtype=torch.float64)
    grad_hidden, grad_weight = differentiate(hidden=True, weight=False, main_grad=main_grad)
    assert_within("gradient of hidden", grad_hidden, expected.grad_hidden, atol=1e-12)
    assert grad_weight is None
    assert not main_grad.any()

    grad_hidden, grad_weight = differentiate(hidden=False, weight=True, main_grad=None)
    assert grad_hidden is None
    assert grad_weight is not None
    assert_within("gradient of weight", grad_weight[:11], expected.grad_weight, atol=1e-12)


@pytest.mark.parametrize("memory_mode", ["recompute", "keep"])
def test_backward_twice(memory_mode: str) -> None:
    """The first backward of keep overwrites its logits; the second has the same gradients all the same."""
    problem = head_problem()
    expected = dense_token_loss(problem)
    hidden, weight = problem.hidden.clone().requires_grad_(), problem.weight.clone().requires_grad_()
    case = HeadCase(problem=problem, rows_per_rank=11, memory_mode=memory_mode)
    out = case.forward(hidden, weight, vocab_shard(ONE_RANK, 11, 11))
    loss = token_loss(problem, out.logprobs, out.entropy)
    for retain_graph in (True, False):
        grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight), retain_graph=retain_graph)
        assert_within("gradient of hidden", grad_hidden, expected.grad_hidden, atol=1e-12)
        assert_within("gradient of weight", grad_weight, expected.grad_weight, atol=1e-12)


@pytest.mark.parametrize("chunk_tokens", [1, 3, None])
@pytest.mark.parametrize("memory_mode", REGIMES)
def test_gradient_in_place_of_the_hidden_states(memory_mode: str, chunk_tokens: int | None) -> None:
    problem = head_problem()
    expected = dense_token_loss(problem)
    case = HeadCase(problem=problem, rows_per_rank=11, memory_mode=memory_mode, chunk_tokens=chunk_tokens)
    source = problem.hidden.clone().requires_grad_()
    hidden, weight = source * 1.0, problem.weight.clone().requires_grad_()
    out = case.forward(hidden, weight, vocab_shard(ONE_RANK, 11, 11), overwrite_hidden=True)
    token_loss(problem, out.logprobs, out.entropy).backward()
    assert_within("gradient of hidden", source.grad, expected.grad_hidden, atol=1e-12)
    assert_within("gradient of weight", weight.grad, expected.grad_weight, atol=1e-12)
    assert torch.equal(hidden.detach(), source.grad)


@pytest.mark.parametrize("memory_mode", DEFERRED)
def test_no_second_backward_from_overwritten_hidden_states(memory_mode: str) -> None:
    problem = head_problem()
    case = HeadCase(problem=problem, rows_per_rank=11, memory_mode=memory_mode)
    hidden = problem.hidden.clone().requires_grad_() * 1.0
    out = case.forward(hidden, problem.weight, vocab_shard(ONE_RANK, 11, 11), overwrite_hidden=True)
    loss = token_loss(problem, out.logprobs, out.entropy)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward, but the first one overwrote the hidden states"):
        loss.backward()


@pytest.mark.parametrize("memory_mode", REGIMES)
def test_entropy_has_no_graph_if_the_loss_needs_none(memory_mode: str) -> None:
    for with_entropy in (True, False):
        problem = head_problem(with_entropy=with_entropy)
        hidden = problem.hidden.clone().requires_grad_()
        case = HeadCase(problem=problem, rows_per_rank=11, memory_mode=memory_mode)
        out = case.forward(hidden, problem.weight, vocab_shard(ONE_RANK, 11, 11))
        assert out.logprobs.requires_grad
        assert out.entropy.requires_grad == with_entropy


@pytest.mark.parametrize("memory_mode", REGIMES)
def test_without_a_graph(memory_mode: str) -> None:
    problem = head_problem()
    expected = dense_token_loss(problem)
    case = HeadCase(problem=problem, rows_per_rank=11, memory_mode=memory_mode)
    shard = vocab_shard(ONE_RANK, 11, 11)
    with torch.no_grad():
        scored = case.forward(problem.hidden.clone().requires_grad_(), problem.weight, shard)
    frozen = case.forward(problem.hidden, problem.weight, shard)
    for out in (scored, frozen):
        assert not out.logprobs.requires_grad
        assert not out.entropy.requires_grad
        assert_within("log-probs", out.logprobs, expected.logprobs, atol=1e-12)
        assert_within("entropy", out.entropy, expected.entropy, atol=1e-12)


@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("memory_mode", DEFERRED)
def test_what_the_head_reads_is_freed_before_the_layers_below(
    memory_mode: str, taught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the loss alive, neither the copies in float32 nor a version's weights are held longer than backward."""
    read: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def head_inputs(*args: Any, **options: Any) -> HeadInputs:
        x = inputs_of_head(*args, **options)
        read.extend(map(weakref.ref, x.large))
        return x

    for module in (logprobs, given_teachers):
        monkeypatch.setattr(module, "head_inputs", head_inputs)
    shard = vocab_shard(ONE_RANK, 9, 9)
    hidden, weight = torch.randn(6, 4, dtype=torch.bfloat16).requires_grad_(), torch.randn(9, 4, dtype=torch.bfloat16)
    below = hidden * 1
    below.register_hook(lambda _: alive.append(sum(each() is not None for each in read)))
    options = HeadOptions(memory_mode=HeadMemoryMode(memory_mode), fp32_logits=True, chunk_tokens=2)
    labels = torch.zeros(6, dtype=torch.int64)
    if taught:
        teacher = TeacherLogits(hidden=below.detach() * 1, weight=weight, shard=shard, fp32_logits=True)
        found = vocab_parallel_divergence(below, weight, labels, shard=shard, teacher=teacher, options=options)
        loss = found.divergence.sum()
    else:
        loss = vocab_parallel_logprobs(below, weight, labels, shard=shard, options=options).logprobs.sum()
    assert sum(each() is not None for each in read) == len(read) == 2 + 2 * taught
    loss.backward()
    assert alive == [0]
