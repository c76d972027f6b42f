"""The head's Triton kernels, without a teacher and with one, at the size of a real vocabulary, and their choice."""

import pytest
import torch

from megarl.parallel.head.choose import (
    choose_kernels,
    choose_teacher_kernels,
    find_fault,
    triton_candidate,
    triton_teacher_candidate,
)
from megarl.parallel.head.distill import vocab_parallel_divergence
from megarl.parallel.head.divergence import Divergence
from megarl.parallel.head.given_teachers import TeacherLogits
from megarl.parallel.head.kernels import PolicyTerm, TorchKernels
from megarl.parallel.head.logprobs import HeadOptions
from megarl.parallel.head.self_test import self_test
from megarl.parallel.head.statistics import vocab_shard
from megarl.parallel.head.teacher_kernels import TorchTeacherKernels
from megarl.parallel.head.teacher_self_test import teacher_self_test
from tests.helpers.chunk_kernels import assert_exact, chunk_problem, run_chunk
from tests.helpers.compare import assert_within
from tests.helpers.cuda import needs_devices
from tests.helpers.head_ranks import ONE_RANK
from tests.helpers.teacher_heads import divergences

pytestmark = [pytest.mark.gpu, needs_devices(1)]

QWEN_VOCAB = 152_064
DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("with_entropy", [True, False], ids=["entropy", "no-entropy"])
@pytest.mark.parametrize("num_columns", [QWEN_VOCAB, QWEN_VOCAB - 5], ids=["aligned", "not-aligned"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_whole_vocabulary(dtype: torch.dtype, num_columns: int, with_entropy: bool) -> None:
    problem = chunk_problem(num_rows=9, num_columns=num_columns, dtype=dtype, with_entropy=with_entropy)
    assert_exact(run_chunk(choose_kernels(torch.device("cuda")), problem, "cuda"), problem)


def test_rows_beyond_the_reach_of_32_bits() -> None:
    """More than 2³¹ logits: the last rows, of few distinct logits, against float64."""
    num_rows = 2**31 // QWEN_VOCAB + 2
    row = (torch.arange(QWEN_VOCAB) % 61 / 7).bfloat16()
    logits = row.cuda().expand(num_rows, -1).contiguous()
    ones, labels = torch.ones(num_rows, device="cuda"), torch.full((num_rows,), 5, device="cuda")
    out = torch.empty(3, num_rows, device="cuda")
    kernels = choose_kernels(torch.device("cuda"))
    kernels.statistics(logits, ones, labels, out)
    log_p = row.double().log_softmax(0)
    p = log_p.exp()
    expected = torch.stack([row.double().logsumexp(0), -(p @ log_p), row[5].double()])
    assert_within("statistics", out[:, -2:].cpu(), expected[:, None].expand(3, 2), atol=1e-5)
    term = PolicyTerm(inverse_temperature=ones, labels=labels, lse=out[0], grad_logprobs=ones, a=ones, b=None)
    kernels.write_gradient(logits, term)
    gradient = torch.nn.functional.one_hot(torch.tensor(5), QWEN_VOCAB) - p
    for got in logits[-2:].double().cpu():
        assert_within("gradient at the label", got[5], gradient[5], atol=2**-8)
        got[5] = gradient[5]
        assert_within("gradient elsewhere", got, gradient, atol=2**-8 * float(p.max()))


@pytest.mark.parametrize("kind", list(Divergence))
def test_divergences_over_a_whole_vocabulary(kind: Divergence) -> None:
    """Values and gradients of a student and its teacher of another width, against dense float64."""
    generator, device = torch.Generator("cuda").manual_seed(3), torch.device("cuda")
    shapes = {"hidden": (40, 64), "weight": (QWEN_VOCAB, 64), "other": (40, 96), "other_weight": (QWEN_VOCAB, 96)}
    made = {name: torch.randn(*shape, generator=generator, device=device) for name, shape in shapes.items()}
    hidden, weight = made["hidden"].requires_grad_(), (made["weight"] / 4).requires_grad_()
    labels, shard = torch.arange(40, device=device), vocab_shard(ONE_RANK, QWEN_VOCAB, QWEN_VOCAB)
    out = vocab_parallel_divergence(
        hidden,
        weight,
        labels,
        shard=shard,
        teacher=TeacherLogits(hidden=made["other"], weight=made["other_weight"] / 4, shard=shard),
        divergence=kind,
        beta=0.3,
        options=HeadOptions(chunk_tokens=16),
    )
    got = torch.autograd.grad(out.divergence.sum() + out.logprobs.sum(), (hidden, weight))
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    log_p = (h @ w.t()).log_softmax(-1)
    log_q = (made["other"].double() @ (made["other_weight"] / 4).double().t()).log_softmax(-1)
    value = divergences(log_p, log_q, 0.3)[kind]
    expected = torch.autograd.grad(value.sum() + log_p.gather(1, labels[:, None]).sum(), (h, w))
    assert_within("divergence", out.divergence.detach().cpu(), value.detach().cpu(), atol=1e-4)
    assert_within("agreement", out.agreement.cpu(), (log_p.argmax(1) == log_q.argmax(1)).cpu(), atol=0)
    for name, mine, theirs in zip(("hidden", "weight"), got, expected, strict=True):
        scale = theirs.abs().max()
        assert_within(name, (mine.double() / scale).cpu(), (theirs / scale).cpu(), atol=1e-4)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_the_self_test_passes(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    assert self_test(choose_kernels(device), device, dtype) is None
    assert teacher_self_test(choose_teacher_kernels(device), device, dtype) is None


def test_triton_is_chosen_where_it_is_installed() -> None:
    candidate = triton_candidate()
    assert candidate is not None, "no Triton beside this torch; install it with containers/install.sh"
    assert find_fault(candidate, torch.device("cuda")) is None
    assert not isinstance(choose_kernels(torch.device("cuda")), TorchKernels)
    with_teacher = triton_teacher_candidate()
    assert with_teacher is not None
    assert find_fault(with_teacher, torch.device("cuda")) is None
    assert not isinstance(choose_teacher_kernels(torch.device("cuda")), TorchTeacherKernels)
