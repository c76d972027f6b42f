"""Device choice and the megatron-core version gate."""

import importlib.metadata
import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from megarl.device import platform as platform_module
from megarl.device.platform import CpuPlatform, CudaPlatform, check_megatron, platform
from megarl.errors import ConfigError


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
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert platform_module.apply_environment()["OMP_NUM_THREADS"] == "3"


def test_the_tested_megatron_passes_without_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: platform_module.TESTED_MEGATRON)
    monkeypatch.setattr(platform_module, "_probe_megatron", lambda: pytest.fail("probed the tested version"))
    check_megatron()


def test_another_megatron_is_probed_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.99.0")
    monkeypatch.setattr(platform_module, "_probe_megatron", lambda: [("a", True), ("PackedSeqParams.x", False)])
    with pytest.raises(ConfigError, match=r"megatron-core 0\.99\.0 lacks PackedSeqParams\.x; install .*==0\.16\.1"):
        check_megatron()
    monkeypatch.setattr(platform_module, "_probe_megatron", lambda: [("a", True)])
    check_megatron()


class RecordingEngine:
    """What vLLM's `LLM` is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", tags))


def test_engines_sleep_on_cuda_only() -> None:
    """Level 2 drops weights and KV cache; they come back one by one, under vLLM's names."""
    on_cuda, on_cpu = RecordingEngine(), RecordingEngine()
    for device, engine in ((CudaPlatform(), on_cuda), (CpuPlatform(), on_cpu)):
        device.sleep_engine(engine)
        device.wake_engine(engine, ("weights",))
        device.wake_engine(engine, ("kv_cache",))
    assert on_cuda.calls == [("sleep", 2), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]
    assert on_cpu.calls == []
    assert CudaPlatform().sleep_arguments() == {"enable_sleep_mode": True}
    assert CpuPlatform().sleep_arguments() == {}


def test_an_engine_sees_the_devices_that_ray_gave_to_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    CudaPlatform().select_devices(["2", "3"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_groups_beside_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's on the CPU; NCCL's on CUDA, whose options carry the time-out."""

    class FakeNccl:
        class Options:
            _timeout = timedelta()

        def __init__(self, *arguments: object) -> None:
            self.arguments = arguments

    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    store, timeout = dist.HashStore(), timedelta(seconds=7)
    group = CudaPlatform().new_group(store, 2, 3, timeout)
    assert isinstance(group, FakeNccl)
    *where, options = group.arguments
    assert where == [store, 2, 3]
    assert isinstance(options, FakeNccl.Options)
    assert options._timeout == timeout
    alone = CpuPlatform().new_group(store, 0, 1, timeout)
    assert isinstance(alone, dist.ProcessGroupGloo)
    assert (alone.rank(), alone.size()) == (0, 1)
