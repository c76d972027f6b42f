"""Train models with Megatron-Core, which only this package imports. Each process is one rank of a Megatron layout."""

import sys
from importlib.util import find_spec
from types import ModuleType

if find_spec("triton") is None:
    # Newer Megatrons import these kernels of experts whether there is a Triton or not; only CUDA devices run them.
    _kernels = ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    _names = ("GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel")
    sys.modules[_kernels.__name__] = _kernels
    _kernels.__dict__.update(dict.fromkeys(_names))
