"""Define policy and value models as Megatron GPT models that return log-probs or values instead of logits."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from megarl.parallel.backend import packs_attention
from megarl.parallel.head.differentiable import LossGradients
from megarl.parallel.head.distill import DistilledLogprobs
from megarl.parallel.head.given_teachers import TeacherLogits
from megarl.parallel.head.logprobs import TokenLogprobs
from megarl.parallel.head.pairs import TokenPairs
from megarl.parallel.head.policy import HeadRequest, PolicyHead, TokenSquares, TokenStates, TopTokens
from megarl.parallel.head.statistics import vocab_shard
from megarl.parallel.layout import Layout
from megarl.parallel.modules import block_spec
from megarl.parallel.moe.router import moe_layers
from megarl.parallel.packing import Pack
from megarl.parallel.tower import VisionTower, add_features_after, embed_pack, mrope_angles
from megarl.types.messages import Head
from megarl.vision.reader import ImageReader
from megarl.weights.families import ModelSpec
from megarl.weights.rope import YarnRope
from megarl.weights.shards import padded_vocab


class ScaledAdd:
    """The function residual + multiplier · x, which a layer calls as Megatron's bias-dropout-add."""

    def __init__(self, multiplier: float) -> None:
        self._multiplier = multiplier

    def __call__(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        return self._add

    def _add(self, x_with_bias: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float) -> torch.Tensor:
        x, bias = x_with_bias
        assert bias is None
        assert dropout == 0
        return residual + x * self._multiplier


def scaled_residuals(block: TransformerBlockSubmodules, multiplier: float) -> TransformerBlockSubmodules:
    """Return a block's layers such that each multiplies what its attention and its MLP add to the residual stream."""
    for layer in block.layer_specs if multiplier != 1 else ():
        add = ModuleSpec(module=ScaledAdd, params={"multiplier": multiplier})
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = add
    return block


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
        reader: ImageReader | None,
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
            # Features of images come first.
            scatter_embedding_sequence_parallel=spec.tower is None,
        )
        self.tower, self.mrope = _first_stage_tower(self, spec, reader), spec.tower.mrope if spec.tower else None
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
            embedded = None
            if self.tower is not None:
                group = self.layout.tp_group if self.config.sequence_parallel else None
                embedded, pack.added[:] = embed_pack(self.embedding, self.tower, pack, group)
            if self.mrope is not None:
                assert pack.rope is not None
                angles = mrope_angles(self.rotary_pos_emb.inv_freq, pack.rope, self.mrope)
                stack.enter_context(self.rotary_pos_emb.register_forward_hook(lambda *_: angles))
            # Latent attention has its own angles.
            elif pack.shares_prefixes and self.spec.dims.latent is None:
                # Megatron makes the angles of positions 0, 1, …; of as many as tokens, each token gets its own.
                own = self.rotary_pos_emb.register_forward_hook(lambda *call: call[-1][pack.position_ids[0]])
                stack.enter_context(own)
            return super().forward(
                input_ids=pack.input_ids,
                position_ids=pack.position_ids,
                decoder_input=embedded,
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


def _first_stage_tower(model: GPTModel, spec: ModelSpec, reader: ImageReader | None) -> VisionTower | None:
    """Return the tower with which a model's first stage reads images, for a spec that has one."""
    if spec.tower is None or reader is None or not model.pre_process:
        return None
    tower = VisionTower(spec.path, spec.tower, reader, model.config.params_dtype)
    add_features_after(model.decoder.layers, tower.num_added)
    return tower


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
