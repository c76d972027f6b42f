"""Configure multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434) on Megatron's local layers."""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.parallel.packing import PackSeqParams
from megarl.weights.families import ModelSpec
from megarl.weights.rope import YarnRope


class ReplicatedLinear(torch.nn.Module):
    """A linear layer y = x·Wᵀ whose W is whole on every tensor-parallel rank, while each rank has its own tokens.

    It makes the latents, which all heads share. Megatron's local layers would split W, and lose part of its gradient.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return (x·Wᵀ, None); None is the bias, which Megatron's layers return separately."""
        return F.linear(x, self.weight), None


class PackedLatentAttention(multi_latent_attention.MLASelfAttention):
    """Megatron's latent attention over packs; where rows share prefixes, each token gets the angles of its position."""

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **named: object,
    ) -> object:
        arguments = hidden_states, key_value_states, position_ids, packed_seq_params
        compute = functools.partial(super().get_query_key_value_tensors, *arguments, **named)
        assert isinstance(packed_seq_params, PackSeqParams)
        pack = packed_seq_params.pack
        assert pack is not None
        if not pack.shares_prefixes:
            return compute()

        def own_angles(_: torch.nn.Module, arguments: object, made: Any) -> object:
            # With YaRN, a scale comes with the angles.
            angles, *scale = made if isinstance(made, tuple) else (made,)
            angles = angles[pack.position_ids[0]]
            return (angles, *scale) if scale else angles

        with self.rotary_pos_emb.register_forward_hook(own_angles):
            return compute()


if not isinstance(multi_latent_attention.TELinear, type):
    # Megatron mistakes its own wrappers for Transformer Engine, and then compares with names that are not types.
    multi_latent_attention.HAVE_TE = False
    # Besides its own layers, Megatron accepts only this name for projections into latents.
    multi_latent_attention.Linear = ReplicatedLinear


def latent_options(spec: ModelSpec) -> dict[str, object]:
    """Return the fields of Megatron's configuration for latent attention, or {} for a model without it."""
    latent, rope = spec.dims.latent, spec.rope_scaling
    if latent is None:
        return {}
    options: dict[str, object] = {
        "q_lora_rank": latent.q_latent or None,
        "kv_lora_rank": latent.kv_latent,
        "qk_head_dim": latent.nope,
        "qk_pos_emb_head_dim": latent.rope,
        "v_head_dim": latent.values,
        "rotary_base": spec.rope_theta,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        # Megatron fuses only YaRN's here, and calls that experimental.
        "apply_rope_fusion": False,
    }
    if isinstance(rope, YarnRope):
        options |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope.factor,
            "original_max_position_embeddings": math.floor(rope.original_max_position_embeddings),
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
        }
    return options
