"""Peak memory of a process over a baseline, on CPU and on CUDA."""

import ctypes
import gc
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import psutil
import torch

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Written to clear_refs it sets the peak back to what is resident now; see proc_pid_clear_refs(5).
_RESET_PEAK = "5"


class PeakMemory(ABC):
    """Bytes used at most since `begin`, over what was used then.

    in_fresh_processes: whether what a process did before would show in its peak.
    """

    in_fresh_processes: ClassVar[bool]

    def __init__(self) -> None:
        self._baseline = 0

    @abstractmethod
    def begin(self) -> None:
        """Give back what is free, and take the baseline."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The peak since `begin`, over the baseline."""

    @abstractmethod
    def available_bytes(self, world_size: int) -> int:
        """Return what each of the ranks can still use."""


class ResidentMemory(PeakMemory):
    """The process's resident set, as the kernel counts it."""

    in_fresh_processes = True

    def begin(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="utf-8")
        self._baseline = _status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        return _status_bytes("VmHWM") - self._baseline

    def available_bytes(self, world_size: int) -> int:
        return psutil.virtual_memory().available // world_size


class CudaMemory(PeakMemory):
    """Memory that torch's allocator handed out on this process's device."""

    in_fresh_processes = False

    def begin(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._baseline = torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self._baseline

    def available_bytes(self, world_size: int) -> int:
        return torch.cuda.mem_get_info()[0]


PEAK_MEMORY: Mapping[str, type[PeakMemory]] = MappingProxyType({"cpu": ResidentMemory, "cuda": CudaMemory})


def _status_bytes(field: str) -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="ascii").splitlines())
    number, unit = lines[field].split()
    assert unit == "kB", lines[field]
    return int(number) * 1024
