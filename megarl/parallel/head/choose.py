"""Choose the log-prob kernels for a device: Triton's if they pass a self-test there, or else PyTorch's."""

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch

from megarl.parallel.head.kernels import ChunkKernels, TorchKernels
from megarl.parallel.head.self_test import self_test

TESTED_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Log-prob kernels that may not work on this device; `errors` are the exceptions that their first call may then
    raise.
    """

    name: str
    kernels: ChunkKernels
    errors: tuple[type[Exception], ...]


def triton_candidate() -> Candidate | None:
    """Return the Triton kernels as a candidate to test, or None if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from megarl.parallel.head.triton_kernels import LAUNCH_ERRORS, TritonKernels

    return Candidate(name="Triton", kernels=TritonKernels(), errors=LAUNCH_ERRORS)


CANDIDATES: Mapping[str, tuple[Callable[[], Candidate | None], ...]] = MappingProxyType({"cuda": (triton_candidate,)})


@cache
def choose_kernels(device: torch.device) -> ChunkKernels:
    """Return the log-prob kernels to use on a device. Candidates are tested once per process; the result is cached."""
    candidates = (make() for make in CANDIDATES.get(device.type, ()))
    return first_that_passes([candidate for candidate in candidates if candidate is not None], device)


def first_that_passes(candidates: list[Candidate], device: torch.device) -> ChunkKernels:
    """Return the first kernels that pass their self-test, or PyTorch's if none does. Warn about each candidate that
    fails.
    """
    for candidate in candidates:
        if (fault := find_fault(candidate, device)) is None:
            return candidate.kernels
        warnings.warn(
            f"the {candidate.name} kernels for log-probs failed their self-test, so PyTorch's are used: {fault}",
            stacklevel=2,
        )
    return TorchKernels()


def find_fault(candidate: Candidate, device: torch.device) -> str | None:
    """Run the self-test of candidate kernels on this device; return in one line what failed, or None if they pass."""
    try:
        return next(filter(None, (self_test(candidate.kernels, device, dtype) for dtype in TESTED_DTYPES)), None)
    except candidate.errors as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
