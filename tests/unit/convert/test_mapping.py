"""Where Hugging Face rows lie in Megatron's parameters, counted by hand."""

from pathlib import Path

import pytest
import torch

from megarl.convert.mapping import Parameter, RowBlock, extra_state_keys, model_parameters, row_blocks
from megarl.weights.families import read_model_spec
from megarl.weights.slices import Slice
from tests.helpers.small_model import write_config
from tests.unit.weights.test_slices import sectioned

# Two key/value groups of two query heads; head_dim 2, hidden 8, ffn 12, vocabulary 10.
_HF = "model.layers.3."


def parameters_of(path: Path, *, scalar_head: bool = False, stacked: bool = True, **changes: object) -> list[Parameter]:
    spec = read_model_spec(write_config(path, **changes))
    return model_parameters(spec, scalar_head=scalar_head, vocab_multiple=8, stacked=stacked)


def find(parameters: list[Parameter], key: str, *place: int) -> Parameter:
    (found,) = (each for each in parameters if (each.key, each.place) == (key, place))
    return found


def block(row: int, tensor: str, tensor_row: int, num_rows: int) -> RowBlock:
    return RowBlock(row=row, tensor=tensor, tensor_row=tensor_row, num_rows=num_rows)


def test_a_group_has_its_queries_its_key_and_its_value(tmp_path: Path) -> None:
    qkv = find(parameters_of(tmp_path), "decoder.layers.self_attention.linear_qkv.weight", 3)
    assert (qkv.stack, qkv.shape, qkv.global_shape) == ((4,), (16, 8), (4, 16, 8))
    q, k, v = (f"{_HF}self_attn.{name}_proj.weight" for name in "qkv")
    assert qkv.blocks == (
        block(0, q, 0, 4),
        block(4, k, 0, 2),
        block(6, v, 0, 2),
        block(8, q, 4, 4),
        block(12, k, 2, 2),
        block(14, v, 2, 2),
    )


def test_sections_of_one_tensor_are_its_rows_in_turn(tmp_path: Path) -> None:
    """8 query rows, then 4 key rows, then 4 value rows."""
    spec = sectioned(read_model_spec(write_config(tmp_path)))
    parameters = model_parameters(spec, scalar_head=False, vocab_multiple=8, stacked=True)
    qkv = find(parameters, "decoder.layers.self_attention.linear_qkv.weight", 3)
    name = f"{_HF}self_attn.qkv_proj.weight"
    rows = [(0, 0, 4), (4, 8, 2), (6, 12, 2), (8, 4, 4), (12, 10, 2), (14, 14, 2)]
    assert qkv.blocks == tuple(block(row, name, tensor_row, count) for row, tensor_row, count in rows)
    fc1 = find(parameters, "decoder.layers.mlp.linear_fc1.weight", 3)
    name = f"{_HF}mlp.gate_up_proj.weight"
    assert fc1.blocks == (block(0, name, 0, 12), block(12, name, 12, 12))


def test_gate_comes_before_up(tmp_path: Path) -> None:
    fc1 = find(parameters_of(tmp_path), "decoder.layers.mlp.linear_fc1.weight", 3)
    gate, up = f"{_HF}mlp.gate_proj.weight", f"{_HF}mlp.up_proj.weight"
    assert (fc1.shape, fc1.blocks) == ((24, 8), (block(0, gate, 0, 12), block(12, up, 0, 12)))


def test_the_vocabulary_is_padded(tmp_path: Path) -> None:
    embedding = find(parameters_of(tmp_path), "embedding.word_embeddings.weight")
    assert (embedding.shape, embedding.blocks) == ((16, 8), (block(0, "model.embed_tokens.weight", 0, 10),))


@pytest.mark.parametrize(
    ("changes", "scalar_head", "heads"),
    [
        ({}, False, {"output_layer.weight"}),
        ({"tie_word_embeddings": True}, False, set()),
        ({}, True, {"value_head.weight"}),
        ({"tie_word_embeddings": True}, True, {"value_head.weight"}),
    ],
)
def test_a_model_has_the_head_it_has(
    tmp_path: Path, changes: dict[str, object], scalar_head: bool, heads: set[str]
) -> None:
    keys = {each.key for each in parameters_of(tmp_path, scalar_head=scalar_head, **changes)}
    assert keys & {"output_layer.weight", "value_head.weight"} == heads


def test_layers_may_have_keys_of_their_own(tmp_path: Path) -> None:
    norm = find(parameters_of(tmp_path, stacked=False), "decoder.layers.3.mlp.linear_fc1.layer_norm_weight")
    assert (norm.other_key, norm.stack, norm.shape) == ("decoder.layers.3.pre_mlp_layernorm.weight", (), (8,))


def test_experts_of_a_layer_are_one_tensor(tmp_path: Path) -> None:
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
    }
    parameters = parameters_of(tmp_path, stacked=False, **experts)
    fc2 = find(parameters, "decoder.layers.3.mlp.experts.experts.linear_fc2.weight", 5)
    assert (fc2.stack, fc2.shape) == ((6,), (8, 4))
    assert fc2.blocks == (block(0, f"{_HF}mlp.experts.5.down_proj.weight", 0, 8),)
    keys = extra_state_keys(parameters)
    # Of each layer two in attention, and of each of six experts two.
    assert len(keys) == 4 * (2 + 6 * 2)
    assert "decoder.layers.3.mlp.experts.experts.linear_fc2._extra_state/shard_5_6" in keys
    assert "decoder.layers.3.self_attention.linear_qkv._extra_state/shard_0_1" in keys


def test_linear_layers_have_an_object_each(tmp_path: Path) -> None:
    keys = extra_state_keys(parameters_of(tmp_path))
    modules = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    assert set(keys) == {f"decoder.layers.{name}._extra_state/shard_{i}_4" for name in modules for i in range(4)}
    assert len(keys) == 16


def test_a_view_that_cuts_rows_is_refused() -> None:
    matrix = torch.empty(6, 4, device="meta")
    columns = Slice(tensor="x", index=(slice(0, 6), slice(0, 2)), view=matrix[:, :2], owned=True)
    with pytest.raises(ValueError, match="x: its place in Megatron's parameter is not made of whole rows"):
        list(row_blocks(columns, 4, 0))
