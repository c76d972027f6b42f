"""The Triton kernels of the log-prob head without a GPU: their logic through Triton's interpreter against dense
float64, and that Triton's compiler takes them. Triton is on the import path of two child processes only.
"""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.parallel.head.choose import Candidate, choose_kernels, find_fault, first_that_passes, triton_candidate
from megarl.parallel.head.kernels import ChunkKernels, PolicyTerm, TorchKernels
from megarl.parallel.head.self_test import self_test
from tests.helpers.chunk_kernels import SHAPES, assert_exact
from tests.helpers.compare import assert_within
from tools import install

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
CHANGES = ["dominated", "masked_ends", "very_negative", "growing", "falling"]
NAMES = ["float16", *(f"{dtype}-{n}x{V}" for dtype, n, V, _ in SHAPES)]
NAMES += [f"{dtype}-{change}" for dtype in ("bfloat16", "float32") for change in CHANGES]


def start_child(function: str, path: Path) -> subprocess.Popen[bytes]:
    """A process with Triton on its import path, which writes what `function` makes to `path`."""
    folder = install.folder_apart(Path(sys.prefix), install.KERNELS)
    if not (folder / "triton").is_dir():
        pytest.fail(f"{folder} has no Triton; run `make install`")
    environment = {**os.environ, "PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(path.with_suffix(".cache"))}
    environment |= {"TRITON_INTERPRET": "1" if function == "interpret" else "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "tests.helpers.triton_child", function, str(path)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What both child processes made, side by side."""
    folder = tmp_path_factory.mktemp("children")
    started = {function: start_child(function, folder / f"{function}.pt") for function in ("interpret", "compile")}
    made = {}
    try:
        for function, child in started.items():
            output, _ = child.communicate(timeout=480)
            assert child.returncode == 0, output.decode()
            made[function] = torch.load(folder / f"{function}.pt", weights_only=False)
    finally:
        for child in started.values():
            child.kill()
            child.wait()
    return made


@pytest.fixture(scope="module")
def interpreted(children: Mapping[str, Any]) -> dict[str, Any]:
    return children["interpret"]


@pytest.mark.parametrize("name", NAMES)
def test_statistics_and_gradient(interpreted: dict[str, Any], name: str) -> None:
    problem, result = interpreted["results"][name]
    assert_exact(result, problem)


def test_every_problem_is_looked_at(interpreted: dict[str, Any]) -> None:
    assert set(interpreted["results"]) == set(NAMES)


def test_the_self_test_passes(interpreted: dict[str, Any]) -> None:
    assert interpreted["self-tests"] == [None, None, None]
    assert interpreted["teacher self-tests"] == [None, None]
    assert interpreted["chosen"] == ("TritonKernels", [])


def test_no_number_stays_in_its_row(interpreted: dict[str, Any]) -> None:
    lse, entropy, label_logit = interpreted["beside NaN"]
    assert lse.isnan().tolist() == entropy.isnan().tolist() == [True, False]
    assert_within("lse and entropy of two equal logits", torch.stack([lse[1], entropy[1]]), [0.693147] * 2, atol=1e-6)
    assert label_logit.tolist() == [0.0, 0.0]


def test_a_row_beyond_the_reach_of_32_bits(interpreted: dict[str, Any]) -> None:
    statistics, gradient = interpreted["far row"]
    z = (torch.arange(300) / 300).bfloat16().double()
    p = z.softmax(0)
    assert_within("statistics", statistics, torch.stack([z.logsumexp(0), torch.special.entr(p).sum(), z[2]]), atol=1e-5)
    expected = torch.nn.functional.one_hot(torch.tensor(2), 300) - p
    # The interpreter cuts bfloat16 off instead of rounding it.
    assert_within("gradient", gradient.double(), expected, atol=2**-8)


def test_what_the_kernels_do_not_take(interpreted: dict[str, Any]) -> None:
    dtype, stride = interpreted["refusals"]
    assert dtype.startswith("logits are torch.float64, expected one of (torch.bfloat16, torch.float16, torch.float32)")
    assert stride == "logits have column stride 2, expected 1; pass them row by row"


def test_the_compiler_reads_16_bytes_at_a_time(children: Mapping[str, Any]) -> None:
    """And so it writes gradients; bfloat16 is rounded to nearest."""
    ptx: dict[str, str] = children["compile"]["ptx"]
    assert len(ptx) == 24
    for name, code in ptx.items():
        assert ".target sm_90a" in code
        assert "ld.global.v4.b32" in code, name
        assert ("st.global.v4.b32" in code) == ("gradient" in name), name
        assert ("cvt.rn.bf16x2.f32" in code) == ("gradient" in name and name.endswith("bf16")), name


def test_registers_suffice_and_none_is_spilled(children: Mapping[str, Any]) -> None:
    """With 64 of the 65,536 registers of a multiprocessor each, half of its 2,048 threads run at a time.

    With 128, which sums over two rows may take, it is a quarter.
    """
    assembled: dict[str, str] = children["compile"]["assembled"]
    assert assembled.keys() == children["compile"]["ptx"].keys()
    for name, told in assembled.items():
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in told, name
        used = re.search(r"Used (\d+) registers", told)
        assert used is not None, told
        assert int(used[1]) <= (128 if name.startswith("teacher") else 64), name


def test_without_a_gpu_pytorch_is_chosen_and_the_reason_told(children: Mapping[str, Any]) -> None:
    name, told = children["compile"]["chosen"]
    assert name == "TorchKernels"
    assert len(told) == 1
    assert told[0].startswith("the Triton kernels for log-probs failed their self-test, so PyTorch's are used: ")
    assert "driver" in told[0]


def test_triton_is_not_imported_beside_vllm() -> None:
    assert triton_candidate() is None
    assert isinstance(choose_kernels(CPU), TorchKernels)
    assert choose_kernels(CPU) is choose_kernels(torch.device("cpu"))


class ForgetsTemperature(TorchKernels):
    def statistics(self, logits: Tensor, inverse_temperature: Tensor, labels: Tensor, out: Tensor) -> None:
        super().statistics(logits, torch.ones_like(inverse_temperature), labels, out)


class OwnsEveryLabel(TorchKernels):
    def statistics(self, logits: Tensor, inverse_temperature: Tensor, labels: Tensor, out: Tensor) -> None:
        super().statistics(logits, inverse_temperature, labels.clamp(min=0), out)


class LeavesEntropyEmpty(TorchKernels):
    def statistics(self, logits: Tensor, inverse_temperature: Tensor, labels: Tensor, out: Tensor) -> None:
        empty = out[1].clone()
        super().statistics(logits, inverse_temperature, labels, out)
        out[1] = empty


class ShiftsLogits(TorchKernels):
    def statistics(self, logits: Tensor, inverse_temperature: Tensor, labels: Tensor, out: Tensor) -> None:
        super().statistics(logits, inverse_temperature, labels, out)
        logits.sub_(logits.amax(1, keepdim=True))


class ForgetsTheEntropyGradient(TorchKernels):
    def write_gradient(self, logits: Tensor, term: PolicyTerm) -> None:
        super().write_gradient(logits, replace(term, b=None))


class WrongSignOfEntropy(TorchKernels):
    def write_gradient(self, logits: Tensor, term: PolicyTerm) -> None:
        super().write_gradient(logits, replace(term, b=term.b if term.b is None else -term.b))


class GradientOfZ(TorchKernels):
    """Not over T."""

    def write_gradient(self, logits: Tensor, term: PolicyTerm) -> None:
        super().write_gradient(logits, term)
        logits.div_(term.inverse_temperature[:, None])


class LeavesTheLastColumn(TorchKernels):
    def write_gradient(self, logits: Tensor, term: PolicyTerm) -> None:
        last = logits[:, -1].clone()
        super().write_gradient(logits, term)
        logits[:, -1] = last


class WritesBeyond(TorchKernels):
    def write_gradient(self, logits: Tensor, term: PolicyTerm) -> None:
        super().write_gradient(logits, term)
        logits.as_strided((1,), (1,), logits.storage_offset() + logits.shape[1]).fill_(1.0)


class DoesNotCompile(TorchKernels):
    def statistics(self, *args: Any) -> None:
        raise RuntimeError("no compiler\nhere")


WRONG = {
    ForgetsTemperature: "lse differs by ",
    OwnsEveryLabel: "label logit differs by ",
    LeavesEntropyEmpty: "entropy differs by inf, allowed 1e-05",
    ShiftsLogits: "logits after the statistics differs by ",
    ForgetsTheEntropyGradient: "gradient differs by ",
    WrongSignOfEntropy: "gradient differs by ",
    GradientOfZ: "gradient differs by ",
    LeavesTheLastColumn: "gradient differs by ",
    WritesBeyond: "what lies beyond the logits differs by 0.25, allowed 0",
}


def candidate_of(kernels: ChunkKernels, error: type[Exception] = RuntimeError) -> Candidate[ChunkKernels]:
    return Candidate(name="new", kernels=kernels, errors=(error,), test=self_test, purpose="log-probs")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_self_test_passes_of_right_kernels(dtype: torch.dtype) -> None:
    assert self_test(TorchKernels(), CPU, dtype) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_the_self_test_finds_what_is_wrong(wrong: type[TorchKernels], dtype: torch.dtype) -> None:
    fault = self_test(wrong(), CPU, dtype)
    assert fault is not None
    assert f" in {dtype}: {WRONG[wrong]}" in fault
    assert "\n" not in fault


def test_wrong_kernels_are_passed_over_with_a_warning() -> None:
    candidates = [candidate_of(WrongSignOfEntropy()), candidate_of(DoesNotCompile())]
    with pytest.warns(UserWarning, match="failed their self-test") as warned:
        chosen = first_that_passes(candidates, CPU, TorchKernels())
    assert type(chosen) is TorchKernels
    told = "the new kernels for log-probs failed their self-test, so PyTorch's are used: "
    messages = [str(one.message) for one in warned]
    assert messages[0].startswith(f"{told}one column in torch.bfloat16: gradient differs by ")
    assert messages[1:] == [f"{told}RuntimeError: no compiler here"]


def test_right_kernels_are_chosen_without_a_word() -> None:
    candidate = candidate_of(TorchKernels())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = first_that_passes([candidate, candidate_of(DoesNotCompile())], CPU, TorchKernels())
    assert chosen is candidate.kernels


def test_kernels_are_tested_within_a_pass_without_gradients() -> None:
    """Where old log-probs are what a rank computes first."""
    with torch.no_grad():
        assert find_fault(candidate_of(TorchKernels()), CPU) is None


def test_an_error_that_was_not_foreseen_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="no compiler"):
        find_fault(candidate_of(DoesNotCompile(), OSError), CPU)
