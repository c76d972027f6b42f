"""The Triton kernels of the log-prob head at the size of a real vocabulary, and the choice of them."""

import pytest
import torch

from megarl.parallel.head.choose import choose_kernels, find_fault, triton_candidate
from megarl.parallel.head.kernels import TorchKernels
from megarl.parallel.head.self_test import self_test
from tests.helpers.chunk_kernels import assert_exact, chunk_problem, run_chunk
from tests.helpers.compare import assert_within
from tests.helpers.cuda import needs_devices

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
    kernels.write_gradient(logits, ones, labels, lse=out[0], grad_logprobs=ones, a=ones, b=None)
    gradient = torch.nn.functional.one_hot(torch.tensor(5), QWEN_VOCAB) - p
    for got in logits[-2:].double().cpu():
        assert_within("gradient at the label", got[5], gradient[5], atol=2**-8)
        got[5] = gradient[5]
        assert_within("gradient elsewhere", got, gradient, atol=2**-8 * float(p.max()))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_the_self_test_passes(dtype: torch.dtype) -> None:
    assert self_test(choose_kernels(torch.device("cuda")), torch.device("cuda"), dtype) is None


def test_triton_is_chosen_where_it_is_installed() -> None:
    candidate = triton_candidate()
    assert candidate is not None, "no Triton beside this torch; install it with containers/install.sh"
    assert find_fault(candidate, torch.device("cuda")) is None
    assert not isinstance(choose_kernels(torch.device("cuda")), TorchKernels)
