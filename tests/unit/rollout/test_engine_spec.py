"""What a run's configuration makes of its engine."""

import functools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megarl.cluster.roles import engine_spec
from megarl.config import Config, from_dict
from megarl.config.generation import Sampling
from megarl.host.device.platform import platform
from megarl.rollout import prepare
from megarl.rollout.engine import GenerationRequest, VllmEngine
from megarl.rollout.engine_spec import engine_arguments
from megarl.rollout.images import text_prompt
from tests.helpers.small_model import write_config
from tests.unit.plan.test_experts import EXPERTS


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


@pytest.fixture(autouse=True)
def _no_vllm_to_lend_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here `RecordingEngine` is all of vLLM."""
    monkeypatch.setattr(prepare, "lend_torchvision", lambda: None)


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
    assert engine.sleep() is (device == "cuda")
    engine.wake(("weights",))
    engine.wake(("kv_cache",))
    assert engine.llm.calls == calls
    assert {key: value for key, value in engine.llm.arguments.items() if "sleep" in key} == arguments


@pytest.mark.usefixtures("_no_platform_chosen")
@pytest.mark.parametrize(("sync", "level"), [("merged", 2), ("auto", 1), ("adapter", 1)])
def test_weights_that_no_sync_sends_again_are_kept_while_engines_sleep(
    sync: str, level: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEGARL_DEVICE", "cuda")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=RecordingEngine))
    model = {"path": str(write_config(tmp_path))}
    engine = VllmEngine(engine_spec(from_dict(Config, {"model": model, "actor": {"lora": {"sync": sync}}})))
    assert engine.sleep() is (level == 2)
    assert engine.llm.calls == [("sleep", level)]


@pytest.mark.usefixtures("_no_platform_chosen")
@pytest.mark.parametrize(
    ("device", "targets", "layers"),
    [
        ("cpu", ["attention"], ["k_proj", "o_proj", "q_proj", "v_proj"]),
        ("cpu", ["mlp"], ["down_proj", "gate_proj", "up_proj"]),
        ("cuda", ["experts"], ["experts"]),
    ],
)
def test_engines_make_room_for_adapters_in_their_layers_alone(
    device: str, targets: list[str], layers: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the names are those of vLLM's arguments. On CUDA no graph is captured without adapters."""
    from vllm.config import CompilationConfig
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setenv("MEGARL_DEVICE", device)
    model = {"path": str(write_config(tmp_path, **(EXPERTS if device == "cuda" else {})))}
    lora = {"rank": 9, "targets": targets, "sync": "adapter"}
    told = engine_arguments(engine_spec(from_dict(Config, {"model": model, "actor": {"lora": lora}})))
    expected = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16, "lora_target_modules": layers}
    assert {name: told[name] for name in expected} == expected
    assert told.get("enable_mixed_moe_lora_format", False) is ("experts" in layers)
    assert told.get("compilation_config") == ({"cudagraph_specialize_lora": False} if device == "cuda" else None)
    assert {*expected, "enable_mixed_moe_lora_format"} <= {field.name for field in fields(EngineArgs)}
    assert "cudagraph_specialize_lora" in CompilationConfig.__dataclass_fields__
    merged = engine_spec(from_dict(Config, {"model": model, "actor": {"lora": {**lora, "sync": "merged"}}}))
    assert "enable_lora" not in engine_arguments(merged)


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


@pytest.mark.usefixtures("_no_platform_chosen")
def test_a_layer_that_drafts_is_kept_while_its_engine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own worker finds what it keeps by the pattern: the drafter's weights, without those of the model."""
    from vllm.v1.worker.gpu_worker import Worker

    monkeypatch.setenv("MEGARL_DEVICE", "cuda")
    sleeps, drafts = {"placement": {"offload": True}}, {"rollout": {"engine": {"speculation": {"method": "mtp"}}}}
    awake: dict[str, object] = {"placement": {"offload": False}} | drafts
    for tree in (sleeps, awake):
        assert "sleep_preserve_parameter_names" not in engine_arguments(engine_spec(from_dict(Config, tree)))
    told = engine_arguments(engine_spec(from_dict(Config, sleeps | drafts)))
    embedding = torch.nn.Embedding(2, 2)
    drafter = torch.nn.ModuleDict({"embed": embedding, "layer": torch.nn.Linear(2, 2)})
    model = torch.nn.ModuleDict({"embed": embedding, "layer": torch.nn.Linear(2, 2)})
    worker = SimpleNamespace(
        get_draft_model=lambda: drafter,
        model_config=SimpleNamespace(sleep_preserve_parameter_names=told["sleep_preserve_parameter_names"]),
    )
    worker._get_sleep_parameters = functools.partial(Worker._get_sleep_parameters, worker)
    # Parameters of CPUs are kept as they are, so these are said to be of another device.
    copies = {"weight": torch.full((2, 2), 3.0), "bias": torch.full((2,), 5.0)}
    found = worker._get_sleep_parameters(model)
    monkeypatch.setattr(
        worker,
        "_get_sleep_parameters",
        lambda _: {
            name: SimpleNamespace(is_cpu=False, detach=lambda name=name: copies.get(name.split(".")[-1]))
            for name in found
        },
    )
    Worker._save_sleep_parameters(worker, model)
    assert {name: value.tolist() for name, value in worker._sleep_saved_parameters.items()} == {
        "draft.layer.weight": copies["weight"].tolist(),
        "draft.layer.bias": copies["bias"].tolist(),
    }
    monkeypatch.setattr(worker, "_get_sleep_parameters", lambda _: found)
    Worker._restore_sleep_parameters(worker, model)
    assert torch.equal(drafter["layer"].weight, copies["weight"])
    assert not torch.equal(model["layer"].weight, copies["weight"])


def test_engines_capture_routing_where_it_is_replayed_from_them() -> None:
    """vLLM's option and the field of its outputs are known to the installed version."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.outputs import CompletionOutput

    moe: dict[str, object] = {"actor": {"moe": {"replay_routing": True}}}
    told = engine_arguments(engine_spec(from_dict(Config, moe)))
    assert told["enable_return_routed_experts"] is True
    for tree in ({}, moe | {"rollout": {"source": "replay"}}):
        assert "enable_return_routed_experts" not in engine_arguments(engine_spec(from_dict(Config, tree)))
    assert "enable_return_routed_experts" in {field.name for field in fields(EngineArgs)}
    assert "routed_experts" in {field.name for field in fields(CompletionOutput)}
    assert SamplingParams(routed_experts_prompt_start=3).routed_experts_prompt_start == 3


def test_engines_stop_at_texts_that_are_special_tokens() -> None:
    """By default, vLLM looks for stop strings in a text without special tokens."""
    from tokenizers import AddedToken
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    from megarl_lab.recipes.tiny_model import make_byte_tokenizer

    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens([AddedToken("[END]", special=True)])
    sampling = Sampling(temperature=1.0, stop=("[END]",))
    request = GenerationRequest(token_ids=(1,), seed=0, sampling=sampling, max_tokens=9)
    llm = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 300))
    engine = SimpleNamespace(llm=llm, _prompt=text_prompt)
    _, (params,) = VllmEngine._inputs(cast(VllmEngine, engine), [request])
    asked = SimpleNamespace(request_id="0", prompt_token_ids=[1], sampling_params=params)
    written = tokenizer("1+1[END]", add_special_tokens=False)["input_ids"]
    assert FastIncrementalDetokenizer(tokenizer, asked).update(written, False) == "[END]"
