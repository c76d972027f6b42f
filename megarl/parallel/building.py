"""Describe a rank's models in TransformerConfig, build them and load their weights; yield what it holds of the tensors
of Hugging Face.
"""

import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.host.device.platform import platform
from megarl.parallel.attention import gathering_obstacle
from megarl.parallel.backend import BACKENDS, accepted, attends_by_blocks, shares_prefixes
from megarl.parallel.delta import delta_options
from megarl.parallel.latent import latent_options
from megarl.parallel.layout import Layout
from megarl.parallel.model import HEADS, PackedModel
from megarl.parallel.moe.router import expert_options
from megarl.types.messages import Head
from megarl.vision.reader import ImageReader
from megarl.weights.dims import Dims
from megarl.weights.families import ModelSpec
from megarl.weights.rules import TOWER, Activation, Layers
from megarl.weights.safetensors_headers import model_files
from megarl.weights.safetensors_map import map_model
from megarl.weights.slices import ShardPosition, Slice, load_slices, shard_slices
from megarl.weights.tables import VALUE_HEAD


def transformer_config(
    spec: ModelSpec, dtype: torch.dtype, actor: ActorConfig, layout: Layout, *, batch_invariant: bool = False
) -> TransformerConfig:
    """Return Megatron's TransformerConfig for a model under a parallel layout."""
    dims, family, parallel = spec.dims, spec.family, layout.config
    backend, experts = BACKENDS[platform().name].options, expert_options(dims, parallel, actor.moe)
    grouped = {**backend, **experts}.get("moe_grouped_gemm", False)
    return (TransformerConfig if dims.latent is None else MLATransformerConfig)(
        num_layers=dims.num_layers,
        hidden_size=dims.hidden,
        ffn_hidden_size=dims.ffn,
        num_attention_heads=dims.num_heads,
        num_query_groups=dims.num_kv_heads,
        kv_channels=dims.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        layernorm_zero_centered_gamma=family.norms_add_one,
        gated_linear_unit=True,
        add_bias_linear=family.linear_biases,
        add_qkv_bias=dims.qkv_bias,
        qk_layernorm=dims.qk_norm,
        attention_output_gate=dims.gated,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        softmax_scale=spec.softmax_scale,
        **_layout_options(parallel),
        **_recompute_options(actor, dims, groups_experts=bool(grouped)),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # We divide by our own global denominators; Megatron must not divide again.
        calculate_per_token_loss=True,
        # In blocks, E4M3 serves gradients as well.
        **({} if actor.fp8 is None else {"fp8": "e4m3", "fp8_recipe": actor.fp8}),
        **{
            # Megatron's default is refused for dense models too.
            "moe_token_dispatcher_type": "alltoall",
            **backend,
            **(accepted(TransformerConfig, **_INVARIANT) if batch_invariant else {}),
            **_ACTIVATIONS[family.activation],
            # With biases, Megatron's grouped experts do not fuse this.
            **({"bias_dropout_fusion": False} if family.linear_biases else {}),
            **latent_options(spec),
            **_window_options(dims),
            **delta_options(dims),
            **experts,
        },
    )


def _layout_options(parallel: LayoutConfig) -> dict[str, object]:
    """Return the fields of Megatron's configuration for a parallel layout."""
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pp if parallel.virtual_pp > 1 else None,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "pipeline_model_parallel_layout": parallel.pipeline_layout,
        "context_parallel_size": parallel.cp,
        # Packs differ in length, which `KnownShapes` looks up.
        "variable_seq_lengths": parallel.pp > 1,
        "overlap_p2p_comm": parallel.overlaps_p2p,
        "batch_p2p_comm": not parallel.overlaps_p2p,
        # Backward reads no number of what a stage has sent on. Overlapped, it may still be on its way.
        "deallocate_pipeline_outputs": parallel.pp > 1 and not parallel.overlaps_p2p,
        # Waiting for the device after each exchange was for faults of early versions of torch.
        "batch_p2p_sync": False,
        "sequence_parallel": parallel.sequence_parallel,
    }


def _window_options(dims: Dims) -> dict[str, object]:
    """Return the fields of Megatron's configuration for windows, which Transformer Engine's attention reads."""
    widths = {window for window in dims.windows if window is not None}
    if not widths:
        return {}
    # Megatron knows one width, which the family's models all have. It counts the positions before a token's own.
    (width,) = widths
    return {"window_size": (width - 1, 0), "window_attn_skip_freq": [int(each is not None) for each in dims.windows]}


def _recompute_options(actor: ActorConfig, dims: Dims, *, groups_experts: bool) -> dict[str, object]:
    """Return the fields of Megatron's configuration for what backward computes again."""
    if actor.recompute == "full":
        method, count = "uniform", actor.recompute_unit
        if actor.recompute_layers is not None:
            method, count = "block", actor.recompute_layers
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}
    kinds = {dims.kind_of(layer) for layer in range(dims.num_layers)}
    modules = actor.modules_of(has_dense=Layers.DENSE in kinds, has_experts=Layers.EXPERTS in kinds)
    # Megarl's CPU layers have no grouped GEMMs, within which alone Megatron recomputes these.
    modules = tuple(name for name in modules if name != "moe_act" or groups_experts)
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)} if modules else {}


# `make_batch_invariant` needs these as well.
_INVARIANT: Mapping[str, object] = {
    "batch_invariant_mode": True,
    "attention_backend": AttnBackend.flash,
    # Newer Megatrons refuse any but the one whose order of sums they can set.
    "flash_attention_version": 3,
    # Where the gradient of a weight is added to those of earlier micro-batches, Megatron's kernel overwrites them.
    "gradient_accumulation_fusion": False,
}


def quick_gelu(gate: torch.Tensor) -> torch.Tensor:
    """Compute x·σ(1.702·x). Megatron's own function is compiled for every shape."""
    return gate * torch.sigmoid(1.702 * gate)


_ACTIVATIONS: dict[Activation, dict[str, object]] = {
    Activation.SILU: {"activation_func": F.silu},
    Activation.CLAMPED_SWIGLU: {
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        # Megatron's fused kernel clamps before it adds the bias.
        "bias_activation_fusion": False,
    },
    # Megatron fuses the tanh approximation only under the name of the exact GELU.
    Activation.GELU_TANH: {
        "activation_func": functools.partial(F.gelu, approximate="tanh"),
        "bias_activation_fusion": False,
    },
}


def named_shards(chunk: PackedModel, *, of_adapters: bool = False) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """Yield (name, name in the chunk, shard) of parameters and router biases; layers in the first name count globally.

    of_adapters: yield the adapters' parameters, and else all others.
    """
    layers = {str(i): str(layer.layer_number - 1) for i, layer in enumerate(chunk.decoder.layers)}
    biases = (named for named in chunk.named_buffers() if named[0].endswith(".router.expert_bias"))
    trained = chunk.spec.tower.trained_names if chunk.spec.tower is not None else ()
    for name, parameter in itertools.chain(chunk.named_parameters(), biases):
        parts = name.split(".")
        # A frozen part of a tower stays as it is in the model's files.
        is_kept = name.startswith(TOWER) and name not in trained
        if ("lora" in parts) is not of_adapters or is_kept:
            continue
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = layers[parts[2]]
        yield ".".join(parts), name, parameter


def rank_slices(
    shards: Iterable[tuple[str, torch.Tensor]], spec: ModelSpec, layout: Layout, *, by_expert: bool = False
) -> Iterator[Slice]:
    """Yield the slices of Hugging Face tensors that shards of this rank hold, by the weight table of `spec`.

    by_expert: as a weight sync sends them; see `ModelSpec.expected_tensors`.
    """
    position = ShardPosition(
        tp_rank=layout.tp_group.rank(),
        tp_size=layout.config.tp,
        replica=layout.replica_group.rank(),
        num_replicas=layout.replica_group.size(),
    )
    # The place of this rank's experts: `tp_*` are those of expert tensor parallelism.
    expert_position = ShardPosition(
        tp_rank=layout.etp_group.rank(),
        tp_size=layout.config.etp,
        replica=layout.expert_replica_group.rank(),
        num_replicas=layout.expert_replica_group.size(),
        ep_rank=layout.ep_group.rank(),
        ep_size=layout.config.ep,
    )
    return shard_slices(shards, spec, position, expert_position, by_expert=by_expert)


def model_slices(chunks: Sequence[PackedModel], *, by_expert: bool = False) -> Iterator[Slice]:
    """Yield this rank's slices of Hugging Face tensors, as views of the live parameters of all its model chunks.

    by_expert: as in `rank_slices`.
    """
    shards = [(name, shard.data) for chunk in chunks for name, _, shard in named_shards(chunk)]
    return rank_slices(shards, chunks[0].spec, chunks[0].layout, by_expert=by_expert)


def build_model(
    spec: ModelSpec,
    model: ModelConfig,
    actor: ActorConfig,
    layout: Layout,
    head: Head = Head.LM,
    *,
    batch_invariant: bool = False,
    base: Sequence[PackedModel] | None = None,
    reader: ImageReader | None = None,
) -> list[PackedModel]:
    """Build this rank's model chunks (several only with virtual pipelining) and load weights from safetensors files.

    base: chunks of the same model in the same layout, with which these share the memory of common parameters. reader:
    reads the images in rows, for a spec with a vision tower.
    """
    config = transformer_config(spec, getattr(torch, model.dtype), actor, layout, batch_invariant=batch_invariant)
    virtual, shares = layout.config.virtual_pp, shares_prefixes(actor)

    def build(*, gathers: bool) -> list[PackedModel]:
        by_blocks = attends_by_blocks(actor, spec, gathers=gathers)
        return [
            HEADS[head](
                spec=spec,
                layout=layout,
                config=config,
                vocab_multiple=model.vocab_multiple,
                vp_stage=stage,
                shares=shares,
                by_blocks=by_blocks,
                packs_all=not (gathers or by_blocks),
                has_adapters=actor.lora is not None,
                reader=reader,
            )
            for stage in (range(virtual) if virtual > 1 else (None,))
        ]

    chunks = build(gathers=True)
    gathers = shares and any(each.gathers_keys for each in chunks)
    if gathers and (obstacle := gathering_obstacle(chunks, layout.schedule_groups)) is not None:
        # Free these before building others.
        chunks.clear()
        chunks = build(gathers=False)
        kernel = "FlexAttention" if chunks[0].plans_blocks else "scaled_dot_product_attention"
        what = "Transformer Engine cannot attend to prefixes that rows share"
        warnings.warn(f"{what}, so torch's {kernel} does: {obstacle}; or set share_prefixes=false", stacklevel=2)
    for chunk in chunks:
        chunk.to(platform().device())
        # No checkpoint fills the padding of the vocabulary, which must not keep random weights.
        for name, parameter in chunk.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                parameter.data.zero_()
    _load_weights(chunks, base)
    return chunks


def _load_weights(chunks: Sequence[PackedModel], base: Sequence[PackedModel] | None) -> None:
    """Fill the chunks from their model's files, but for what they share with those of `base`."""
    slices = model_slices(chunks)
    for chunk, held in zip(chunks, base or (), strict=base is not None):
        shards = {name: shard.data for name, _, shard in named_shards(held)}
        for name, _, shard in named_shards(chunk):
            if name in shards:
                shard.data = shards[name]
    if base is not None:
        slices = (part for part in slices if part.tensor == VALUE_HEAD)
    load_slices(slices, map_model(model_files(chunks[0].spec.path)), optional=(VALUE_HEAD,))
