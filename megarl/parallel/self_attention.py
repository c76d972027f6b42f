"""Extend Megatron's self-attention by what some models do with queries and keys before their scores."""

import copy

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.parallel.norms import WideNorm
from megarl.weights.attention import AttentionOptions


class LayerAttention(SelfAttention):
    """Megatron's self-attention in a layer with rope of its own kind, or with norms over all heads together.

    Where layers have two kinds of rope, the angles [n, 1, 1, d] that Megatron passes to each of them are of twice as
    many frequencies: first those of layers that attend to all positions, then those of layers with a window.
    """

    def __init__(self, config: TransformerConfig, *, options: AttentionOptions, **named: object) -> None:
        if options.local_rope:
            config = copy.copy(config)
            # That of the other layers may belong to the scaling of their rope.
            config.softmax_scale = options.softmax_scale
        super().__init__(config, **named)
        self.local_rope = options.local_rope
        if options.wide_norms:
            heads = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
            widths = (number * self.hidden_size_per_attention_head for number in heads)
            self.q_layernorm, self.k_layernorm = (WideNorm(config, width, group=self.tp_group) for width in widths)

    def forward(
        self, hidden_states: torch.Tensor, *arguments: object, rotary_pos_emb: torch.Tensor, **named: object
    ) -> object:
        """Attend as Megatron does, with the angles of this layer's rope."""
        if self.local_rope is not None:
            rotary_pos_emb = rotary_pos_emb.unflatten(-1, (2, 2, -1))[..., int(self.local_rope), :].flatten(-2)
        return super().forward(hidden_states, *arguments, rotary_pos_emb=rotary_pos_emb, **named)


def set_self_attention(layer: ModuleSpec, options: AttentionOptions) -> None:
    """Set `LayerAttention` in the spec of a layer whose options need it, in place."""
    if options.local_rope is not None or options.wide_norms:
        attention = layer.submodules.self_attention
        attention.module, attention.params = LayerAttention, {**attention.params, "options": options}
