"""Name what a process does for the profilers that are attached to it."""

import contextlib
import os
import sys
from collections.abc import Iterator

from megarl.host.device.platform import platform

# NVTX ranges are pushed if one of these is set; Nsight Systems sets the second in what it profiles.
NVTX_VARIABLES = ("MEGARL_NVTX", "NSYS_PROFILING_SESSION_ID")


@contextlib.contextmanager
def named_range(name: str) -> Iterator[None]:
    """Name what is done within this context: for torch's profiler while it runs, and on CUDA by NVTX if that is asked
    for. Otherwise do nothing.
    """
    # Without torch, neither can be attached.
    torch = sys.modules.get("torch")
    with contextlib.ExitStack() as stack:
        if torch is not None and torch.autograd.profiler._is_profiler_enabled:
            stack.enter_context(torch.profiler.record_function(name))
        if torch is not None and platform().name == "cuda" and any(map(os.environ.get, NVTX_VARIABLES)):
            stack.enter_context(torch.cuda.nvtx.range(name))
        yield
