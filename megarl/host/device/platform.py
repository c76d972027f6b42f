"""Choose the kind of device that this process computes on, CPU or CUDA, and hide what differs between the two.

`platform()` works without importing torch, so that the driver can set the environment of the processes it starts.
`parallel/backend.py` and `rollout/engine.py` adapt Megatron and vLLM to each kind of device.
"""

import contextlib
import functools
import importlib.metadata
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from megarl.errors import ConfigError
from megarl.host.device.accelerators import Device, nvidia_addresses, nvidia_devices
from megarl.host.device.groups import backends_of_groups, gloo_group
from megarl.host.device.numa import bind_process, read_topology

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# The versions of megatron-core that megarl is tested with; the last one needs Python 3.12.
TESTED_MEGATRON = ("0.16.1", "0.19.2")

# Every process of a run needs these, whatever the device.
COMMON_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "604800",  # The driver has limits, which leave out what a stop takes.
    # Engine workers rename themselves; the new name must not overwrite the environment by which they are found.
    "SPT_NOENV": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # Repeated short waits at a store would otherwise print a warning each.
    # On a single host no other needs to reach its processes; several need the interface that connects them.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_RAS_ENABLE": "0",  # It tells everybody on the host what ranks do.
}

# Where users configure torch's allocator; the first that is set counts.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Segments that grow leave no gaps between tensors of many sizes.
_EXPANDABLE, _PLAIN = "expandable_segments:True", "expandable_segments:False"
# The number of threads of each rank and engine, where OMP_NUM_THREADS is to be the driver's alone.
WORKER_THREADS = "MEGARL_WORKER_THREADS"


class Platform:
    """A kind of device, CPU or CUDA. This base class's methods suit a CPU, where every operation is synchronous.

    Attributes:
        name: the name of the kind, such as cuda.
        torch_device: the device that a process uses, as torch names it.
        backend: the backend of torch.distributed's default process group.
        environment: variables to set before the first import of torch, ray or vllm in a process of the run.
        rank_environment: variables that trainer ranks alone get.
        resources: Ray resources to request for one process: a device and its share of the host's CPUs.
        has_ipc: whether processes can share device memory.
        has_batch_invariance: whether Megatron and vLLM have kernels whose results do not depend on the rest of a batch.
        checkpoint_writers: how many processes of a rank write its part of a checkpoint.
        expert_width_multiple: vLLM pads a worker's part of an expert to it; padded experts cannot take new weights.
    """

    name: str
    torch_device: str
    backend: str
    environment: Mapping[str, str]
    rank_environment: Mapping[str, str] = MappingProxyType({})
    resources: Mapping[str, float]
    has_ipc = False
    has_batch_invariance = False
    checkpoint_writers = 1
    expert_width_multiple = 1

    def device(self) -> "torch.device":
        """Return the torch device that this process computes on."""
        import torch

        return torch.device(self.torch_device)

    def activate(self) -> None:
        """Prepare torch in this process for its device; call it once, before the process creates tensors."""
        import torch

        # One thread per process, because several processes share the cores.
        torch.set_num_threads(1)

    def devices(self) -> list[Device]:
        """List the accelerators of this host without taking memory on them."""
        return []

    def select_devices(self, ids: Sequence[str]) -> None:
        """Restrict this process to devices with these ids, which Ray gave to another process; call before using any."""

    def bind_near(self, ids: Sequence[str]) -> None:
        """Bind this process to the CPUs and memory next to devices with these ids, where a host has several of both."""

    def generator(self) -> "torch.Generator":
        """Return torch's default random number generator on this process's device."""
        import torch

        return torch.default_generator

    def synchronize(self) -> None:
        """Wait until the device has finished all work on the current stream."""

    def host_buffer(self, num_bytes: int) -> "torch.Tensor":
        """Allocate uint8 [num_bytes] on the host, page-locked if that speeds up copies to and from the device."""
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8)

    def page_lock(self, buffer: "torch.Tensor") -> str | None:
        """Page-lock host memory as long as its tensor exists, if that speeds up copies to and from the device; return
        why that failed, if it did.
        """
        return None

    def copying(self) -> contextlib.AbstractContextManager[None]:
        """Let copies run beside the device's work after what is under way; at the end they have finished."""
        return contextlib.nullcontext()

    def release_cached_memory(self) -> None:
        """Return unused memory in torch's caching allocator to the device (torch.cuda.empty_cache)."""

    def shareable_memory(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which tensors are allocated on the device so that other processes can open them."""
        return contextlib.nullcontext()

    def communicators(self) -> list[Any]:
        """Wait for the device, and list the backends of this process's groups that keep memory on it, in an order that
        all members of the groups share.
        """
        return []

    def new_group(
        self, store: "dist.Store", rank: int, size: int, timeout: timedelta, device: "torch.device"
    ) -> "dist.ProcessGroup":
        """Make a process group beside torch's default one (NCCL on GPUs, else gloo). All members must call it together,
        each with the device that it computes on.
        """
        return gloo_group(store, rank, size, timeout)


class CpuPlatform(Platform):
    """The platform that computes on the host's cores, with Gloo between processes."""

    name = torch_device = "cpu"
    backend = "gloo"
    environment = COMMON_ENVIRONMENT | {
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_FR_BUFFER_SIZE": "0",  # Its records of collectives split freed memory: heaps grew by 36 KiB an update.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",  # Kernels of as many shapes, of 0.5 MiB; by default it is 1,024.
    }
    # Logical CPUs: two ranks and a tensor-parallel engine can share two cores.
    resources = MappingProxyType({"CPU": 0.5})
    expert_width_multiple = 32


class CudaPlatform(Platform):
    """The platform that computes on NVIDIA GPUs, with NCCL between processes."""

    name = "cuda"
    # Ray narrows CUDA_VISIBLE_DEVICES to the device of this process.
    torch_device = "cuda:0"
    backend = "nccl"
    environment = COMMON_ENVIRONMENT
    # Megatron needs one queue to overlap communication with computation; engines overlap more with several.
    rank_environment = MappingProxyType({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    resources = MappingProxyType({"CPU": 1, "GPU": 1})
    has_ipc = True
    has_batch_invariance = True
    checkpoint_writers = 4
    # The stream of `copying`, made when it is first needed.
    _copies: "torch.cuda.Stream | None" = None

    def activate(self) -> None:
        import torch

        torch.cuda.set_device(self.device())
        # torch has read what the user has set.
        if not any(map(os.environ.get, ALLOCATOR_VARIABLES)):
            torch._C._accelerator_setAllocatorSettings(_EXPANDABLE)

    def devices(self) -> list[Device]:
        return nvidia_devices()

    def select_devices(self, ids: Sequence[str]) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)

    def bind_near(self, ids: Sequence[str]) -> None:
        # nvidia-smi takes time to answer.
        if len(read_topology(()).cpus) > 1:
            bind_process(nvidia_addresses(ids))

    def generator(self) -> "torch.Generator":
        import torch

        return torch.cuda.default_generators[torch.cuda.current_device()]

    def synchronize(self) -> None:
        import torch

        torch.cuda.current_stream().synchronize()

    def host_buffer(self, num_bytes: int) -> "torch.Tensor":
        buffer = super().host_buffer(num_bytes)
        # torch's own page-locked memory comes in powers of two, so that up to half of it would be wasted.
        if (reason := self.page_lock(buffer)) is not None:
            raise RuntimeError(f"cannot page-lock {num_bytes:,} bytes of host memory: {reason}")
        return buffer

    def page_lock(self, buffer: "torch.Tensor") -> str | None:
        import torch

        runtime, address = torch.cuda.cudart(), buffer.data_ptr()
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(address, buffer.nbytes, 0))
        except RuntimeError as error:
            # CUDA keeps the error for the next kernel, which reports it.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self.device())
            return str(error)
        weakref.finalize(buffer, runtime.cudaHostUnregister, address)
        return None

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        import torch

        stream = self._copies = self._copies or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
            copied = stream.record_event()
        copied.synchronize()

    def release_cached_memory(self) -> None:
        import torch

        torch.cuda.empty_cache()

    @contextlib.contextmanager
    def shareable_memory(self) -> Iterator[None]:
        import torch

        settings = allocator_settings()
        parts = [part.strip() for part in settings.split(",")]
        if _EXPANDABLE.lower() not in map(str.lower, parts):
            yield
            return
        # Expandable segments are shared as file descriptors, which containers seldom let a process take from another.
        # Settings that are left out would go back to their defaults.
        plain = [_PLAIN if part.lower() == _EXPANDABLE.lower() else part for part in parts]
        torch._C._accelerator_setAllocatorSettings(",".join(plain))
        try:
            # Outside of a pool of their own, tensors may be cut from expandable segments that are there already.
            with torch.cuda.use_mem_pool(self._shareable_pool):
                yield
        finally:
            torch._C._accelerator_setAllocatorSettings(settings)

    @functools.cached_property
    def _shareable_pool(self) -> "torch.cuda.MemPool":
        import torch

        return torch.cuda.MemPool()

    def communicators(self) -> list[Any]:
        import torch

        torch.cuda.synchronize()
        return backends_of_groups(self.backend, self.device())

    def new_group(
        self, store: "dist.Store", rank: int, size: int, timeout: timedelta, device: "torch.device"
    ) -> "dist.ProcessGroup":
        import torch.distributed as dist

        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        # torch's stubs do not say that it is one.
        group = cast("dist.ProcessGroup", dist.ProcessGroupNCCL(store, rank, size, options))
        # Otherwise the first message would make the communicator, and members without one would be waited for.
        group.eager_connect_single_device(device)  # type: ignore[attr-defined]
        return group


PLATFORMS: dict[str, type[Platform]] = {"cpu": CpuPlatform, "cuda": CudaPlatform}


# The name of the platform within `assuming`.
_assumed: str | None = None


@contextlib.contextmanager
def assuming(name: str) -> Iterator[None]:
    """Let settings be checked and derived as on a machine of that platform; nothing may be computed in this context."""
    global _assumed
    before, _assumed = _assumed, name
    platform.cache_clear()
    try:
        yield
    finally:
        _assumed = before
        platform.cache_clear()


@functools.cache
def platform() -> Platform:
    """Return this process's platform: that of `assuming`, MEGARL_DEVICE, or CUDA with a driver and a build of torch."""
    try:
        is_cpu_torch = importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        # `megarl doctor` reports a missing torch.
        is_cpu_torch = False
    detected = "cuda" if Path("/dev/nvidiactl").exists() and not is_cpu_torch else "cpu"
    name = _assumed or os.environ.get("MEGARL_DEVICE", detected)
    if name not in PLATFORMS:
        raise ConfigError(f"MEGARL_DEVICE: got {name!r}, expected one of {sorted(PLATFORMS)}; correct or unset it")
    return PLATFORMS[name]()


def allocator_settings() -> str:
    """Return the settings of torch's allocator on the trainer's ranks: those that the user has exported, if any."""
    return next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), _EXPANDABLE)


def apply_environment() -> dict[str, str]:
    """Set the platform's environment variables in this process, unless the user has set them; return those of workers.

    Ranks and engines compute on one thread each, unless the user says otherwise, and on no more than there are CPUs.
    """
    for key, value in (wanted := platform().environment).items():
        os.environ.setdefault(key, value)
    threads = os.environ.get(WORKER_THREADS) or os.environ.get("OMP_NUM_THREADS", "1")
    # vLLM's attention on CPUs fails with more.
    threads = str(min(int(threads) or 1, len(os.sched_getaffinity(0)))) if threads.isdecimal() else threads
    return {key: os.environ[key] for key in wanted} | {"OMP_NUM_THREADS": threads}
