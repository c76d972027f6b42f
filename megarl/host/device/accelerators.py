"""List the accelerators of a host by calling nvidia-smi, which takes no memory on the devices."""

import importlib.util
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

# Dense bfloat16 peaks in TFLOP/s, by what device names begin with; the first that fits counts.
_BFLOAT16_PEAKS = (
    ("NVIDIA B200", 2250.0),
    ("NVIDIA GH200", 989.4),
    ("NVIDIA H200 NVL", 835.5),
    ("NVIDIA H200", 989.4),
    ("NVIDIA H100 PCIe", 756.0),
    ("NVIDIA H100 NVL", 835.5),
    ("NVIDIA H100", 989.4),
    ("NVIDIA A100", 312.0),
)
_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader,nounits"]
_PLACES = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader,nounits"]
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator of this host: its name, memory in GiB, driver's version, and compute capability if known."""

    name: str
    memory_gib: float
    driver: str
    capability: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Recipe:
    """How Transformer Engine scales float8: on devices of a compute capability of at least one number, below another.

    block: numbers with one scale; it must divide a rank's tokens.
    """

    at_least: float
    below: float
    block: int

    @property
    def expected(self) -> str:
        return f">= {self.at_least:.1f} and < {self.below:.1f}" if self.below < inf else f">= {self.at_least:.1f}"

    def runs_on(self, capability: float) -> bool:
        return self.at_least <= capability < self.below


# By the values of actor.fp8; from transformer_engine/pytorch/quantization.py of 2.20.2.
FP8_RECIPES = {
    "blockwise": Fp8Recipe(at_least=9.0, below=inf, block=128),
    "mxfp8": Fp8Recipe(at_least=10.0, below=12.0, block=32),
}


def nvidia_devices() -> list[Device]:
    """List the devices that `nvidia-smi` reports, a line each; the list is empty if the tool is missing or fails."""
    return [
        Device(name=name, memory_gib=float(mib) / 1024, driver=driver, capability=float(capability))
        for name, mib, driver, capability in _ask(_QUERY, num_cells=4)
    ]


def nvidia_addresses(ids: Collection[str]) -> list[str]:
    """List the addresses on the PCI bus, as in /sys, of the devices with these numbers or UUIDs; as `nvidia_devices`,
    without an answer none.
    """
    found = {name: address for *names, address in _ask(_PLACES, num_cells=3) for name in names}
    # nvidia-smi writes the domain, which comes first, with eight digits.
    return [found[each].lower()[-len("0000:00:00.0") :] for each in ids if each in found]


def _ask(command: Sequence[str], *, num_cells: int) -> list[list[str]]:
    try:
        answer = subprocess.run(
            command, capture_output=True, check=True, timeout=_TIMEOUT_S, encoding="utf-8", errors="replace"
        )
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return []
    lines = [line for line in answer.stdout.splitlines() if line.strip()]
    return [[cell.strip() for cell in line.rsplit(",", num_cells - 1)] for line in lines]


def peak_tflops(name: str, dtype: str) -> float | None:
    """Return the published dense peak of a device for `dtype` in TFLOP/s; None if the device is not in our table."""
    if dtype != "bfloat16":
        return None
    return next((peak for prefix, peak in _BFLOAT16_PEAKS if name.startswith(prefix)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The versions of CUDA and NCCL with which torch was built; each is None for a CPU build."""

    cuda_version: str | None
    nccl_version: str | None


def torch_build() -> TorchBuild:
    """Return the CUDA and NCCL versions of the installed torch without using a device; None without torch or CUDA."""
    if importlib.util.find_spec("torch") is None:
        return TorchBuild(cuda_version=None, nccl_version=None)
    import torch

    if torch.version.cuda is None:
        return TorchBuild(cuda_version=None, nccl_version=None)
    nccl_version = ".".join(map(str, torch.cuda.nccl.version()))
    return TorchBuild(cuda_version=torch.version.cuda, nccl_version=nccl_version)
