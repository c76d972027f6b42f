"""Arguments that are handed to vLLM: which ones pass, and what is said of the others."""

import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.roles import engine_spec
from megarl.config import Config, from_dict
from megarl.config.check import check_eval, check_train
from megarl.config.check_engines import check_cache
from megarl.config.check_model import check_engine_model, check_model
from megarl.config.engine_arguments import LIMITED, PASSED, REFUSED, check_argument, known_arguments
from megarl.errors import ConfigError
from megarl.host.device.platform import platform
from megarl.rollout.engine_spec import engine_arguments
from megarl.types.messages import Vision


def config(**arguments: Any) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": "models/tiny"},
        "data": {"train": ["train.parquet"]},
        "rollout": {"engine": {"vllm": arguments}},
    }
    return from_dict(Config, tree)


def test_right_arguments_reach_vllm() -> None:
    right = {"max_num_batched_tokens": 512, "async_scheduling": None, "kv_offloading_size": 1.0, "load_format": "auto"}
    check_train(config(**right))
    check_eval(config(**right))
    arguments = engine_arguments(engine_spec(config(**right)))
    assert {name: arguments[name] for name in right} == right


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_megarl_sets_cannot_be_set_a_second_time(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_DEVICE", device)
    platform.cache_clear()
    try:
        engine = {"num_engines": 1, "tp": 2, "kv_cache_mib": 1, "block_size": 16, "enforce_eager": True}
        spec = engine_spec(from_dict(Config, {"rollout": {"engine": engine}}))
        for vision in (None, Vision(store="images")):
            assert engine_arguments(replace(spec, can_sleep=True, vision=vision)).keys() <= REFUSED.keys()
    finally:
        platform.cache_clear()


def test_the_names_are_vllms() -> None:
    """The source says what the class says; reading it imports nothing of vLLM."""
    from vllm.engine.arg_utils import EngineArgs

    names = {field.name for field in fields(EngineArgs) if not field.name.startswith("_")}
    assert known_arguments().keys() == names
    assert REFUSED.keys() <= names
    code = (
        "import sys; from megarl.config.engine_arguments import known_arguments; known_arguments(); "
        "print([m for m in sys.modules if m.startswith('vllm')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"


def test_every_argument_of_vllm_is_classified() -> None:
    """An argument of another version of vLLM is refused until someone has looked at it."""
    known, classes = known_arguments(), (PASSED, set(LIMITED), set(REFUSED))
    assert set().union(*classes) == known.keys()
    assert sum(map(len, classes)) == len(known)


@pytest.mark.parametrize(
    "name",
    [
        "hf_overrides", "model_weights", "worker_cls", "scheduler_cls", "logits_processors", "cpu_offload_gb",
        "offload_group_size", "dcp_q_replicate", "kv_transfer_config", "reasoning_config", "override_generation_config",
        "disable_sliding_window", "watermark_config", "mamba_config",
    ],
)  # fmt: skip
def test_what_changes_the_policy_or_its_weights_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.engine\.vllm\.{name}: cannot be set here: "):
        check_train(config(**{name: 1}))


def test_an_argument_of_a_later_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megarl.config.engine_arguments.known_arguments", lambda: {"weight_noise": "float", "log_level": "str"}
    )
    with pytest.raises(ConfigError, match="weight_noise: cannot be set here: it is new in the installed vLLM"):
        check_argument("weight_noise", 0.1, "rollout.engine.vllm")
    check_argument("log_level", "DEBUG", "rollout.engine.vllm")


def test_queries_are_not_replicated_where_tokens_are_split() -> None:
    arguments = engine_arguments(engine_spec(config(decode_context_parallel_size=2)))
    assert arguments["dcp_q_replicate"] is False
    assert "dcp_q_replicate" not in engine_arguments(engine_spec(config()))


def settings(engine: dict[str, Any], *, correction: str = "tis_upper", **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": "models/tiny"},
        "data": {"train": ["train.parquet"]},
        "algo": {"correction": {"name": correction}},
        "rollout": {"engine": engine},
    }
    return from_dict(Config, tree | sections)


HF_CONFIG = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
}


def test_a_model_must_have_the_layer_that_drafts() -> None:
    mtp = settings({"speculation": {"method": "mtp"}})
    check_model(mtp, {**HF_CONFIG, "num_nextn_predict_layers": 1})
    with pytest.raises(ConfigError, match=r"method: got mtp, but config\.json has no num_nextn_predict_layers"):
        check_model(mtp, HF_CONFIG)


def test_windows_in_some_layers_only_are_for_training_without_engines() -> None:
    windowed = {**HF_CONFIG, "use_sliding_window": True, "sliding_window": 64}
    check_model(settings({}), {**windowed, "max_window_layers": 0})
    some = {**windowed, "max_window_layers": 1}
    check_model(settings({}), some | {"use_sliding_window": False})
    check_model(settings({}), some, for_sft=True)
    for each in (some, {**windowed, "layer_types": ["full_attention", "sliding_attention"]}):
        with pytest.raises(
            ConfigError, match=r"use_sliding_window=true .* vLLM builds such models with windows in all"
        ):
            check_model(settings({}), each)


def test_experts_are_not_rounded_on_cpus() -> None:
    rounded, experts = settings({"quantization": "fp8_per_channel"}), {"num_experts": 4, "moe_intermediate_size": 64}
    check_model(rounded, HF_CONFIG)
    with pytest.raises(ConfigError, match="quantization: got fp8_per_channel for a model with experts, whose weights"):
        check_model(rounded, HF_CONFIG | experts)


@pytest.mark.parametrize(
    ("on_cpu", "tp", "model", "why"),
    [
        (True, 2, {"num_experts": 4}, "vLLM's CPU build ends by a segmentation fault with it"),
        (False, 2, {}, "the model has no experts"),
        (False, 1, {"num_experts": 4}, "rollout.engine.tp=1 leaves a single worker to hold them"),
    ],
)
def test_whole_experts_need_a_gpu_experts_and_workers(
    on_cpu: bool, tp: int, model: dict[str, object], why: str
) -> None:
    asked = settings({"expert_parallel": True, "tp": tp})
    message = f"rollout.engine.expert_parallel: got true, but {why}; set it to false"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_engine_model(asked, model, on_cpu=on_cpu)
    check_engine_model(settings({"expert_parallel": True, "tp": 2}), {"num_experts": 4}, on_cpu=False)


@pytest.mark.parametrize(
    ("device", "engine", "arguments"),
    [
        ("cpu", {"quantization": "fp8_per_block"}, {"quantization": "megarl_fp8_per_block"}),
        ("cuda", {"quantization": "fp8_per_block"}, {"quantization": "fp8_per_block"}),
        ("cuda", {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e4m3"}),
        ("cuda", {"tp": 2, "expert_parallel": True}, {"enable_expert_parallel": True}),
        (
            "cuda",
            {"speculation": {"method": "ngram"}},
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 3,
                    "prompt_lookup_min": 2,
                    "prompt_lookup_max": 4,
                }
            },
        ),
        (
            "cuda",
            {"speculation": {"method": "mtp", "num_tokens": 1}},
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        ),
        ("cuda", {}, {}),
        ("cuda", {"pp": 2}, {"pipeline_parallel_size": 2}),
    ],
)
def test_what_vllm_is_told(
    device: str, engine: dict[str, Any], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGARL_DEVICE", device)
    platform.cache_clear()
    try:
        told = engine_arguments(engine_spec(settings(engine)))
    finally:
        platform.cache_clear()
    names = ("quantization", "kv_cache_dtype", "speculative_config", "enable_expert_parallel")
    names += ("pipeline_parallel_size",)
    assert {name: told[name] for name in names if name in told} == arguments


def test_vllm_knows_what_it_is_told() -> None:
    """The names of its methods and data types, which it checks only on the devices that have them."""
    from typing import get_args

    from vllm.config.cache import CacheDType
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES
    from vllm.config.speculative import SpeculativeConfig

    from megarl.config.engine import EngineConfig

    schemes, dtypes = (EngineConfig.__annotations__[name] for name in ("quantization", "kv_cache_dtype"))
    literals = [value for hint in (schemes, dtypes) for part in get_args(hint) for value in get_args(part)]
    assert {each for each in literals if "per" in each} <= set(ONLINE_QUANT_SHORTHAND_NAMES)
    assert {each for each in literals if "per" not in each} <= set(get_args(CacheDType))
    drafts = {"method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"}
    assert drafts <= {field.name for field in fields(SpeculativeConfig)}


@pytest.mark.parametrize(("limit", "refused"), [(f"{300 << 20}", True), (f"{512 << 20}", False), ("max", False)])
def test_a_cache_that_the_container_cannot_hold_is_refused(
    limit: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines of 200 MiB each need 400, whatever the host has."""
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr("megarl.host.memory._CGROUP_LIMITS", (str(tmp_path / "memory.max"),))
    chosen = from_dict(Config, {"rollout": {"engine": {"kv_cache_mib": 200, "num_engines": 2}}})
    with pytest.raises(ConfigError, match=r"400 MiB, but .* 300 MiB of memory") if refused else nullcontext():
        check_cache(chosen)
