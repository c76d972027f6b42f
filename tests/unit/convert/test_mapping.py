"""Where Hugging Face rows lie in Megatron's parameters, counted by hand."""

from pathlib import Path

import pytest
import torch

from megarl.convert.mapping import Parameter, RowBlock, extra_state_keys, model_parameters, row_blocks
from megarl.weights.families import read_model_spec
from megarl.weights.slices import Slice
from tests.helpers.small_model import write_config

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


def test_a_view_that_cuts_rows_is_refused() -> None:
    matrix = torch.empty(6, 4, device="meta")
    columns = Slice(tensor="x", index=(slice(0, 6), slice(0, 2)), view=matrix[:, :2], owned=True)
    with pytest.raises(ValueError, match="x: its place in Megatron's parameter is not made of whole rows"):
        list(row_blocks(columns, 4, 0))
