"""Each rule of the placement, by its message."""

import re
from importlib import metadata
from typing import Any

import pytest

from megarl.config import Config, check_engines, from_dict, generation
from megarl.config.check import check_train
from megarl.config.check_model import check_model
from megarl.errors import ConfigError
from megarl.host.device.platform import PLATFORMS

HF_CONFIG = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
}


def config(
    *, dp: int = 1, engine: dict[str, int] | None = None, sync: dict[str, Any] | None = None, **placement: Any
) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": "models/tiny"},
        "data": {"train": ["train.parquet"]},
        "sft": {"train": ["demos.parquet"]},
        "actor": {"layout": {"dp": dp}},
        "rollout": {"engine": engine or {}},
        "placement": placement,
        "sync": sync or {},
    }
    return from_dict(Config, tree)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_engines_may_repeat_key_value_heads(tp: int) -> None:
    check_model(config(engine={"tp": tp}), HF_CONFIG)


def test_every_stage_of_an_engine_has_a_layer() -> None:
    check_model(config(dp=2, engine={"pp": 2}), HF_CONFIG)
    with pytest.raises(ConfigError, match=r"^rollout.engine.pp: got 3, but the model has num_hidden_layers=2, so that"):
        check_model(config(dp=3, engine={"pp": 3}), HF_CONFIG)


@pytest.mark.parametrize("tp", [3, 6, 16])
def test_engine_tp_must_divide_heads_and_mlp(tp: int) -> None:
    expected = (
        f"rollout.engine.tp: got {tp}, which does not divide the model (num_attention_heads=8, intermediate_size=96, "
        "num_key_value_heads=2); valid values: 1, 2, 4, 8"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        check_model(config(engine={"tp": tp}), HF_CONFIG)


def test_nccl_is_suspended_where_something_sleeps_and_nccl_can(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"^placement.suspend_nccl: got true with placement.offload=false, where nobo"
    ):
        check_train(config(suspend_nccl=True))
    asked = config(offload=True, suspend_nccl=True)
    with pytest.raises(
        ConfigError, match=r"^placement.suspend_nccl: got true, but on cpu processes do not use NCCL; se"
    ):
        check_train(asked)
    monkeypatch.setattr(generation, "platform", PLATFORMS["cuda"])
    known = metadata.version
    for version, is_refused in (("2.28.9", True), ("2.29.7", False), ("2.30.4", False)):
        monkeypatch.setattr(
            metadata, "version", lambda name, v=version: v if name == "nvidia-nccl-cu13" else known(name)
        )
        if is_refused:
            with pytest.raises(
                ConfigError, match=r"nvidia-nccl-cu13 is 2.28.9, expected at least 2.29.7; update it, o"
            ):
                check_train(asked)
        else:
            check_train(asked)


def test_memory_that_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_engines, "platform", PLATFORMS["cuda"])
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    expected = (
        r"^PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF: got 'backend:cudaMallocAsync', but processes cannot share"
    )
    with pytest.raises(ConfigError, match=expected):
        check_train(config())
    check_train(config(sync={"cuda_ipc": False}))
    check_train(config(mode="split"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    check_train(config())
