"""How adapters reach engines: what auto means on a device, and what does not go along with adapters sent alone."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest

from megarl.config.check_lora import check_lora, check_lora_sync
from megarl.config.check_model import check_engine_model
from megarl.config.load import from_dict
from megarl.config.lora import ENGINE_RANKS, LoraConfig, sent_alone
from megarl.config.schema import Config
from megarl.config.setting import check_values
from megarl.errors import ConfigError
from megarl.host.device.platform import platform


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MEGARL_DEVICE", request.param)
    platform.cache_clear()
    yield request.param
    platform.cache_clear()


def config(lora: dict[str, Any], **sections: Any) -> Config:
    return from_dict(Config, {"actor": {"lora": lora}, **sections})


@pytest.mark.parametrize("device", ["cpu", "cuda"], indirect=True)
def test_auto_sends_adapters_alone_on_cuda_only(device: str) -> None:
    auto, adapter, merged = (LoraConfig(sync=sync) for sync in ("auto", "adapter", "merged"))
    assert sent_alone(auto) is (auto if device == "cuda" else None)
    assert sent_alone(adapter) is adapter
    assert sent_alone(merged) is sent_alone(None) is None


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        (
            {"train": "projector"},
            r"^actor\.vision\.train: got projector with actor\.lora, but adapters are trained alone",
        ),
        ({"lr": 1e-5}, r"^actor\.vision\.lr: got 1e-05 with actor\.vision\.train=none; set train to projector or all"),
    ],
)
def test_a_tower_is_not_trained_beside_adapters(vision: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_values(from_dict(Config, {"actor": {"lora": {}, "vision": vision}}), ("actor",))


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "sync", "refused"),
    [
        ("bfloat16", "auto", True),
        ("bfloat16", "adapter", False),
        ("bfloat16", "merged", False),
        ("float32", "auto", False),
    ],
)
def test_nothing_is_merged_into_bfloat16_unasked(device: str, dtype: str, sync: str, refused: bool) -> None:
    run = config({"sync": sync}, model={"dtype": dtype})
    if not refused:
        check_lora_sync(run)
        return
    with pytest.raises(ConfigError, match=r"^actor\.lora\.sync: got auto with model\.dtype=bfloat16 on cpu, .*; set "):
        check_lora_sync(run)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"sync": {"delta": True}}, r"^actor\.lora\.sync: got auto and sync\.delta=true, but every element .* changes"),
        ({"sync": {"dtype": "bfloat16"}}, r"and sync\.dtype=bfloat16, but adapters are small.*; leave sync\.dtype out"),
        ({"rollout": {"engine": {"vllm": {"load_format": "dummy"}}}}, r"load_format=dummy, but engines have to read"),
    ],
)
def test_what_does_not_go_along_with_adapters_alone(device: str, sections: dict[str, Any], message: str) -> None:
    float32 = {"dtype": "float32"}
    with pytest.raises(ConfigError, match=message):
        check_lora_sync(config({}, model=float32, **sections))
    check_lora_sync(config({"sync": "merged"}, model=float32, **sections))
    check_lora_sync(from_dict(Config, {"model": float32, **sections}))


def test_engines_make_room_for_the_next_rank_that_vllm_knows() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == ENGINE_RANKS
    assert [LoraConfig(rank=rank).engine_rank for rank in (1, 2, 8, 9, 32, 257, 512)] == [1, 8, 8, 16, 32, 320, 512]
    assert LoraConfig(rank=8, expert_rank=40).engine_rank == 64
    for lora in ({"rank": 513}, {"expert_rank": 600}):
        with pytest.raises(ConfigError, match=r"actor\.lora\.rank: got (513|600), but vLLM .* at most 512; lower it"):
            check_lora_sync(config({**lora, "sync": "adapter"}))
        check_lora_sync(config({**lora, "sync": "merged"}))


@pytest.mark.parametrize("sync", ["auto", "adapter", "merged"])
def test_engines_on_cpus_have_no_adapters_beside_experts(sync: str) -> None:
    """vLLM then asks for kernels in Triton, even for adapters of attention alone."""
    run, experts = config({"sync": sync, "targets": ["attention"]}), {"num_experts": 6}
    check_engine_model(run, experts, on_cpu=False)
    check_engine_model(run, {}, on_cpu=True)
    with pytest.raises(ConfigError, match=r"actor\.lora\.sync: .*") if sync == "adapter" else nullcontext():
        check_engine_model(run, experts, on_cpu=True)


@pytest.mark.parametrize("name", ["enable_lora", "max_loras", "max_lora_rank", "lora_target_modules", "lora_dtype"])
def test_adapters_of_engines_follow_from_those_of_the_actor(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.engine\.vllm\.{name}: cannot be set here: "):
        config({}, rollout={"engine": {"vllm": {name: 1}}}).rollout.engine.check("rollout.engine")


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_transformer_engines_layers_take_adapters(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    check_lora(config({"rank": 4}))
