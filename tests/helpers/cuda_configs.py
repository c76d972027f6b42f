"""Build Megatron's configuration of a family as on GPUs, in a rank's process; Transformer Engine is pretended."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megarl.config.schema import ActorConfig, LayoutConfig
from megarl.host.device.platform import CudaPlatform
from megarl.weights.attention import AttentionOptions
from megarl.weights.families import read_model_spec
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout

# The kernels of Transformer Engine that Megatron looks for if tokens are to be reordered in one.
FUSED = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)
RECOMPUTES = ("none", "selective", "full")


def built_output_layer(context: RankContext) -> bool:
    """Whether Megatron's output layer, built beside Transformer Engine's layers without apex, has fused gradients."""
    from megarl.parallel import backend

    with pytest.MonkeyPatch.context() as patch:
        beside = replace(backend.BACKENDS["cpu"], uses_transformer_engine=True)
        patch.setitem(backend.BACKENDS, "cpu", beside)
        backend.prepare_megatron()
        from megatron.core.tensor_parallel import ColumnParallelLinear, layers
        from megatron.core.transformer.transformer_config import TransformerConfig

        try:
            config = TransformerConfig(
                num_layers=1, hidden_size=8, num_attention_heads=1, gradient_accumulation_fusion=True
            )
            layer = ColumnParallelLinear(
                8, 16, config=config, init_method=config.init_method, bias=False, skip_weight_param_allocation=True
            )
        finally:
            layers._grad_accum_fusion_available = False
    return bool(layer.gradient_accumulation_fusion)


def own_attention(context: RankContext, path: str, layout: LayoutConfig) -> list[AttentionOptions | None]:
    """Of each layer of Transformer Engine's, the options of megarl's attention in it, if that is there.

    Local layers stand for Transformer Engine's, which all share one spec here.
    """
    join_layout(context, LayoutConfig())
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.parallel import backend, modules

    spec, shared = read_model_spec(path), get_gpt_layer_local_spec()
    config = TransformerConfig(num_layers=spec.dims.num_layers, hidden_size=8, num_attention_heads=1)
    config.context_parallel_size = layout.cp
    with pytest.MonkeyPatch.context() as patch:
        beside = replace(backend.BACKENDS["cpu"], uses_transformer_engine=True)
        patch.setitem(backend.BACKENDS, "cpu", beside)
        theirs = TransformerBlockSubmodules(layer_specs=[shared] * spec.dims.num_layers)
        patch.setattr(modules, "get_gpt_decoder_block_spec", lambda *_, **__: theirs)
        layers = modules.block_spec(spec, config, None).layer_specs
    cores = [layer.submodules.self_attention.submodules.core_attention for layer in layers]
    return [getattr(core, "params", {}).get("options") for core in cores]


def layers_beside_transformer_engine(context: RankContext, path: str) -> list[dict[str, str]]:
    """The classes of each layer's parts where Transformer Engine's layers, for which local ones stand, are changed."""
    from megarl.parallel.backend import prepare_megatron

    prepare_megatron()
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megarl.parallel import backend, modules

    spec, config = (
        read_model_spec(path),
        SimpleNamespace(hidden_size=8, layernorm_epsilon=1e-5, context_parallel_size=1),
    )
    shared = get_gpt_layer_local_spec(normalization="RMSNorm")
    block = SimpleNamespace(layer_specs=[shared] * spec.dims.num_layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backend.BACKENDS, "cpu", replace(backend.BACKENDS["cpu"], uses_transformer_engine=True))
        patch.setattr(modules, "get_gpt_decoder_block_spec", lambda *_, **__: block)
        patch.setattr(modules, "get_transformer_layer_offset", lambda *_, **__: 0)
        layers = modules.block_spec(spec, cast(Any, config), None).layer_specs
    return [
        {
            # Without Transformer Engine, its layers are no classes.
            name: "TEColumnParallelLinear" if part is TEColumnParallelLinear else getattr(part, "module", part).__name__
            for name, part in (
                ("input_layernorm", layer.submodules.input_layernorm),
                ("self_attention", layer.submodules.self_attention),
                ("core_attention", layer.submodules.self_attention.submodules.core_attention),
                ("linear_qkv", layer.submodules.self_attention.submodules.linear_qkv),
                ("self_attn_bda", layer.submodules.self_attn_bda),
                ("mlp_bda", layer.submodules.mlp_bda),
                ("linear_fc1", backend.module_spec(layer.submodules.mlp).submodules.linear_fc1),
            )
        }
        for layer in layers
    ]


def rope_fusions(context: RankContext, path: str, layouts: Sequence[LayoutConfig]) -> list[bool]:
    """Whether Megatron fuses rotary embeddings, under each layout and way to recompute. It checks the rest itself."""
    actors = [ActorConfig(layout=layout, recompute=recompute) for layout in layouts for recompute in RECOMPUTES]
    return [fields["apply_rope_fusion"] for fields in built(context, path, actors)]


def built(
    context: RankContext, path: str, actors: Sequence[ActorConfig], *, batch_invariant: bool = False
) -> list[dict[str, Any]]:
    """The fields of Megatron's configurations that these settings give."""
    from megarl.parallel.backend import prepare_megatron

    prepare_megatron()
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    from megarl.parallel import backend, building
    from megarl.parallel.layout import Layout
    from megarl.parallel.moe import router

    spec = read_model_spec(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "get_te_version", lambda: Version("2.20.2"))
        for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
            patch.setattr(rope_utils, name, object())
        for name in FUSED:
            # Without Transformer Engine it has not even the names.
            patch.setattr(moe_utils, name, object(), raising=False)
        patch.setitem(backend.BACKENDS, "cuda", backend.cuda_backend(transformer_engine=True))
        patch.setattr(building, "platform", CudaPlatform)
        patch.setattr(router, "transformer_engine_version", lambda: (2, 20))
        configs = [
            building.transformer_config(
                spec,
                torch.bfloat16,
                actor,
                cast(Layout, SimpleNamespace(config=actor.layout)),
                batch_invariant=batch_invariant,
            )
            for actor in actors
        ]
    return [vars(config) for config in configs]
