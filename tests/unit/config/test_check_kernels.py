"""Settings that need kernels: refused without CUDA, without the package, and on devices that cannot compute them."""

import re
from dataclasses import replace
from typing import Any

import pytest

from megarl.config import check, models, optimizer, target
from megarl.config.check import check_batch_invariance, check_precision
from megarl.config.check_optimizers import check_optimizers
from megarl.config.models import fused_kernels
from megarl.config.schema import (
    ActorConfig,
    Config,
    CriticConfig,
    LayoutConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    PlacementConfig,
    RunConfig,
)
from megarl.config.setting import check_values
from megarl.errors import ConfigError
from megarl.host.device.accelerators import Device
from megarl.host.device.platform import PLATFORMS

FUSED = MoeConfig(grouped_gemm=True, fuse_permute=True, fuse_router=True, dispatcher="deepep")
SPLIT = LayoutConfig(dp=2, ep=2)


def config(dtype: Any = "bfloat16", **actor: Any) -> Config:
    return Config(model=ModelConfig(path="m", dtype=dtype), actor=ActorConfig(**actor))


def check_kernels(config: Config) -> None:
    check_values(config, ("actor",))
    check_precision(config)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """CUDA with all packages; the devices to fill in."""
    devices: list[Device] = []
    platform = PLATFORMS["cuda"]()
    monkeypatch.setattr(platform, "devices", lambda: devices)
    for module in (check, models, optimizer, target):
        monkeypatch.setattr(module, "platform", lambda: platform)
    monkeypatch.setattr(target, "find_spec", lambda name: name)
    monkeypatch.setattr(models, "transformer_engine_version", lambda: (2, 11))
    return devices


def device(capability: float | None) -> Device:
    return Device(name="NVIDIA X", memory_gib=80, driver="1", capability=capability)


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        ({"fp8": "blockwise"}, "actor.fp8: got blockwise, which needs CUDA, but this is cpu; set actor.fp8=null"),
        (
            {"moe": MoeConfig(dispatcher="deepep")},
            "actor.moe.dispatcher: got deepep, which needs CUDA, but this is cpu; set actor.moe.dispatcher=alltoall",
        ),
        (
            {"prefix_attention": "flex"},
            "actor.prefix_attention: got flex, which needs CUDA, but this is cpu; set actor.prefix_attention=null",
        ),
        (
            {"moe": MoeConfig(grouped_gemm=True)},
            "actor.moe.grouped_gemm: got true, which needs CUDA, but this is cpu; set actor.moe.grouped_gemm=false",
        ),
        (
            {"moe": MoeConfig(fuse_permute=True)},
            "actor.moe.fuse_permute: got true, which needs CUDA, but this is cpu; set actor.moe.fuse_permute=false",
        ),
        (
            {"moe": MoeConfig(fuse_router=True)},
            "actor.moe.fuse_router: got true, which needs CUDA, but this is cpu; set actor.moe.fuse_router=false",
        ),
    ],
)
def test_a_cpu_has_none_of_them(actor: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_kernels(config(**actor))
    check_kernels(config(moe=MoeConfig(grouped_gemm=False)))


@pytest.mark.parametrize(
    ("actor", "package"),
    [({"fp8": "mxfp8"}, "transformer_engine"), ({"moe": MoeConfig(dispatcher="deepep")}, "deep_ep")],
)
def test_their_package_must_be_there(
    actor: dict[str, Any], package: str, on_cuda: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"which needs the package {package}, but it is not installed; set actor"):
        check_kernels(config(layout=SPLIT, **actor))


@pytest.mark.parametrize(
    ("fp8", "capability", "expected"),
    [
        ("blockwise", 8.0, ">= 9.0"),
        ("mxfp8", 9.0, ">= 10.0 and < 12.0"),
        ("mxfp8", 12.0, ">= 10.0 and < 12.0"),
        ("blockwise", 9.0, None),
        ("mxfp8", 10.3, None),
        ("mxfp8", None, None),
    ],
)
def test_every_device_must_compute_the_recipe(
    fp8: str, capability: float | None, expected: str | None, on_cuda: list[Device]
) -> None:
    on_cuda += [device(10.0), device(capability)]
    if expected is None:
        check_kernels(config(fp8=fp8, layout=SPLIT, moe=FUSED))
        return
    message = (
        f"actor.fp8: got {fp8}, which needs compute capability {expected}, but NVIDIA X has {capability}; set "
        "actor.fp8 to another recipe, or to null"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_kernels(config(fp8=fp8))


def test_what_does_not_combine(on_cuda: list[Device]) -> None:
    with pytest.raises(ConfigError, match=r"^actor.fp8: got blockwise with model.dtype=float32, expected bfloat16;"):
        check_kernels(config("float32", fp8="blockwise"))
    for others in ({"share_prefixes": False}, {"layout": LayoutConfig(cp=2)}):
        with pytest.raises(ConfigError, match=r"^actor.prefix_attention: got flex with .*, where rows share nothing;"):
            check_kernels(config(prefix_attention="flex", **others))
    with pytest.raises(ConfigError, match=r"^actor.moe.dispatcher: got deepep with ep=1 and etp=1, where no token"):
        check_kernels(config(moe=FUSED))
    with pytest.raises(ConfigError, match=r"^actor.moe.fuse_router: got true, but with replay_routing=true"):
        check_kernels(config(moe=MoeConfig(fuse_router=True, replay_routing=True)))


def test_an_older_transformer_engine_lacks_some(on_cuda: list[Device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "transformer_engine_version", lambda: (2, 6))
    check_kernels(config(moe=MoeConfig(fuse_permute=True)))
    message = (
        "actor.moe.fuse_router: got true, but it needs Transformer Engine 2.7, and 2.6 is installed; set "
        "actor.moe.fuse_router to false or null"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_kernels(config(moe=MoeConfig(fuse_router=True)))


@pytest.mark.parametrize(
    ("moe", "engine", "num_groups", "permute", "router"),
    [
        (MoeConfig(), (2, 11), 1, True, True),
        (MoeConfig(), (2, 6), 1, True, False),
        (MoeConfig(), (2, 0), 1, False, False),
        (MoeConfig(), None, 1, False, False),
        (MoeConfig(), (2, 11), 8, True, False),
        (MoeConfig(replay_routing=True), (2, 11), 1, True, False),
        (MoeConfig(fuse_permute=False, fuse_router=False), (2, 11), 1, False, False),
    ],
)
def test_kernels_are_fused_wherever_they_can_be(
    moe: MoeConfig, engine: tuple[int, ...] | None, num_groups: int, permute: bool, router: bool
) -> None:
    found = fused_kernels(moe, engine=engine, num_groups=num_groups)
    assert found == {"fuse_permute": permute, "fuse_router": router}


@pytest.mark.parametrize(
    ("actor", "capability", "found"),
    [
        ({"fp8": "blockwise"}, 9.0, "with actor.fp8=blockwise, for which Megatron has no such kernels"),
        (
            {"layout": LayoutConfig(tp=4)},
            9.0,
            "with actor.layout.tp=4, where NCCL adds parts in an order that depends on their size",
        ),
        ({"layout": LayoutConfig(cp=2)}, 9.0, "with actor.layout.cp=2, which newer Megatrons refuse beside it"),
        ({}, 7.5, "on NVIDIA X, for which vLLM has no such kernels"),
        ({"layout": LayoutConfig(tp=2)}, 8.0, None),
        ({}, None, None),
    ],
)
def test_batch_invariance_needs_kernels_on_both_sides(
    actor: dict[str, Any], capability: float | None, found: str | None, on_cuda: list[Device]
) -> None:
    on_cuda.append(device(capability))
    asked = replace(config(**actor), run=RunConfig(batch_invariant=True))
    if found is None:
        check_batch_invariance(asked)
        return
    with pytest.raises(ConfigError, match=f"^{re.escape(f'run.batch_invariant: got true {found}; change either')}$"):
        check_batch_invariance(asked)
    check_batch_invariance(config(**actor))


def test_batch_invariance_is_not_to_be_had_on_cpus_or_without_packages(
    on_cuda: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(config(), run=RunConfig(batch_invariant=True))
    for installed, missing in (
        ({"flash_attn_3"}, "Transformer Engine"),
        # Whose second generation newer Megatrons refuse.
        ({"transformer_engine", "flash_attn"}, "the package flash_attn_3"),
    ):
        monkeypatch.setattr(target, "find_spec", lambda name, installed=installed: name in installed or None)
        with pytest.raises(ConfigError, match=f"^run.batch_invariant: got true without {missing}"):
            check_batch_invariance(asked)
    monkeypatch.setattr(check, "platform", PLATFORMS["cpu"])
    with pytest.raises(ConfigError, match=r"^run.batch_invariant: got true on cpu, whose matrix products depend on"):
        check_batch_invariance(asked)


HALF_ON_HOST, FLOAT8 = OptimizerConfig(offload_fraction=0.5), OptimizerConfig(exp_avg_sq_dtype="float8")


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (HALF_ON_HOST, "offload_fraction: got 0.5, which needs CUDA, but this is cpu; set {}.offload_fraction=0.0"),
        (FLOAT8, "exp_avg_sq_dtype: got float8, which needs CUDA, but this is cpu; set {}.exp_avg_sq_dtype=float32"),
        (
            OptimizerConfig(overlap_param_gather=True, overlap_grad_reduce=True, distributed=False),
            "overlap_param_gather: needs {}.distributed=true, whose shards it is about; set that, or leave "
            "overlap_param_gather out",
        ),
        (
            OptimizerConfig(overlap_param_gather=True),
            "overlap_param_gather: got true without {}.overlap_grad_reduce, which divides the weights into the buckets "
            "that are gathered; set {}.overlap_grad_reduce=true",
        ),
    ],
)
def test_settings_of_the_optimizer_on_a_cpu(optimizer: OptimizerConfig, message: str) -> None:
    key = "actor.optimizer"
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{key}.' + message.replace('{}', key))}$"):
        check_kernels(config(optimizer=optimizer))
    check_kernels(config(optimizer=OptimizerConfig(overlap_param_gather=True, overlap_grad_reduce=True)))


def test_settings_of_the_optimizer_on_cuda(on_cuda: list[Device]) -> None:
    small = OptimizerConfig(exp_avg_dtype="bfloat16", exp_avg_sq_dtype="float8")
    for each in (HALF_ON_HOST, FLOAT8, small, OptimizerConfig(overlap_param_gather=True)):
        check_kernels(config(optimizer=each))
    with pytest.raises(ConfigError, match=r"^actor.optimizer.exp_avg_dtype: needs actor.optimizer.distributed=true"):
        check_kernels(config(optimizer=replace(small, distributed=False)))
    with pytest.raises(ConfigError, match=r"exp_avg_sq_dtype: got float8 with .*offload_fraction=0.5, but on the host"):
        check_kernels(config(optimizer=replace(FLOAT8, offload_fraction=0.5)))


def test_states_of_optimizers_that_a_run_could_not_offload_save_or_continue() -> None:
    float8 = config(optimizer=FLOAT8)
    check_optimizers(float8)
    with pytest.raises(ConfigError, match=r"^actor.optimizer.exp_avg_sq_dtype: got float8 with run.deterministic=true"):
        check_optimizers(replace(float8, run=RunConfig(deterministic=True)))
    with pytest.raises(ConfigError, match=r"got float8 with placement.offload=true, but .*; set it to bfloat16$"):
        check_optimizers(replace(float8, placement=PlacementConfig(offload=True)))
    with pytest.raises(ConfigError, match=r"offload_fraction: cannot be saved .* critic.warmup_steps=2 delays"):
        check_optimizers(replace(config(optimizer=HALF_ON_HOST), critic=CriticConfig(warmup_steps=2)))


def test_muon_needs_whole_matrices_and_the_package_that_megatron_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    muon = OptimizerConfig(algorithm="muon", distributed=False)
    with pytest.raises(ConfigError, match=r"^actor.optimizer.algorithm: got muon with .*distributed=true, but it"):
        check_kernels(config(optimizer=OptimizerConfig(algorithm="muon")))
    installed = {"megatron-core": "0.16.1"}
    monkeypatch.setattr(optimizer, "package_version", installed.get)
    with pytest.raises(ConfigError, match=r"needs emerging-optimizers 0.1, but none is installed; with Python 3.12, "):
        check_kernels(config(optimizer=muon))
    # The arguments of later releases have other names, which later Megatrons pass.
    installed["emerging-optimizers"] = "0.3.0"
    with pytest.raises(ConfigError, match=r"but 0.3.0 is installed; .*Emerging-Optimizers.git@v0.1.0"):
        check_kernels(config(optimizer=muon))
    installed["emerging-optimizers"] = "0.1.0"
    check_kernels(config(optimizer=muon))
    installed["megatron-core"] = "0.19.2"
    with pytest.raises(ConfigError, match=r"megatron-core 0.19.2 .* 0.3, but 0.1.0 is installed; .*optimizers==0.3"):
        check_kernels(config(optimizer=muon))
    installed["emerging-optimizers"] = "0.3.0"
    check_kernels(config(optimizer=muon))
