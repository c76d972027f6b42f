"""Megatron's configuration of every family as GPUs get it, which Megatron itself checks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from megarl.config.schema import ActorConfig, LayoutConfig, MoeConfig
from megarl.host.device.platform import platform
from megarl.parallel import backend
from megarl.weights.attention import AttentionOptions
from megarl.weights.families import read_model_spec
from tests.helpers.cuda_configs import (
    RECOMPUTES,
    built,
    built_output_layer,
    layers_beside_transformer_engine,
    own_attention,
    rope_fusions,
)
from tests.helpers.hf_models import MODELS, WITH_EXPERTS, make_model
from tests.helpers.rank_pool import RankPool

LAYOUTS = [
    LayoutConfig(),
    LayoutConfig(tp=2, dp=2, sequence_parallel=True),
    LayoutConfig(pp=2, first_stage_layers=3),
    LayoutConfig(cp=2),
]


@pytest.mark.parametrize("name", MODELS)
def test_megatron_accepts_every_family(rank_pool: Callable[[int], RankPool], tmp_path: Path, name: str) -> None:
    """It refuses fused rotary embeddings of latent attention, except with YaRN, where it calls them experimental."""
    path = make_model(tmp_path / "model", name, tied=False)
    layouts = [*LAYOUTS, LayoutConfig(tp=2, ep=2, sequence_parallel=True)] if name in WITH_EXPERTS else LAYOUTS
    (fused,) = rank_pool(1).run(rope_fusions, str(path), layouts)
    assert fused == [read_model_spec(path).dims.latent is None] * len(layouts) * len(RECOMPUTES)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo3", "llama"])
def test_layers_beside_transformer_engine(rank_pool: Callable[[int], RankPool], tmp_path: Path, name: str) -> None:
    """Norms after attention and MLP, rope of two kinds and capped scores are megarl's own; the rest stays."""
    path = make_model(tmp_path / "model", name, tied=False)
    (layers,) = rank_pool(1).run(layers_beside_transformer_engine, str(path))
    own = {
        "core_attention": ("PackedAttention", {"gemma2"}),
        "self_attention": ("LayerAttention", {"gemma3", "olmo3"}),
        "self_attn_bda": ("ResidualNorm", {"gemma2", "gemma3", "olmo3"}),
        "mlp_bda": ("ResidualNorm", {"gemma2", "gemma3", "olmo3"}),
        "linear_qkv": ("TEColumnParallelLinear", {"olmo3"}),
        "linear_fc1": ("TEColumnParallelLinear", {"olmo3"}),
        "input_layernorm": ("IdentityOp", {"olmo3"}),
    }
    assert len(layers) == 5
    for layer in layers:
        assert {part: layer[part] == module for part, (module, _) in own.items()} == {
            part: name in names for part, (_, names) in own.items()
        }


@pytest.mark.parametrize(
    ("actor", "expected"),
    [
        (ActorConfig(), {"fp8": None, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}),
        (ActorConfig(fp8="blockwise"), {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False}),
        (ActorConfig(fp8="mxfp8", recompute="full"), {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": False}),
        (
            ActorConfig(
                fp8="blockwise",
                layout=LayoutConfig(tp=2, ep=2, sequence_parallel=True),
                moe=MoeConfig(dispatcher="deepep", fuse_permute=True, fuse_router=True),
            ),
            {
                "moe_token_dispatcher_type": "flex",
                "moe_flex_dispatcher_backend": "deepep",
                "moe_permute_fusion": True,
                "moe_router_fusion": True,
                "moe_grouped_gemm": True,
                "moe_router_dtype": "fp32",
            },
        ),
        (ActorConfig(moe=MoeConfig(grouped_gemm=False)), {"moe_grouped_gemm": False, "moe_permute_fusion": True}),
        (ActorConfig(layout=LayoutConfig(pp=2, first_stage_layers=3)), {"batch_p2p_sync": False}),
        (ActorConfig(moe=MoeConfig(replay_routing=True)), {"moe_permute_fusion": True, "moe_router_fusion": False}),
        (ActorConfig(moe=MoeConfig(fuse_permute=False)), {"moe_permute_fusion": False, "moe_router_fusion": True}),
    ],
)
def test_settings_of_kernels_reach_megatron(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, actor: ActorConfig, expected: dict[str, object]
) -> None:
    """In its names and values, which it checks against each other as it does on GPUs."""
    path = make_model(tmp_path / "model", "qwen3_moe", tied=False)
    ((fields,),) = rank_pool(1).run(built, str(path), [actor])
    assert {name: fields[name] for name in expected} == expected


def test_batch_invariant_kernels_have_all_that_megatron_asks_for(
    rank_pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """It accepts them with FlashAttention only, and its own product for weights' gradients would lose micro-batches."""
    path = make_model(tmp_path / "model", "qwen3", tied=False)
    for asked, attention in ((False, "auto"), (True, "flash")):
        ((fields,),) = rank_pool(1).run(built, str(path), [ActorConfig()], batch_invariant=asked)
        assert (fields["batch_invariant_mode"], fields["attention_backend"].name) == (asked, attention)
        assert fields["gradient_accumulation_fusion"] is not asked


def test_experts_with_biases_are_not_fused(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    """Megatron's fused activation clamps before it adds biases; grouped experts refuse to fuse what follows them.

    Megarl's attention has the sinks within Transformer Engine's layers.
    """
    path = make_model(tmp_path / "model", "gpt_oss", tied=False)
    ((fields,),) = rank_pool(1).run(built, str(path), [ActorConfig()])
    expected = {
        "add_bias_linear": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "moe_grouped_gemm": True,
    }
    assert {name: fields[name] for name in expected} == expected
    (options,) = rank_pool(1).run(own_attention, str(path), LayoutConfig())
    assert options == [AttentionOptions(window=window, sinks=True) for window in (7, None, 7, None, 7)]


def test_windows_reach_transformer_engine(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    """It counts the positions before a token's own, and Megatron says in which layers."""
    path = make_model(tmp_path / "model", "qwen3-windows", tied=False)
    ((fields,),) = rank_pool(1).run(built, str(path), [ActorConfig()])
    assert (fields["window_size"], fields["window_attn_skip_freq"]) == ((6, 0), [0, 0, 1, 1, 1])


def test_layers_with_windows_over_a_ring_get_megarls_attention(
    rank_pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = make_model(tmp_path / "model", "qwen3-windows", tied=False)
    for cp, expected in ((1, None), (2, AttentionOptions(window=7))):
        (found,) = rank_pool(1).run(own_attention, str(path), LayoutConfig(cp=cp))
        assert found == [None, None, *[expected] * 3]


def test_attention_that_transformer_engine_lacks_is_megarls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows over a ring of ranks."""
    full, windowed = AttentionOptions(), AttentionOptions(window=7)
    assert all(backend.packs_attention(each, cp=cp) for each in (full, windowed) for cp in (1, 2))
    monkeypatch.setitem(backend.BACKENDS, platform().name, backend.cuda_backend(transformer_engine=True))
    assert not any(backend.packs_attention(each, cp=1) for each in (full, windowed))
    assert not backend.packs_attention(full, cp=2)
    assert backend.packs_attention(windowed, cp=2)


@pytest.mark.parametrize(
    ("transformer_engine", "suits", "triton", "wanted", "expected"),
    [
        (False, True, True, None, True),
        (False, False, True, None, False),
        (False, True, False, None, False),
        (False, True, True, "gathered", False),
        # Its kernels attend to gathered keys.
        (True, True, True, None, False),
        (True, True, True, "flex", True),
    ],
)
def test_flex_attention_is_chosen_without_transformer_engine(
    monkeypatch: pytest.MonkeyPatch,
    transformer_engine: bool,
    suits: bool,
    triton: bool,
    wanted: Literal["gathered", "flex"] | None,
    expected: bool,
) -> None:
    cuda = backend.cuda_backend(transformer_engine=transformer_engine)
    monkeypatch.setitem(backend.BACKENDS, "cuda", cuda)
    monkeypatch.setattr(backend, "platform", lambda: SimpleNamespace(name="cuda"))
    monkeypatch.setattr(backend, "find_spec", lambda name: name if triton else None)
    spec: Any = SimpleNamespace(
        dims=SimpleNamespace(latent=None, head_dim=64), score_cap=None if suits else 50.0, sees_whole_images=False
    )
    shared = ActorConfig(share_prefixes=True, prefix_attention=wanted)
    assert backend.attends_by_blocks(shared, spec) is expected
    # Where Transformer Engine has no kernel for them either.
    able = wanted == "flex" or (wanted is None and suits and triton)
    assert backend.attends_by_blocks(shared, spec, gathers=False) is able
    assert not backend.attends_by_blocks(replace(shared, share_prefixes=False), spec)
    assert not backend.attends_by_blocks(replace(shared, share_prefixes=None, layout=LayoutConfig(cp=2)), spec)


@pytest.mark.parametrize(
    ("transformer_engine", "apex", "fused"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_gradients_are_added_up_in_products_where_a_library_does_so(
    monkeypatch: pytest.MonkeyPatch, transformer_engine: bool, apex: bool, fused: bool
) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: name if apex else None)
    options = backend.cuda_backend(transformer_engine=transformer_engine).options
    assert options["gradient_accumulation_fusion"] is fused


def test_the_output_layer_is_built_without_apex(rank_pool: Callable[[int], RankPool]) -> None:
    """Megatron refuses it, though the head computes in its place."""
    assert rank_pool(1).run(built_output_layer) == [True]
