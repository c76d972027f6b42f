"""Choose the head's kernels for a device: Triton's if they pass a self-test there, or else PyTorch's."""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

import torch

from megarl.parallel.head.kernels import ChunkKernels, TorchKernels
from megarl.parallel.head.self_test import self_test
from megarl.parallel.head.teacher_kernels import TeacherKernels, TorchTeacherKernels
from megarl.parallel.head.teacher_self_test import teacher_self_test

TESTED_DTYPES = (torch.bfloat16, torch.float32)
KernelsT = TypeVar("KernelsT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Generic[KernelsT]):
    """Kernels that may not work on this device; `errors` are the exceptions that their first call may then raise.

    test: (kernels, device, dtype) → what is wrong with them, or None. purpose: what they are for, for messages.
    """

    name: str
    kernels: KernelsT
    errors: tuple[type[Exception], ...]
    test: Callable[[KernelsT, torch.device, torch.dtype], str | None]
    purpose: str


def triton_candidate() -> Candidate[ChunkKernels] | None:
    """Return the Triton kernels for log-probs as a candidate to test, or None if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from megarl.parallel.head.triton_kernels import LAUNCH_ERRORS, TritonKernels

    return Candidate(name="Triton", kernels=TritonKernels(), errors=LAUNCH_ERRORS, test=self_test, purpose="log-probs")


def triton_teacher_candidate() -> Candidate[TeacherKernels] | None:
    """Return the Triton kernels for divergences as a candidate to test, or None if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from megarl.parallel.head.triton_kernels import LAUNCH_ERRORS
    from megarl.parallel.head.triton_teacher_kernels import TritonTeacherKernels

    return Candidate(
        name="Triton",
        kernels=TritonTeacherKernels(),
        errors=LAUNCH_ERRORS,
        test=teacher_self_test,
        purpose="divergences",
    )


@cache
def choose_kernels(device: torch.device) -> ChunkKernels:
    """Return the log-prob kernels to use on a device. Candidates are tested once per process; the result is cached."""
    candidate = triton_candidate() if device.type == "cuda" else None
    return first_that_passes([] if candidate is None else [candidate], device, TorchKernels())


@cache
def choose_teacher_kernels(device: torch.device) -> TeacherKernels:
    """Return the divergence kernels to use on a device, as `choose_kernels` does those of log-probs."""
    candidate = triton_teacher_candidate() if device.type == "cuda" else None
    return first_that_passes([] if candidate is None else [candidate], device, TorchTeacherKernels())


def first_that_passes(candidates: Sequence[Candidate[KernelsT]], device: torch.device, otherwise: KernelsT) -> KernelsT:
    """Return the first kernels that pass their self-test, or `otherwise` if none does. Warn about each candidate that
    fails.
    """
    for candidate in candidates:
        if (fault := find_fault(candidate, device)) is None:
            return candidate.kernels
        warnings.warn(
            f"the {candidate.name} kernels for {candidate.purpose} failed their self-test, so PyTorch's are used: "
            f"{fault}",
            stacklevel=2,
        )
    return otherwise


def find_fault(candidate: Candidate[KernelsT], device: torch.device) -> str | None:
    """Run the self-test of candidate kernels on this device; return in one line what failed, or None if they pass."""
    try:
        # Kernels are often first needed in a pass without gradients, which the test takes all the same.
        with torch.enable_grad():
            faults = (candidate.test(candidate.kernels, device, dtype) for dtype in TESTED_DTYPES)
            return next(filter(None, faults), None)
    except candidate.errors as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
