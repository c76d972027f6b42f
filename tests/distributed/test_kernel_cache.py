"""The kernels that vLLM's oneDNN compiles for each number of tokens do not pile up in an engine on CPUs."""

import ctypes
import os
import re
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from tests.helpers.rank_pool import RankContext, RankPool

NUM_INPUTS = 64


def kernels_of_shapes(context: RankContext) -> list[str]:
    """Return whether oneDNN had each kernel, `hit` or `miss`, for 1 to 300 tokens, then for 1 and for 200 again."""
    found = find_spec("vllm")
    assert found is not None, "vLLM is not installed"
    (vllm,) = found.submodule_search_locations or [""]
    kind = "AVX512" if torch.cpu._is_avx512_supported() else "AVX2"
    # oneDNN reads it at its first kernel, and writes to C's standard output.
    os.environ["ONEDNN_VERBOSE"] = "profile_create"
    # The kernels alone: vLLM itself takes seconds to import.
    torch.ops.load_library(Path(vllm, f"_C_{kind}.abi3.so"))
    # vLLM keeps the last 32 by itself.
    handle = torch.tensor(torch.ops._C.create_onednn_mm_handler(torch.randn(NUM_INPUTS, NUM_INPUTS).t(), 32))
    flush, output = ctypes.CDLL(None).fflush, os.dup(1)
    with tempfile.TemporaryFile() as told:
        flush(None)
        os.dup2(told.fileno(), 1)
        try:
            for num_tokens in (*range(1, 301), 1, 200):
                inputs = torch.randn(num_tokens, NUM_INPUTS)
                torch.ops._C.onednn_mm(torch.empty_like(inputs), inputs, None, handle)
            flush(None)
        finally:
            os.dup2(output, 1)
            os.close(output)
            del os.environ["ONEDNN_VERBOSE"]
        told.seek(0)
        return re.findall(r"create:cache_(\w+),\w+,matmul", told.read().decode())


def test_kernels_of_more_shapes_take_the_place_of_others(rank_pool: Callable[[int], RankPool]) -> None:
    (kernels,) = rank_pool(1).run(kernels_of_shapes)
    # The kernel of one token was the oldest of more than 256; that of 200 tokens is among the last 256.
    assert (len(kernels), kernels[-2:]) == (302, ["miss", "hit"])
