"""The megatron-core version gate."""

import importlib.metadata

import pytest

from megarl.errors import ConfigError
from megarl.host.device.platform import TESTED_MEGATRON
from megarl.parallel import backend
from megarl.parallel.backend import check_megatron


def test_the_tested_megatron_passes_without_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: TESTED_MEGATRON)
    monkeypatch.setattr(backend, "probe_megatron", lambda: pytest.fail("probed the tested version"))
    check_megatron()


def test_another_megatron_is_probed_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.99.0")
    monkeypatch.setattr(backend, "probe_megatron", lambda: {"a": True, "PackedSeqParams.x": False})
    with pytest.raises(ConfigError, match=r"megatron-core 0\.99\.0 lacks PackedSeqParams\.x; install .*==0\.16\.1"):
        check_megatron()
    monkeypatch.setattr(backend, "probe_megatron", lambda: {"a": True})
    check_megatron()
