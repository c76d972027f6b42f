"""What processes do has a name in the traces of torch's profiler, and NVTX ranges on CUDA where they are asked for."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megarl.host.device import ranges
from megarl.host.device.ranges import named_range


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    @contextlib.contextmanager
    def push(name: str) -> Iterator[None]:
        names.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", push)
    monkeypatch.delenv("MEGARL_NVTX", raising=False)
    monkeypatch.delenv("NSYS_PROFILING_SESSION_ID", raising=False)
    return names


def test_torchs_profiler_has_the_name(pushed: list[str]) -> None:
    with torch.profiler.profile() as profile, named_range("forward actor"):
        torch.zeros(1).add_(1)
    assert "forward actor" in {event.name for event in profile.events()}
    assert pushed == []


@pytest.mark.parametrize("variable", ["MEGARL_NVTX", "NSYS_PROFILING_SESSION_ID"])
def test_nvtx_on_cuda_where_it_is_asked_for(pushed: list[str], monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    with named_range("on a CPU"):
        pass
    monkeypatch.setattr(ranges, "platform", lambda: SimpleNamespace(name="cuda"))
    with named_range("not asked for"):
        pass
    monkeypatch.setenv(variable, "1")
    with named_range("update actor"):
        pass
    assert pushed == ["update actor"]
