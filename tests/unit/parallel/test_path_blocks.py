"""FlexAttention over rows that share prefixes: its mask and blocks by counting, its outputs against dense float64."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from megarl.parallel.modules import attend_to_paths, compiled_attention
from megarl.parallel.path_blocks import BLOCK, plan_blocks
from megarl.weights.attention import AttentionOptions
from tests.helpers.path_kernels import attend_path_by_path, random_paths

CPU = torch.device("cpu")
# A root of several blocks, branches around a block's length, and rows wholly within others.
PATHS = random_paths(3, 600, [1, 130, 0, 17, 257, 0, 64, 9])


def seen_by_hand(window: int | None) -> np.ndarray:
    """[T, T] which keys each query sees."""
    seen = np.zeros((sum(PATHS[1]), sum(PATHS[1])), dtype=bool)
    for path, own in zip(*PATHS, strict=True):
        for place in range(len(path) - own, len(path)):
            seen[path[place], path[max(0, place + 1 - (window or len(path))) : place + 1]] = True
    return seen


@pytest.mark.parametrize("window", [None, 37, 200])
def test_each_query_sees_its_path_and_blocks_leave_nothing_out(window: int | None) -> None:
    mask, expected = plan_blocks(*PATHS, CPU).mask(window), seen_by_hand(window)
    index = torch.arange(len(expected))
    zero = torch.zeros((), dtype=torch.int32)
    np.testing.assert_array_equal(mask.mask_mod(zero, zero, index[:, None], index[None]).numpy(), expected)
    padded = np.pad(expected, (0, -len(expected) % BLOCK)).reshape(-(-len(expected) // BLOCK), BLOCK, -1, BLOCK)
    counts = padded.sum((1, 3))
    kinds = np.zeros_like(counts)
    for kind, numbers, columns in (
        (1, mask.kv_num_blocks, mask.kv_indices),
        (2, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        assert numbers is not None
        assert columns is not None
        for row, number in enumerate(numbers[0, 0].tolist()):
            kinds[row, columns[0, 0, row, :number].numpy()] += kind
    whole = np.where(counts == BLOCK * BLOCK, 2, 1)
    if window is None:
        np.testing.assert_array_equal(kinds, np.where(counts > 0, whole, 0))
    else:
        # A block may be asked for in vain, but none is missing, and none that is not needed whole is taken whole.
        assert ((kinds > 0) | (counts == 0)).all()
        assert ((kinds < 2) | (counts == BLOCK * BLOCK)).all()
        assert (kinds > 0).sum() < (plan_blocks(*PATHS, CPU).needed > 0).sum()


@pytest.mark.parametrize(
    "options",
    [AttentionOptions(), AttentionOptions(window=100), AttentionOptions(window=100, sinks=True)],
    ids=["plain", "window", "window-sinks"],
)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)], ids=["eager", "compiled"])
def test_outputs(options: AttentionOptions, compiled: bool) -> None:
    """Four heads on two of keys and values; gradients run on CUDA alone."""
    if compiled and options.sinks:
        pytest.skip("for CPUs it is not compiled with the sums of exponentials, which sinks need")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(PATHS[1]), heads, 16, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator) if options.sinks else None
    out = attend_to_paths(
        q,
        k,
        v,
        plan_blocks(*PATHS, CPU),
        scale=None,
        options=options,
        sinks=sinks,
        attention=compiled_attention() if compiled else flex_attention,
    )
    exact = None if sinks is None else sinks.double()
    expected = attend_path_by_path(q.double(), k.double(), v.double(), PATHS, 0.25, options, exact)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
