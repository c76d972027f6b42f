"""Each rule of the placement, by its message."""

import re
from importlib import metadata
from typing import Any

import pytest

from megarl.config import Config, check_engines, from_dict, generation
from megarl.config.check import check_sft, check_train
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dp": 8, "trainer": {"num_nodes": 3}},
            "placement.trainer.num_nodes: got 3, expected a divisor of 8, the 8 ranks of actor.layout; change either",
        ),
        (
            {"dp": 8, "trainer": {"num_nodes": 2, "devices_per_node": 8}},
            "placement.trainer: num_nodes=2 × devices_per_node=8 is not the 8 ranks of actor.layout; change either",
        ),
        (
            {"engines": {"num_nodes": 2}},
            "placement.engines: is set, but with placement.mode=colocated engines run on the trainer's nodes; remove "
            "it or set placement.mode=split",
        ),
        (
            {"dp": 2, "engine": {"num_engines": 2, "tp": 2}},
            "rollout.engine.num_engines=2 × rollout.engine.tp=2 = 4 devices, but placement.mode=colocated shares the "
            "trainer's 2; lower one of them or set placement.mode=split",
        ),
        (
            {"dp": 12, "engine": {"num_engines": 2, "tp": 4}, "trainer": {"num_nodes": 2}},
            "rollout.engine: an engine has tp=4 × pp=1 = 4 workers, expected a divisor or a multiple of the 6 devices "
            "of each node of placement.trainer, since an engine lies on one node or fills several; change tp, pp or "
            "placement.trainer",
        ),
        (
            {"sync": {"dtype": "bfloat16"}},
            "sync.dtype: got bfloat16, which model.dtype already is; set sync.dtype=null",
        ),
        (
            {"sync": {"delta": True, "host_group": "device"}, "mode": "split"},
            "sync.delta: got true with sync.host_group=device, but differences are made in host memory; set "
            "sync.host_group=gloo or sync.delta=false",
        ),
        (
            {"sync": {"cuda_ipc": True}, "mode": "split"},
            "sync.cuda_ipc: got true with placement.mode=split, but then no engine shares a device with a rank; set "
            "sync.cuda_ipc=false or placement.mode=colocated",
        ),
        (
            {"sync": {"cuda_ipc": True}},
            "sync.cuda_ipc: got true, but processes cannot share a device's memory on cpu; set sync.cuda_ipc=false",
        ),
        (
            {"mode": "split", "offload": True},
            "placement.offload: got true with placement.mode=split, but then engines do not share the trainer's "
            "memory; set one of the two otherwise",
        ),
        (
            {"mode": "split", "engine": {"num_engines": 3}, "engines": {"num_nodes": 2}},
            "placement.engines.num_nodes: got 2, expected a divisor of 3, the 3 devices of "
            "rollout.engine.num_engines=3 × rollout.engine.tp=1; change either",
        ),
        (
            {"mode": "split", "engine": {"num_engines": 3, "tp": 2}, "engines": {"num_nodes": 2}},
            "rollout.engine: an engine has tp=2 × pp=1 = 2 workers, expected a divisor or a multiple of the 3 devices "
            "of each node of placement.engines, since an engine lies on one node or fills several; change tp, pp or "
            "placement.engines",
        ),
        (
            {"mode": "split", "engine": {"num_engines": 3, "tp": 2, "pp": 3}, "engines": {"num_nodes": 4}},
            "placement.engines.num_nodes: got 4, expected a divisor of 18, the 18 devices of "
            "rollout.engine.num_engines=3 × rollout.engine.tp=2 × rollout.engine.pp=3; change either",
        ),
    ],
)
def test_unsound_placements(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_train(config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"dp": 8, "trainer": {"num_nodes": 2, "devices_per_node": 4}, "engine": {"num_engines": 2, "tp": 4}},
        {"dp": 4, "engine": {"num_engines": 1, "tp": 2}, "offload": True},
        {"mode": "split", "engine": {"num_engines": 4, "tp": 2}, "engines": {"num_nodes": 2, "devices_per_node": 4}},
        {"dp": 8, "engine": {"num_engines": 2, "tp": 4}, "trainer": {"num_nodes": 4}},
        {"mode": "split", "engine": {"num_engines": 2, "tp": 4, "pp": 2}, "engines": {"num_nodes": 4}},
    ],
)
def test_sound_placements(changes: dict[str, Any]) -> None:
    check_train(config(**changes))


def test_a_warm_start_has_no_engines() -> None:
    check_sft(config(engine={"num_engines": 5}))
    with pytest.raises(ConfigError, match=r"placement\.trainer\.num_nodes: got 3"):
        check_sft(config(dp=8, trainer={"num_nodes": 3}))


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


@pytest.mark.parametrize(
    ("schedule", "changes", "message"),
    [
        ({"window_frac": 0.5}, {}, "rollout.schedule.window_frac: got 0.5 with rollout.schedule.staleness=0"),
        (
            {"staleness": 1},
            {"placement": {"mode": "colocated"}},
            "staleness: got 1 with placement.mode=colocated and rollout.schedule.on_update=finish, but engines that",
        ),
        (
            {"staleness": 1, "on_update": "continue"},
            {
                "placement": {"mode": "colocated"},
                "rollout": {"stop": ["</a>"], "schedule": {"staleness": 1, "on_update": "continue"}},
            },
            "staleness: got 1 with placement.mode=colocated and rollout.stop=['</a>'], but samples are interrupted",
        ),
        (
            {"staleness": 1, "on_update": "continue"},
            {"placement": {"mode": "colocated"}, "algo": {}},
            "staleness: got 1 with algo.correction.name=none",
        ),
        ({"staleness": 1}, {"algo": {}}, "staleness: got 1 with algo.correction.name=none"),
        # Samples of a record are as stale as they were when they were sampled.
        (
            {"staleness": 1},
            {"algo": {}, "rollout": {"schedule": {"staleness": 1}, "source": "replay", "replay_dir": "records"}},
            "staleness: got 1 with algo.correction.name=none",
        ),
        ({"staleness": 2}, {}, "staleness: got 2 with rollout.schedule.on_update=finish, but engines are empty"),
        (
            {"staleness": 1, "on_update": "continue"},
            {"rollout": {"engine": {"pp": 2}, "schedule": {"staleness": 1, "on_update": "continue"}}},
            "rollout.engine.pp: got 2 with rollout.schedule.on_update=continue, but vLLM cannot take tokens back",
        ),
        (
            {"staleness": 1, "on_update": "continue"},
            {"run": {"deterministic": True}},
            "run.deterministic: got true with rollout.schedule.on_update=continue",
        ),
    ],
)
def test_schedules_that_do_not_suit_the_run(schedule: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    tree = {
        "model": {"path": "models/tiny"},
        "data": {"train": ["train.parquet"]},
        "placement": {"mode": "split"},
        "algo": {"correction": {"name": "tis_upper"}},
        "rollout": {"schedule": schedule},
    }
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_train(from_dict(Config, {**tree, **changes}))


@pytest.mark.parametrize("schedule", [{}, {"staleness": 1}, {"staleness": 4, "on_update": "continue"}])
def test_schedules_that_suit_the_run(schedule: dict[str, Any]) -> None:
    tree = {
        "model": {"path": "models/tiny"},
        "data": {"train": ["train.parquet"]},
        "placement": {"mode": "split"},
        "algo": {"correction": {"name": "tis_upper"}},
        "rollout": {"schedule": schedule},
    }
    check_train(from_dict(Config, tree))
    if schedule.get("on_update") == "continue":
        # Engines that share devices interrupt samples.
        check_train(from_dict(Config, tree | {"placement": {"mode": "colocated", "offload": True}}))
    # Who wants to know what staleness costs without a correction has to say so.
    check_train(from_dict(Config, tree | {"algo": {"correction": {"forced": True}}}))


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
