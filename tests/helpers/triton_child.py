"""What the processes with Triton on their import path do: its interpreter on CPU, or its compiler without a GPU.

Started as `python -m tests.helpers.triton_child FUNCTION PATH`; the results go to PATH.
"""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.parallel.head import triton_teacher_kernels as teacher_kernels
from megarl.parallel.head.choose import first_that_passes, triton_candidate
from megarl.parallel.head.divergence import Divergence
from megarl.parallel.head.kernels import PolicyTerm, TorchKernels
from megarl.parallel.head.self_test import self_test
from megarl.parallel.head.teacher_self_test import teacher_self_test
from megarl.parallel.head.triton_kernels import TritonKernels, _gradient_kernel, _statistics_kernel
from megarl.parallel.head.triton_teacher_kernels import KINDS, TritonTeacherKernels
from tests.helpers.chunk_kernels import SHAPES, ChunkProblem, chunk_problem, run_chunk

BLOCK = 256  # fewer than most problems' columns, so that maxima change between blocks
TEACHER_BLOCK = 1024  # five to the wider half of the cases; the interpreter takes its time for every block
CPU = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def dominated(logits: Tensor) -> Tensor:
    """One logit far above all others, in another block each row."""
    logits[torch.arange(len(logits)), torch.arange(len(logits)) * 190] = 60
    return logits


def masked_ends(logits: Tensor) -> Tensor:
    """−∞ in all of the first block and of the last, and in parts of others."""
    logits[:, : BLOCK + 7] = -torch.inf
    logits[:, 700:1000] = -torch.inf
    return logits


def very_negative(logits: Tensor) -> Tensor:
    return logits - 2e4


def growing(logits: Tensor) -> Tensor:
    """A higher maximum in every block."""
    return logits + torch.linspace(-100, 100, logits.shape[1])


def falling(logits: Tensor) -> Tensor:
    return growing(logits).flip(1)


CHANGES = (dominated, masked_ends, very_negative, growing, falling)


def problems() -> dict[str, ChunkProblem]:
    """All problems for the interpreter, by name."""
    made = {"float16": chunk_problem(dtype=torch.float16)}
    for name, n, V, entropy in SHAPES:
        made[f"{name}-{n}x{V}"] = chunk_problem(num_rows=n, num_columns=V, dtype=DTYPES[name], with_entropy=entropy)
    for name, dtype in DTYPES.items():
        for change in CHANGES:
            made[f"{name}-{change.__name__}"] = chunk_problem(dtype=dtype, change=change)
    return made


def far_row() -> tuple[Tensor, Tensor]:
    """Statistics and gradient of the row 2³¹ elements after the first; memory in between is never touched."""
    V, stride = 300, 2**30
    buffer = torch.empty(2 * stride + V, dtype=torch.bfloat16)
    logits = buffer.as_strided((3, V), (stride, 1))
    logits.copy_(torch.arange(V) / V)
    out, ones, labels = torch.empty(3, 3), torch.ones(1).expand(3), torch.tensor([0, 1, 2])
    TritonKernels(block=BLOCK).statistics(logits, ones, labels, out)
    term = PolicyTerm(inverse_temperature=ones, labels=labels, lse=out[0], grad_logprobs=ones, a=ones, b=None)
    TritonKernels(block=BLOCK).write_gradient(logits, term)
    return out[:, 2], logits[2].clone()


def refusal(logits: Tensor) -> str:
    try:
        TritonKernels().statistics(logits, torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.empty(3, 2))
    except ValueError as error:
        return str(error)
    return ""


def statistics_beside_nan() -> Tensor:
    out = torch.empty(3, 2)
    logits = torch.tensor([[0.0, torch.nan], [0.0, 0.0]])
    TritonKernels().statistics(logits, torch.ones(2), torch.tensor([0, 0]), out)
    return out


def interpret() -> dict[str, Any]:
    """With TRITON_INTERPRET=1: the kernels' logic on CPU."""
    kernels = TritonKernels(block=BLOCK)
    return {
        "results": {name: (problem, run_chunk(kernels, problem)) for name, problem in problems().items()},
        "self-tests": [self_test(TritonKernels(), CPU, dtype) for dtype in (*DTYPES.values(), torch.float16)],
        "teacher self-tests": [
            teacher_self_test(TritonTeacherKernels(block=TEACHER_BLOCK), CPU, dtype) for dtype in DTYPES.values()
        ],
        "chosen": choose_on_cpu(),
        "beside NaN": statistics_beside_nan(),
        "far row": far_row(),
        "refusals": [refusal(logits) for logits in (torch.zeros(2, 3).double(), torch.zeros(3, 2).t())],
    }


def choose_on_cpu() -> tuple[str, list[str]]:
    """(name of the kernels, warnings) of the choice that a CUDA device would make, on CPU."""
    candidate = triton_candidate()
    assert candidate is not None
    with warnings.catch_warnings(record=True, category=UserWarning) as caught:
        chosen = first_that_passes([candidate], CPU, TorchKernels())
    return type(chosen).__name__, [str(one.message) for one in caught]


def compile_for_hopper() -> dict[str, Any]:
    """Without the interpreter: PTX for compute capability 9.0 of aligned logits, what NVIDIA's assembler says of it,
    and the choice where there is no GPU.

    Triton takes pointers and sizes that are multiples of 16 as such, and a stride of 1 as a constant.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    statistics = ["logits", "row_stride", "V", "inverse_temperature", "labels", "out", "statistic_stride", "out_stride"]
    gradient = ["logits", "row_stride", "V", "inverse_temperature", "labels", "lse", "grad_logprobs", "a", "b"]
    both = ["logits", "row_stride", "others", "other_stride", "V", "inverse_temperature", "teacher_inverse_temperature"]
    of_mixture = ["lse", "teacher_lse", "beta", "out", "statistic_stride", "out_stride"]
    of_policy = ["labels", "lse", "grad_logprobs", "a", "b"]
    of_term = ["student_lse", "teacher_lse", "mean", "weight", "beta"]
    sources = {
        "statistics": (_statistics_kernel, statistics, {"out_stride": 1}),
        "gradient": (_gradient_kernel, gradient, {}),
        "gradient without b": (_gradient_kernel, gradient, {"b": None}),
        "teacher statistics": (
            teacher_kernels._statistics_kernel,
            [*both, "labels", *of_mixture[3:]],
            {"out_stride": 1},
        ),
        "teacher mixture": (teacher_kernels._mixture_kernel, [*both, *of_mixture], {"out_stride": 1}),
        **{
            f"teacher gradient {kind}": (
                teacher_kernels._gradient_kernel,
                [*both, *of_policy, *of_term],
                {"KIND": KINDS[kind]},
            )
            for kind in Divergence
        },
    }
    ptx = {}
    for name, (kernel, arguments, constants) in sources.items():
        kernels = TritonTeacherKernels() if name.startswith("teacher") else TritonKernels()
        for dtype in ("bf16", "fp16", "fp32"):
            types = dict.fromkeys(("logits", "others"), f"*{dtype}") | {"labels": "*i64", "beta": "fp32"}
            types |= dict.fromkeys(("row_stride", "other_stride", "V", "statistic_stride"), "i32")
            signature = {one: types.get(one, "*fp32") for one in arguments} | dict.fromkeys(constants, "constexpr")
            source = ASTSource(
                fn=kernel,
                signature={**signature, "BLOCK": "constexpr"},
                constexprs={**constants, "BLOCK": kernels.block},
                attrs={
                    (i,): [["tt.divisibility", 16]]
                    for i, one in enumerate(arguments)
                    if one not in constants and one != "beta"
                },
            )
            options = {"num_warps": kernels.num_warps}
            ptx[f"{name} {dtype}"] = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    # It comes with Triton.
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    assembled = {
        name: subprocess.run(
            [assembler, "--verbose", "--gpu-name", "sm_90a", "--output-file", "/dev/null", "/dev/stdin"],
            input=code,
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        for name, code in ptx.items()
    }
    return {"ptx": ptx, "assembled": assembled, "chosen": choose_on_cpu()}


if __name__ == "__main__":
    function, path = sys.argv[1:]
    torch.save({"interpret": interpret, "compile": compile_for_hopper}[function](), path)
