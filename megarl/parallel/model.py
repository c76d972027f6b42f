"""Actor and reference as Megatron GPT models that return log-probs instead of logits."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.schema import ModelConfig
from megarl.parallel.layout import Layout
from megarl.parallel.logprobs import TokenLogprobs, vocab_parallel_logprobs, vocab_shard
from megarl.parallel.packing import Pack
from megarl.parallel.platform import platform
from megarl.parallel.weights.families import ModelSpec
from megarl.parallel.weights.slices import Slice, load_slices, shard_slices
from megarl.safetensors_map import dtype_of, map_model, model_files


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRequest:
    """How the head scores: temperature, rows of logits at a time, and whether the entropy is differentiated."""

    temperature: float
    chunk_tokens: int
    entropy_needs_grad: bool = False


class PolicyModel(GPTModel):
    """A `GPTModel` whose output is log-probs and entropies of a pack's kept labels.

    Rows outside the loss mask are dropped before the head, so prompt tokens never meet the vocabulary.
    """

    def __init__(self, *, spec: ModelSpec, layout: Layout, config: TransformerConfig, vocab_multiple: int) -> None:
        padded_vocab = _round_up(spec.dims.vocab, vocab_multiple * layout.config.tp)
        super().__init__(
            config=config,
            transformer_layer_spec=platform().block_spec(config),
            vocab_size=padded_vocab,
            max_sequence_length=spec.max_positions,
            share_embeddings_and_output_weights=spec.dims.tied,
            position_embedding_type="rope",
            rotary_base=spec.rope_theta,
        )
        self.spec, self.layout = spec, layout
        self.vocab_shard = vocab_shard(layout.tp_group, padded_vocab // layout.config.tp, spec.dims.vocab)

    def _postprocess(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        return hidden_states

    def hidden_states(self, pack: Pack) -> torch.Tensor:
        """[T, 1, H] of the last layer ([T/tp, 1, H] under sequence parallelism)."""
        return super().forward(
            input_ids=pack.input_ids,
            position_ids=pack.position_ids,
            attention_mask=None,
            packed_seq_params=pack.packed_seq_params,
        )

    @property
    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output embedding, vocabulary padding included."""
        return self.shared_embedding_or_output_weight() if self.spec.dims.tied else self.output_layer.weight

    def forward(self, pack: Pack, request: HeadRequest) -> TokenLogprobs:
        hidden = self.hidden_states(pack)
        group = self.layout.tp_group
        if self.config.sequence_parallel:
            kept = gather_from_sequence_parallel_region(hidden, group=group)[pack.positions, 0]
        else:
            kept = copy_to_tensor_model_parallel_region(hidden[pack.positions, 0], group=group)
        return vocab_parallel_logprobs(
            kept,
            self.output_weight,
            pack.labels,
            shard=self.vocab_shard,
            temperature=request.temperature,
            chunk_tokens=request.chunk_tokens,
            entropy_needs_grad=request.entropy_needs_grad,
        )

    def slices(self) -> Iterator[Slice]:
        """This rank's parts of the Hugging Face tensors, as views of the live parameters."""
        parameters = ((name, parameter.data) for name, parameter in self.named_parameters())
        return shard_slices(parameters, self.spec, self.layout.shard_position)


def build_model(spec: ModelSpec, model: ModelConfig, layout: Layout) -> PolicyModel:
    """Build the model for this rank and load its shard straight from the safetensors files."""
    config = transformer_config(spec, dtype_of(model.dtype), layout)
    policy = PolicyModel(spec=spec, layout=layout, config=config, vocab_multiple=model.vocab_multiple)
    policy.to(platform().device())
    with torch.no_grad():
        # Vocabulary padding has no source; it must not hold random weights.
        policy.embedding.word_embeddings.weight.zero_()
        if not spec.dims.tied:
            policy.output_layer.weight.zero_()
    load_slices(policy.slices(), map_model(model_files(spec.path)))
    return policy


def transformer_config(spec: ModelSpec, dtype: torch.dtype, layout: Layout) -> TransformerConfig:
    """Megatron's configuration of a model under a layout."""
    dims, family = spec.dims, spec.family
    return TransformerConfig(
        num_layers=dims.num_layers,
        hidden_size=dims.hidden,
        ffn_hidden_size=dims.ffn,
        num_attention_heads=dims.num_heads,
        num_query_groups=dims.num_kv_heads,
        kv_channels=dims.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_layernorm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.config.tp,
        sequence_parallel=layout.config.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # We divide by our own global denominators; Megatron must not divide again.
        calculate_per_token_loss=True,
        **platform().config_overrides(),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
