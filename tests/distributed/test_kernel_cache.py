"""The kernels that vLLM's oneDNN compiles for each number of tokens do not pile up in an engine on CPUs."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from tests.helpers.rank_pool import RankContext, RankPool

NUM_INPUTS = 64


def memory_by_shapes(context: RankContext) -> list[int]:
    """Return this process's memory before and after each hundred of matrix products, all of other shapes."""
    found = find_spec("vllm")
    assert found is not None, "vLLM is not installed"
    (vllm,) = found.submodule_search_locations or [""]
    kind = "AVX512" if torch.cpu._is_avx512_supported() else "AVX2"
    # The kernels alone: vLLM itself takes seconds to import.
    torch.ops.load_library(Path(vllm, f"_C_{kind}.abi3.so"))
    handle = torch.tensor(torch.ops._C.create_onednn_mm_handler(torch.randn(NUM_INPUTS, NUM_INPUTS).t(), 32))
    sizes = [psutil.Process().memory_info().rss]
    for num_tokens in range(1, 501):
        inputs = torch.randn(num_tokens, NUM_INPUTS)
        torch.ops._C.onednn_mm(torch.empty_like(inputs), inputs, None, handle)
        if num_tokens % 100 == 0:
            sizes.append(psutil.Process().memory_info().rss)
    return sizes


def test_kernels_of_more_shapes_take_the_place_of_others(rank_pool: Callable[[int], RankPool]) -> None:
    ((before, hundred, *_, full, last),) = rank_pool(1).run(memory_by_shapes)
    assert last - full < 0.2 * (hundred - before)
