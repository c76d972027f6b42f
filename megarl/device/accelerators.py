"""List the accelerators of a host by calling nvidia-smi, which takes no memory on the devices."""

import importlib.util
import subprocess
from dataclasses import dataclass

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
_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator of this host: its name, its memory in GiB, and its driver's version."""

    name: str
    memory_gib: float
    driver: str


def nvidia_devices() -> list[Device]:
    """List the devices that `nvidia-smi` reports; the list is empty if the tool is missing or fails."""
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return []
    return parse_devices(answer.stdout)


def parse_devices(listing: str) -> list[Device]:
    """Parse the output of nvidia-smi, with one line `name, MiB, driver version` per device."""
    rows = [[cell.strip() for cell in line.rsplit(",", 2)] for line in listing.splitlines() if line.strip()]
    return [Device(name=name, memory_gib=float(mib) / 1024, driver=driver) for name, mib, driver in rows]


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
