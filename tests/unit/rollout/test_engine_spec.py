"""What a run's configuration makes of its engine."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.config import Config, from_dict
from megarl.host.device.platform import platform
from megarl.rollout.engine import VllmEngine
from megarl.rollout.engine_spec import engine_arguments, engine_spec


@pytest.mark.parametrize(
    ("deterministic", "asked", "cached"), [(False, True, True), (False, False, False), (True, True, False)]
)
def test_a_deterministic_run_has_no_prefix_cache(deterministic: bool, asked: bool, cached: bool) -> None:
    engine = {"prefix_caching": asked, "max_num_seqs": 3}
    config = from_dict(Config, {"run": {"deterministic": deterministic}, "rollout": {"engine": engine}})
    spec = engine_spec(config)
    assert spec.config.prefix_caching is cached
    assert spec.config.max_num_seqs == 3


@pytest.mark.parametrize("published", [False, True], ids=["text", "with a tower"])
def test_engines_on_cpus_cache_no_prefixes_of_delta_nets(published: bool, tmp_path: Path) -> None:
    config = from_dict(Config, {"model": {"path": str(tmp_path)}})
    for sizes, cached in (({"num_attention_heads": 4}, True), ({"linear_num_key_heads": 2}, False)):
        (tmp_path / "config.json").write_text(json.dumps({"text_config": sizes} if published else sizes))
        assert engine_arguments(engine_spec(config))["enable_prefix_caching"] is cached


class RecordingEngine:
    """What vLLM's `LLM` is told."""

    llm_engine = SimpleNamespace(
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(kv_cache_size_tokens=640)),
    )

    def __init__(self, **arguments: object) -> None:
        self.arguments = arguments
        self.calls: list[tuple[str, object]] = []

    def update_weight_version(self, version: str) -> None:
        """The weights that it starts with."""

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", tags))


@pytest.fixture
def _no_platform_chosen() -> Iterator[None]:
    platform.cache_clear()
    yield
    platform.cache_clear()


@pytest.mark.usefixtures("_no_platform_chosen")
@pytest.mark.parametrize(
    ("device", "arguments", "calls"),
    [
        ("cuda", {"enable_sleep_mode": True}, [("sleep", 2), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]),
        ("cpu", {}, []),
    ],
)
def test_engines_sleep_on_cuda_only(
    device: str, arguments: dict[str, bool], calls: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level 2 drops weights and KV cache; they come back one by one, under vLLM's names."""
    monkeypatch.setenv("MEGARL_DEVICE", device)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=RecordingEngine))
    engine = VllmEngine(replace(engine_spec(from_dict(Config, {})), can_sleep=True))
    engine.sleep()
    engine.wake(("weights",))
    engine.wake(("kv_cache",))
    assert engine.llm.calls == calls
    assert {key: value for key, value in engine.llm.arguments.items() if "sleep" in key} == arguments


@pytest.mark.usefixtures("_no_platform_chosen")
@pytest.mark.parametrize(
    ("device", "run", "invariant"),
    [
        ("cuda", {"deterministic": True}, "1"),
        ("cuda", {"batch_invariant": True}, "1"),
        ("cuda", {}, None),
        ("cpu", {"deterministic": True}, None),
    ],
)
def test_engines_on_cuda_are_batch_invariant_where_it_is_asked_for(
    device: str, run: dict[str, bool], invariant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is set before vLLM is imported, and is one that vLLM reads."""
    from vllm.envs import environment_variables

    assert "VLLM_BATCH_INVARIANT" in environment_variables
    seen = []

    class Importing(SimpleNamespace):
        def __getattr__(self, name: str) -> type[RecordingEngine]:
            assert name == "LLM"
            seen.append(os.environ.get("VLLM_BATCH_INVARIANT"))
            return RecordingEngine

    monkeypatch.setenv("MEGARL_DEVICE", device)
    # Undone afterwards, whatever the engine sets.
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    monkeypatch.setitem(sys.modules, "vllm", Importing(__path__=[], __spec__=None))
    VllmEngine(engine_spec(from_dict(Config, {"run": run})))
    assert set(seen) == {invariant}


@pytest.mark.usefixtures("_no_platform_chosen")
def test_engines_suspend_nccl_when_they_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setenv("MEGARL_DEVICE", "cuda")
    for asked in (False, True):
        placement = {"offload": True, "suspend_nccl": asked}
        told = engine_arguments(engine_spec(from_dict(Config, {"placement": placement})))
        assert told["enable_sleep_mode"] is True
        assert told.get("enable_nccl_comm_suspend", False) is asked
    assert "enable_nccl_comm_suspend" in {field.name for field in fields(EngineArgs)}


def test_engines_capture_routing_where_it_is_replayed_from_them() -> None:
    """vLLM's option and the field of its outputs are known to the installed version."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.outputs import CompletionOutput

    moe: dict[str, object] = {"actor": {"moe": {"replay_routing": True}}}
    told = engine_arguments(engine_spec(from_dict(Config, moe)))
    assert told["enable_return_routed_experts"] is True
    for tree in ({}, moe | {"rollout": {"source": "replay"}}):
        assert "enable_return_routed_experts" not in engine_arguments(engine_spec(from_dict(Config, tree)))
    assert "enable_return_routed_experts" in {field.name for field in fields(EngineArgs)}
    assert "routed_experts" in {field.name for field in fields(CompletionOutput)}
