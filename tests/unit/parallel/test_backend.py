"""The megatron-core version gate, and what differs between the versions that pass it."""

import functools
import importlib.metadata
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from megarl.errors import ConfigError
from megarl.host.device.platform import TESTED_MEGATRON
from megarl.parallel import backend
from megarl.parallel.backend import accepted, check_megatron, module_spec


@pytest.mark.parametrize("version", TESTED_MEGATRON)
def test_a_tested_megatron_passes_without_probes(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    monkeypatch.setattr(backend, "probe_megatron", lambda: pytest.fail("probed the tested version"))
    assert check_megatron() == ()


def test_another_megatron_is_probed_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.99.0")
    monkeypatch.setattr(backend, "probe_megatron", lambda: {"a": True, "PackedSeqParams.x": False})
    expected = r"megatron-core 0\.99\.0 lacks PackedSeqParams\.x, of 2 .*==0\.16\.1 or megatron-core==0\.19\.2"
    with pytest.raises(ConfigError, match=expected):
        check_megatron()
    monkeypatch.setattr(backend, "probe_megatron", lambda: {"a": True})
    assert check_megatron() == ("a",)


def test_the_installed_megatron_has_all_that_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = backend.probe_megatron()
    assert [name for name, present in found.items() if not present] == []
    assert {"models.gpt.gpt_model.GPTModel._postprocess", "GPTModel._postprocess(hidden_states)"} < found.keys()
    absent = (("models.gpt", "GPTModel", ("pg_collection", "x")), ("models.y", "Y", ("z",)), ("models.gpt", "Z", ()))
    monkeypatch.setattr(backend, "_RELIED_ON", absent)
    missing = [name for name, present in backend.probe_megatron().items() if not present]
    assert missing == ["GPTModel(x)", "models.y.Y", "models.gpt.Z"]


class Layer:
    def __init__(self, *, submodules: Any, size: int) -> None: ...

    @classmethod
    def build(cls, *, submodules: Any, size: int) -> "Layer":
        return cls(submodules=submodules, size=size)


@pytest.mark.parametrize("builder", [Layer, Layer.build])
def test_a_builder_has_the_parts_of_a_spec(builder: Any) -> None:
    """The same submodules, so that what is set in them counts; older Megatrons have the spec itself."""
    submodules = {"router": None}
    spec = module_spec(functools.partial(builder, submodules=submodules, size=2))
    assert (spec.module, spec.params) == (Layer, {"size": 2})
    assert spec.submodules is submodules
    assert module_spec(spec) is spec


def test_arguments_of_other_versions_are_left_out() -> None:
    assert accepted(lambda path, strategy=None: None, strategy="mcore", other=1) == {"strategy": "mcore"}


@pytest.mark.skipif(find_spec("triton") is None, reason="all tests run without Triton here")
def test_megatron_is_imported_where_there_is_no_triton() -> None:
    program = "import sys; sys.modules['triton'] = None; import megarl.parallel, megatron.core.models.gpt"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
