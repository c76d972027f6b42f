"""Build a rank's models and load their weights; yield what it holds of Hugging Face tensors."""

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch

from megarl.config.schema import ActorConfig, ModelConfig
from megarl.host.device.platform import platform
from megarl.parallel.backend import attends_by_blocks, shares_prefixes
from megarl.parallel.gathered_attention import gathering_obstacle
from megarl.parallel.layout import Layout
from megarl.parallel.megatron_config import transformer_config
from megarl.parallel.model import HEADS, PackedModel
from megarl.types.messages import Head
from megarl.vision.reader import ImageReader
from megarl.weights.families import ModelSpec
from megarl.weights.rules import TOWER
from megarl.weights.safetensors_headers import model_files
from megarl.weights.safetensors_map import map_model
from megarl.weights.slices import ShardPosition, Slice, load_slices, shard_slices
from megarl.weights.tables import VALUE_HEAD


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
