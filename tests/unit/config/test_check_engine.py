"""Arguments that are handed to vLLM: which ones pass, and what is said of the others."""

import re
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest

from megarl.config import Config, from_dict
from megarl.config.check import check_eval, check_train
from megarl.config.check_engine import REFUSED, engine_arguments
from megarl.device.platform import platform
from megarl.errors import ConfigError
from megarl.rollout.engine import engine_arguments_of, engine_spec


def config(**arguments: Any) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": "models/tiny"},
        "data": {"train": ["train.parquet"]},
        "rollout": {"engine": {"vllm": arguments}},
    }
    return from_dict(Config, tree)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"max_num_batch_tokens": 512},
            "rollout.engine.vllm.max_num_batch_tokens: is not an engine argument of the installed vLLM; did you mean "
            "'rollout.engine.vllm.max_num_batched_tokens'?",
        ),
        (
            {"hf-overrides": {}},
            "rollout.engine.vllm.hf-overrides: is not an engine argument of the installed vLLM; did you mean "
            "'rollout.engine.vllm.hf_overrides'?",
        ),
        (
            {"zzz": 1},
            "rollout.engine.vllm.zzz: is not an engine argument of the installed vLLM; see vLLM's EngineArgs",
        ),
        (
            {"tensor_parallel_size": 2},
            "rollout.engine.vllm.tensor_parallel_size: cannot be set here: set rollout.engine.tp",
        ),
        (
            {"logprobs_mode": "raw_logprobs"},
            "rollout.engine.vllm.logprobs_mode: cannot be set here: training needs the log-probs of the distribution "
            "that was sampled from",
        ),
        (
            {"max_num_batched_tokens": "many"},
            "rollout.engine.vllm.max_num_batched_tokens: got 'many' (str), expected int | None",
        ),
        (
            {"async_scheduling": 1},
            "rollout.engine.vllm.async_scheduling: got 1 (int), expected bool | None",
        ),
        (
            {"max_num_batched_tokens": True},
            "rollout.engine.vllm.max_num_batched_tokens: got True (bool), expected int | None",
        ),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    for check in (check_train, check_eval):
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            check(config(**arguments))


def test_right_arguments_reach_vllm() -> None:
    right = {"max_num_batched_tokens": 512, "async_scheduling": None, "hf_overrides": {"rope_theta": 1e6}}
    check_train(config(**right))
    check_eval(config(**right))
    arguments = engine_arguments_of(engine_spec(config(**right)))
    assert {name: arguments[name] for name in right} == right


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_megarl_sets_cannot_be_set_a_second_time(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_DEVICE", device)
    platform.cache_clear()
    try:
        engine = {"num_engines": 1, "tp": 2, "kv_cache_mib": 1, "block_size": 16, "enforce_eager": True}
        spec = engine_spec(from_dict(Config, {"rollout": {"engine": engine}}))
        assert engine_arguments_of(replace(spec, can_sleep=True)).keys() <= REFUSED.keys()
    finally:
        platform.cache_clear()


def test_the_names_are_vllms() -> None:
    """The source says what the class says; reading it imports nothing of vLLM."""
    from vllm.engine.arg_utils import EngineArgs

    names = {field.name for field in fields(EngineArgs) if not field.name.startswith("_")}
    assert engine_arguments().keys() == names
    assert REFUSED.keys() <= names
    code = (
        "import sys; from megarl.config.check_engine import engine_arguments; engine_arguments(); "
        "print([m for m in sys.modules if m.startswith('vllm')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
