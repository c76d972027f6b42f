"""Peak memory of a process over a baseline, on CPU and on CUDA."""

import ctypes
import gc
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Written to clear_refs it sets the peak back to what is resident now; see proc_pid_clear_refs(5).
_RESET_PEAK = "5"


class PeakMemory(Protocol):
    """Bytes used at most since `begin`, over what was used then."""

    def begin(self) -> None:
        """Give back what is free, and take the baseline."""

    def peak_bytes(self) -> int:
        """Return the peak since `begin`, over the baseline."""


class ResidentMemory:
    """The process's resident set, as the kernel counts it."""

    def begin(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="utf-8")
        self._baseline = _status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        return _status_bytes("VmHWM") - self._baseline


class CudaMemory:
    """Memory that torch's allocator handed out on this process's device."""

    def begin(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._baseline = torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self._baseline


PEAK_MEMORY: Mapping[str, type[PeakMemory]] = MappingProxyType({"cpu": ResidentMemory, "cuda": CudaMemory})


def _status_bytes(field: str) -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="ascii").splitlines())
    number, unit = lines[field].split()
    assert unit == "kB", lines[field]
    return int(number) * 1024
