"""The choice of the device, and what differs between devices."""

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from megarl.errors import ConfigError
from megarl.host.device import platform as platform_module
from megarl.host.device.numa import NumaTopology
from megarl.host.device.platform import ALLOCATOR_VARIABLES, CpuPlatform, CudaPlatform, platform
from megarl.parallel.worker import RankWorker


@pytest.fixture(autouse=True)
def _fresh_platform() -> None:
    platform.cache_clear()


def test_the_environment_decides_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_DEVICE", "cuda")
    assert isinstance(platform(), CudaPlatform)
    platform.cache_clear()
    monkeypatch.setenv("MEGARL_DEVICE", "cpu")
    assert isinstance(platform(), CpuPlatform)
    platform.cache_clear()
    monkeypatch.setenv("MEGARL_DEVICE", "tpu")
    with pytest.raises(ConfigError, match=r"MEGARL_DEVICE: got 'tpu', expected one of \['cpu', 'cuda'\]"):
        platform()


def test_a_value_the_user_exported_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_DEVICE", "cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert platform_module.apply_environment()["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("MEGARL_WORKER_THREADS", "2")
    assert platform_module.apply_environment()["OMP_NUM_THREADS"] == "2"
    # The driver's own.
    assert os.environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("asked", "threads"), [("1", "1"), ("4", "4"), ("5", "4"), ("64", "4"), ("0", "1")])
def test_workers_have_no_more_threads_than_there_are_cpus(
    asked: str, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's attention on CPUs ends an engine that has more."""
    monkeypatch.setattr(os, "environ", {**os.environ, "MEGARL_DEVICE": "cpu", "OMP_NUM_THREADS": asked})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    assert platform_module.apply_environment()["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(("device", "drivers"), [("cpu", "1"), ("cuda", None)])
def test_workers_have_a_thread_each_and_the_driver_is_free_where_they_have_devices(
    device: str, drivers: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "MEGARL_DEVICE": device})
    os.environ.pop("OMP_NUM_THREADS", None)
    assert platform_module.apply_environment()["OMP_NUM_THREADS"] == "1"
    assert os.environ.get("OMP_NUM_THREADS") == drivers


def test_only_ranks_have_one_queue_to_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hands what the driver returns to engines as well."""
    monkeypatch.setattr(os, "environ", {**os.environ, "MEGARL_DEVICE": "cuda"})
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in {**platform_module.apply_environment(), **os.environ}
    monkeypatch.setattr("megarl.parallel.backend.prepare_megatron", lambda: None)
    monkeypatch.setitem(sys.modules, "megarl.parallel.updates", ModuleType("updates"))
    RankWorker(0).prepare()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_an_engine_sees_the_devices_that_ray_gave_to_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    CudaPlatform().select_devices(["2", "3"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_process_is_bound_where_a_host_has_several_nodes(num_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[list[str]] = []
    topology = NumaTopology(cpus={node: frozenset([node]) for node in range(num_nodes)}, nodes={})
    monkeypatch.setattr(platform_module, "read_topology", lambda _: topology)
    monkeypatch.setattr(platform_module, "nvidia_addresses", lambda ids: [f"address of {each}" for each in ids])
    monkeypatch.setattr(platform_module, "bind_process", bound.append)
    for device in (CudaPlatform(), CpuPlatform()):
        device.bind_near(["3"])
    assert bound == [["address of 3"]] * (num_nodes - 1)


def test_a_cpu_process_computes_on_one_thread_with_torchs_default_generator() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        CpuPlatform().activate()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert CpuPlatform().device() == torch.device("cpu")
    assert CudaPlatform().device() == torch.device("cuda", 0)
    assert torch.equal(CpuPlatform().generator().get_state(), torch.get_rng_state())


def test_groups_beside_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's on the CPU; NCCL's on CUDA, with the time-out and a communicator of the caller's device from the start."""

    class FakeNccl:
        class Options:
            _timeout = timedelta()

        def __init__(self, *arguments: object) -> None:
            self.arguments = arguments

        def eager_connect_single_device(self, device: torch.device) -> None:
            self.connected = device

    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    store, timeout = dist.HashStore(), timedelta(seconds=7)
    group = CudaPlatform().new_group(store, 2, 3, timeout, torch.device("cuda", 2))
    assert isinstance(group, FakeNccl)
    *where, options = group.arguments
    assert where == [store, 2, 3]
    assert isinstance(options, FakeNccl.Options)
    assert options._timeout == timeout
    assert group.connected == torch.device("cuda", 2)
    alone = CpuPlatform().new_group(store, 0, 1, timeout, torch.device("cpu"))
    assert isinstance(alone, dist.ProcessGroupGloo)
    assert (alone.rank(), alone.size()) == (0, 1)


def test_host_buffers_for_gpus_are_page_locked_and_no_larger_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own page-locked memory comes in powers of two: 8 KiB here."""
    locked: dict[int, int] = {}

    class FakeRuntime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            locked[address] = size
            return 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            del locked[address]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", FakeRuntime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    buffer = CudaPlatform().host_buffer(5000)
    assert locked == {buffer.data_ptr(): 5000}
    assert buffer.untyped_storage().nbytes() == 5000
    del buffer
    assert locked == {}


def test_memory_that_cannot_be_page_locked_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA returns the error, and again to the next kernel, which is run so that no other one meets it."""
    kernels = list[str]()

    class FakeRuntime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            return 2

    def fail(*_: int, **__: torch.device) -> None:
        kernels.append("run")
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", FakeRuntime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: fail() if code else None)
    monkeypatch.setattr(torch, "zeros", fail)
    buffer = torch.empty(8, dtype=torch.uint8)
    assert CudaPlatform().page_lock(buffer) == "out of memory"
    assert len(kernels) == 2
    with pytest.raises(RuntimeError, match="cannot page-lock 5,000 bytes of host memory: out of memory"):
        CudaPlatform().host_buffer(5000)
    assert CpuPlatform().page_lock(buffer) is None


def test_copies_run_on_a_stream_of_their_own_and_have_finished_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()

    class FakeStream:
        def __init__(self) -> None:
            calls.append("made")

        def wait_stream(self, other: str) -> None:
            calls.append(f"waits for {other}")

        def record_event(self) -> "FakeStream":
            calls.append("event")
            return self

        def synchronize(self) -> None:
            calls.append("synchronized")

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "current")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    here = CudaPlatform()
    for _ in range(2):
        with here.copying():
            calls.append("copy")
    once = ["waits for current", "copy", "event", "synchronized"]
    assert calls == ["made", *once, *once]


def test_torch_suspends_groups_but_not_those_of_gloo() -> None:
    """NCCL's cannot be made without a device; the methods are of the class that all backends derive from."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    for name in ("suspend", "resume"):
        with pytest.raises(RuntimeError, match=f"Backend gloo does not support {name}"):
            getattr(group, name)()


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's allocator is told after a start without settings of the user's; also `pool` and `outside`."""
    told: list[str] = []

    @contextmanager
    def use_mem_pool(pool: str) -> Iterator[None]:
        told.append(pool)
        yield
        told.append("outside")

    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: "pool", raising=False)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    return told


def test_ranks_have_expandable_segments_but_share_others(allocator: list[str]) -> None:
    here = CudaPlatform()
    here.activate()
    assert allocator == ["expandable_segments:True"]
    with here.shareable_memory():
        assert allocator[1:] == ["expandable_segments:False", "pool"]
    assert allocator[3:] == ["outside", "expandable_segments:True"]
    allocator.clear()
    with pytest.raises(RuntimeError, match="no memory"), here.shareable_memory():
        raise RuntimeError("no memory")
    assert allocator[-1] == "expandable_segments:True"


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_the_users_settings_of_the_allocator_win(
    name: str, allocator: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them: torch takes what it is told for the whole."""
    monkeypatch.setenv(name, "max_split_size_mb:512")
    here = CudaPlatform()
    here.activate()
    with here.shareable_memory():
        assert allocator == []
    theirs = "roundup_power2_divisions:[256:1,>:4], expandable_segments:true,max_split_size_mb:512"
    monkeypatch.setenv(name, theirs)
    here.activate()
    with here.shareable_memory():
        plain = "roundup_power2_divisions:[256:1,>:4],expandable_segments:False,max_split_size_mb:512"
        assert allocator == [plain, "pool"]
    assert allocator[-1] == theirs


def test_torch_takes_settings_of_its_allocator_at_run_time() -> None:
    """In the installed build, and says what they are."""
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        for settings in ("expandable_segments:True", "expandable_segments:False"):
            torch._C._accelerator_setAllocatorSettings(settings)
            assert torch._C._accelerator_getAllocatorSettings() == settings
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
