"""Define policy and value models as Megatron GPT models that return log-probs or values instead of logits."""

import contextlib
import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from megarl.config.schema import ActorConfig, ModelConfig
from megarl.host.device.platform import platform
from megarl.parallel.backend import attends_by_blocks, packs_attention, shares_prefixes
from megarl.parallel.gathered_attention import gathering_obstacle
from megarl.parallel.head.differentiable import LossGradients
from megarl.parallel.head.distill import DistilledLogprobs
from megarl.parallel.head.given_teachers import TeacherLogits
from megarl.parallel.head.logprobs import TokenLogprobs
from megarl.parallel.head.pairs import TokenPairs
from megarl.parallel.head.policy import HeadRequest, PolicyHead, TokenSquares, TokenStates, TopTokens
from megarl.parallel.head.statistics import vocab_shard
from megarl.parallel.layout import Layout
from megarl.parallel.megatron_config import transformer_config
from megarl.parallel.modules import block_spec
from megarl.parallel.moe.router import moe_layers
from megarl.parallel.packing import Pack
from megarl.parallel.residual import scaled_residuals
from megarl.types.messages import Head
from megarl.weights.families import ModelSpec
from megarl.weights.rope import YarnRope
from megarl.weights.safetensors_headers import model_files
from megarl.weights.safetensors_map import map_model
from megarl.weights.shards import padded_vocab
from megarl.weights.slices import ShardPosition, Slice, load_slices, shard_slices
from megarl.weights.tables import VALUE_HEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """The outputs of a scalar head (a critic's values) for the labels under the loss mask: [N] float32."""

    values: torch.Tensor


class PackedModel(GPTModel):
    """A `GPTModel` that runs over packs (micro-batches as one sequence). Subclasses add a head on its hidden states.

    Positions outside the loss mask are dropped before the head, so prompt tokens never reach it. shares: whether rows
    of a pack share prefixes. by_blocks: whether their attention is `PathAttention`.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        layout: Layout,
        config: TransformerConfig,
        vocab_multiple: int,
        vp_stage: int | None,
        shares: bool,
        by_blocks: bool,
        packs_all: bool,
        has_adapters: bool,
    ) -> None:
        num_rows = padded_vocab(spec.dims.vocab, layout.config, vocab_multiple)
        layers = block_spec(
            spec,
            config,
            vp_stage,
            shares_prefixes=shares,
            by_blocks=by_blocks,
            packs_all=packs_all,
            has_adapters=has_adapters,
        )
        super().__init__(
            config=config,
            transformer_layer_spec=scaled_residuals(layers, spec.multipliers.residual),
            vocab_size=num_rows,
            max_sequence_length=spec.max_positions,
            pre_process=layout.pp_group.rank() == 0 and vp_stage in (None, 0),
            post_process=layout.is_last_stage and vp_stage in (None, layout.config.virtual_pp - 1),
            # A scalar head leaves nothing to share.
            share_embeddings_and_output_weights=spec.dims.tied and isinstance(self, PolicyModel),
            position_embedding_type="rope",
            rotary_base=spec.rope_theta,
            rotary_percent=spec.dims.rotary_fraction,
            vp_stage=vp_stage,
        )
        if spec.dims.latent is None:
            # Latent attention computes its own from its options.
            self.rotary_pos_emb.inv_freq = _frequencies(spec, self.rotary_pos_emb.inv_freq)
        if (experts := spec.dims.experts) is not None and experts.routing is not None:
            # Megatron has no option for the number of best experts by which a group of experts is scored.
            for layer in moe_layers([self]):
                layer.router.group_rating = experts.routing.group_rating
        if spec.multipliers.embedding != 1 and self.pre_process:
            # First rounded to their dtype, as Gemma does; Granite's are exact.
            factor = torch.tensor(spec.multipliers.embedding, dtype=config.params_dtype)
            self.embedding.register_forward_hook(lambda *call: call[-1] * factor)
        self.spec, self.layout, self.replays_routing = spec, layout, False
        self.shares_prefixes, self.plans_blocks = shares, by_blocks
        packed = [
            packs_all or packs_attention(spec.attention_of(i), cp=layout.config.cp) for i in range(spec.dims.num_layers)
        ]
        self.plans_attention = spec.dims.delta is not None or (any(packed) and not by_blocks)
        self.gathers_keys = not (all(packed) or by_blocks)
        self.vocab_shard = vocab_shard(layout.tp_group, num_rows // layout.config.tp, spec.dims.vocab)

    def _postprocess(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        return hidden_states

    def hidden_states(self, pack: Pack) -> torch.Tensor:
        """Run the layers of this pipeline stage. Return [T, 1, H], or [T/tp, 1, H] under sequence parallelism."""
        with contextlib.ExitStack() as stack:
            # Latent attention has its own angles.
            if pack.shares_prefixes and self.spec.dims.latent is None:
                # Megatron makes the angles of positions 0, 1, …; of as many as tokens, each token gets its own.
                own = self.rotary_pos_emb.register_forward_hook(lambda *call: call[-1][pack.position_ids[0]])
                stack.enter_context(own)
            return super().forward(
                input_ids=pack.input_ids,
                position_ids=pack.position_ids,
                attention_mask=None,
                packed_seq_params=pack.packed_seq_params,
            )

    def complete_rows(self, pack: Pack, values: torch.Tensor) -> torch.Tensor:
        """Put this rank's outputs [N, ...] into rows [B, R, ...], and sum the rows over context-parallel ranks.

        All these ranks then have the complete rows. In backward, each rank gets the gradients of its own labels only.
        """
        rows = pack.scatter(values)
        group = self.layout.cp_group
        return reduce_from_tensor_model_parallel_region(rows, group=group) if group.size() > 1 else rows


def _frequencies(spec: ModelSpec, inv_freq: torch.Tensor) -> torch.Tensor:
    """Return the frequencies of rope that a model was trained with, given those that Megatron computed."""
    assert not isinstance(spec.rope_scaling, YarnRope)
    inv_freq = spec.rope_scaling.scale(inv_freq)
    if (local := spec.local_rope) is None:
        return inv_freq
    # `LayerAttention` takes its part of both.
    dimensions = torch.arange(0, spec.dims.head_dim, 2, dtype=torch.float32, device=inv_freq.device)
    return torch.cat([inv_freq, 1.0 / local.theta ** (dimensions / spec.dims.head_dim)])


class PolicyModel(PackedModel):
    """A model that computes log-probs and entropies of a pack's kept labels (response tokens under the loss mask)."""

    @property
    def output_weight(self) -> torch.Tensor:
        """Return this rank's rows of the output weight (the embedding, if tied), vocabulary padding included."""
        return self.shared_embedding_or_output_weight() if self.spec.dims.tied else self.output_layer.weight

    def forward(
        self,
        pack: Pack,
        request: HeadRequest,
        loss_gradients: LossGradients | None = None,
        teacher: TeacherLogits | None = None,
    ) -> TokenLogprobs | TokenPairs | TokenStates | TokenSquares | TopTokens | DistilledLogprobs | torch.Tensor:
        """Return log-probs and entropies on the last pipeline stage, or the next stage's input on other stages."""
        hidden = self.hidden_states(pack)
        if not self.post_process:
            return hidden
        head = PolicyHead(
            weight=self.output_weight,
            shard=self.vocab_shard,
            cp_group=self.layout.cp_group,
            sequence_parallel=self.config.sequence_parallel,
            logits_divisor=self.spec.multipliers.logits_divisor,
            logit_cap=self.spec.logit_cap,
        )
        return head(hidden, pack, request, loss_gradients, teacher)


class ScalarHead(torch.nn.Module):
    """A critic's head v = w·h in float32. It has one output, so each tensor-parallel rank holds the whole w."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return values [N] of hidden states [N, H]."""
        return (hidden.float() @ self.weight.float().t())[:, 0]


class ValueModel(PackedModel):
    """A critic: for each token that is trained on, it computes the value of the state just before that token."""

    def __init__(self, *, config: TransformerConfig, **arguments: Any) -> None:
        super().__init__(config=config, **arguments)
        if self.post_process:
            del self.output_layer
            self.value_head = ScalarHead(config)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[object] = (), metadata: dict[str, object] | None = None
    ) -> dict[str, object]:
        """Describe the parameters for checkpoints. GPTModel's method cannot: it expects an output layer."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return MegatronModule.sharded_state_dict(self, prefix, tuple(sharded_offsets), metadata)

    def forward(
        self,
        pack: Pack,
        request: HeadRequest,
        loss_gradients: LossGradients | None = None,
        teacher: TeacherLogits | None = None,
    ) -> TokenValues | torch.Tensor:
        """Return values on the last pipeline stage, or hidden states for the next stage on other stages."""
        hidden = self.hidden_states(pack)
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # Every rank computes the same values from all positions: gradients must not be summed over ranks.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.layout.tp_group
            )
        return TokenValues(values=self.value_head(hidden[pack.positions, 0]))


HEADS: dict[Head, type[PackedModel]] = {Head.LM: PolicyModel, Head.SCALAR: ValueModel}


def named_shards(chunk: PackedModel, *, of_adapters: bool = False) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """Yield (name, name in the chunk, shard) of parameters and router biases; layers in the first name count globally.

    of_adapters: yield the adapters' parameters, and else all others.
    """
    layers = {str(i): str(layer.layer_number - 1) for i, layer in enumerate(chunk.decoder.layers)}
    biases = (named for named in chunk.named_buffers() if named[0].endswith(".router.expert_bias"))
    for name, parameter in itertools.chain(chunk.named_parameters(), biases):
        parts = name.split(".")
        if ("lora" in parts) is not of_adapters:
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
) -> list[PackedModel]:
    """Build this rank's model chunks (several only with virtual pipelining) and load weights from safetensors files.

    base: chunks of the same model in the same layout, whose memory these have for all that both have.
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
            )
            for stage in (range(virtual) if virtual > 1 else (None,))
        ]

    chunks = build(gathers=True)
    gathers = shares and any(each.gathers_keys for each in chunks)
    if gathers and (obstacle := gathering_obstacle(chunks, layout.schedule_groups)) is not None:
        # Freed before others are made.
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
    slices = model_slices(chunks)
    for chunk, held in zip(chunks, base or (), strict=base is not None):
        shards = {name: shard.data for name, _, shard in named_shards(held)}
        for name, _, shard in named_shards(chunk):
            if name in shards:
                shard.data = shards[name]
    if base is not None:
        slices = (part for part in slices if part.tensor == VALUE_HEAD)
    load_slices(slices, map_model(model_files(spec.path)), optional=(VALUE_HEAD,))
    return chunks
