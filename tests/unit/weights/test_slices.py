"""Shards as slices of Hugging Face tensors: checked against shards that the test cuts itself."""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.weights.families import Dims, ModelSpec
from megarl.weights.rope import DefaultRope
from megarl.weights.slices import (
    ShardPosition,
    Slice,
    Split,
    checksum,
    count_elements,
    load_slices,
    shard_boxes,
    shard_slices,
    slice_checksums,
    split_box,
    store_slices,
)
from megarl.weights.tables import FAMILIES, Partition

QUERY_HEADS, KV_HEADS, HEAD_DIM = 8, 4, 2
HIDDEN, FFN, VOCAB, PADDED_VOCAB, LAYERS = 6, 8, 10, 16, 2


def fused_name(name: str) -> str:
    """The tensor of Phi-3 that has this one as a section."""
    return re.sub(r"\b(gate|up)_proj", "gate_up_proj", re.sub(r"\b[qkv]_proj", "qkv_proj", name))


def sectioned(spec: ModelSpec) -> ModelSpec:
    """A model with those tensors."""
    weights = [
        replace(rule, tensors=tuple(replace(tensor, name=fused_name(tensor.name)) for tensor in rule.tensors))
        for rule in spec.family.weights
    ]
    return replace(spec, family=replace(spec.family, weights=tuple(weights)))


def fused_tensors(hf: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    sections = defaultdict[str, list[torch.Tensor]](list)
    for name, tensor in hf.items():
        sections[fused_name(name)].append(tensor)
    return {name: torch.cat(tensors) for name, tensors in sections.items()}


def make_spec(*, tied: bool, fused: bool = False) -> ModelSpec:
    dims = Dims(
        num_layers=LAYERS,
        hidden=HIDDEN,
        ffn=FFN,
        num_heads=QUERY_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab=VOCAB,
        tied=tied,
        qk_norm=True,
    )
    spec = ModelSpec(
        path=Path("model"),
        family=FAMILIES.get("qwen3"),
        dims=dims,
        rope_theta=1e4,
        rope_scaling=DefaultRope(),
        norm_eps=1e-6,
        max_positions=64,
        hf_config={},
    )
    return sectioned(spec) if fused else spec


def hf_tensors(*, tied: bool) -> dict[str, torch.Tensor]:
    """A Qwen3 checkpoint in which every element has its own value."""
    q, kv = QUERY_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
                "self_attn.q_proj": (q, HIDDEN),
                "self_attn.k_proj": (kv, HIDDEN),
                "self_attn.v_proj": (kv, HIDDEN),
                "self_attn.o_proj": (HIDDEN, q),
                "self_attn.q_norm": (HEAD_DIM,),
                "self_attn.k_norm": (HEAD_DIM,),
                "mlp.gate_proj": (FFN, HIDDEN),
                "mlp.up_proj": (FFN, HIDDEN),
                "mlp.down_proj": (HIDDEN, FFN),
            }.items()
        }
    counter = itertools.count(1)
    return {
        name: torch.tensor([next(counter) for _ in range(int(np.prod(shape)))], dtype=torch.float32).view(shape)
        for name, shape in shapes.items()
    }


def megatron_shards(hf: dict[str, torch.Tensor], rank: int, size: int, *, te: bool) -> dict[str, torch.Tensor]:
    """Rank `rank`'s parameters as Megatron lays them out; vocabulary padding is −1."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(size)[rank]

    def columns(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(size, dim=1)[rank]

    def vocab(x: torch.Tensor) -> torch.Tensor:
        return rows(torch.cat([x, torch.full((PADDED_VOCAB - VOCAB, HIDDEN), -1.0)]))

    def qkv(layer: str) -> torch.Tensor:
        q, k, v = (hf[f"{layer}self_attn.{name}_proj.weight"].split(HEAD_DIM) for name in "qkv")
        per_group = QUERY_HEADS // KV_HEADS
        heads: list[torch.Tensor] = []
        for group in range(KV_HEADS):
            heads += [*q[group * per_group : (group + 1) * per_group], k[group], v[group]]
        return rows(torch.cat(heads))

    shards = {
        "embedding.word_embeddings.weight": vocab(hf["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if "lm_head.weight" in hf:
        shards["output_layer.weight"] = vocab(hf["lm_head.weight"])
    for i in range(LAYERS):
        layer, to = f"model.layers.{i}.", f"decoder.layers.{i}."
        input_norm = "self_attention.linear_qkv.layer_norm_weight" if te else "input_layernorm.weight"
        mlp_norm = "mlp.linear_fc1.layer_norm_weight" if te else "pre_mlp_layernorm.weight"
        gate, up = hf[f"{layer}mlp.gate_proj.weight"], hf[f"{layer}mlp.up_proj.weight"]
        shards |= {
            f"{to}{input_norm}": hf[f"{layer}input_layernorm.weight"],
            f"{to}{mlp_norm}": hf[f"{layer}post_attention_layernorm.weight"],
            f"{to}self_attention.q_layernorm.weight": hf[f"{layer}self_attn.q_norm.weight"],
            f"{to}self_attention.k_layernorm.weight": hf[f"{layer}self_attn.k_norm.weight"],
            f"{to}self_attention.linear_qkv.weight": qkv(layer),
            f"{to}self_attention.linear_proj.weight": columns(hf[f"{layer}self_attn.o_proj.weight"]),
            f"{to}mlp.linear_fc1.weight": torch.cat([rows(gate), rows(up)]),
            f"{to}mlp.linear_fc2.weight": columns(hf[f"{layer}mlp.down_proj.weight"]),
        }
    return {name: shard.clone() for name, shard in shards.items()}


def rank_slices(
    tp: int,
    dp: int,
    *,
    tied: bool,
    te: bool = False,
    fused: bool = False,
    shards: Callable[..., dict[str, torch.Tensor]] = megatron_shards,
) -> list[list[Slice]]:
    """Slices of every rank, data-parallel replicas outermost."""
    hf = hf_tensors(tied=tied)
    return [
        list(
            shard_slices(
                shards(hf, rank, tp, te=te).items(),
                make_spec(tied=tied, fused=fused),
                ShardPosition(tp_rank=rank, tp_size=tp, replica=replica, num_replicas=dp),
            )
        )
        for replica in range(dp)
        for rank in range(tp)
    ]


@pytest.mark.parametrize(
    ("fused", "tp", "dp", "te", "tied"),
    [
        (False, 1, 1, False, True),
        (False, 2, 2, True, False),
        (True, 4, 1, False, False),
        (True, 8, 2, True, True),
        (False, 4, 2, False, False),
        (False, 8, 1, True, True),
        (True, 1, 2, True, False),
        (True, 2, 1, False, True),
    ],
)
def test_slices_partition_every_tensor(fused: bool, tp: int, dp: int, te: bool, tied: bool) -> None:
    expected = fused_tensors(hf_tensors(tied=tied)) if fused else hf_tensors(tied=tied)
    owners = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    for slices in rank_slices(tp, dp, tied=tied, te=te, fused=fused):
        store_slices(slices, target)
        for part in slices:
            # Owned or not, a view holds what its index says.
            whole = expected[part.tensor][part.index]
            assert torch.equal(part.view.reshape(whole.shape), whole)
            owners[part.tensor][part.index] += part.owned
    for name, tensor in expected.items():
        assert torch.equal(target[name], tensor), name
        assert torch.equal(owners[name], torch.ones_like(tensor)), name


@pytest.mark.parametrize(("fused", "tp"), [(False, 2), (False, 8), (True, 2), (True, 4), (True, 8)])
def test_load_fills_the_shards(fused: bool, tp: int) -> None:
    def empty(*args: object, **kwargs: object) -> dict[str, torch.Tensor]:
        shards = megatron_shards(*args, **kwargs)  # type: ignore[arg-type]
        return {name: torch.full_like(shard, -1.0) for name, shard in shards.items()}

    hf = hf_tensors(tied=False)
    spec, checkpoint = make_spec(tied=False, fused=fused), fused_tensors(hf) if fused else hf
    for rank in range(tp):
        parameters = empty(hf, rank, tp, te=False)
        at = ShardPosition(tp_rank=rank, tp_size=tp, replica=0, num_replicas=1)
        load_slices(shard_slices(parameters.items(), spec, at), checkpoint)
        for name, shard in megatron_shards(hf, rank, tp, te=False).items():
            assert torch.equal(parameters[name], shard), name


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "expected"),
    [
        # Four query heads, a key and a value head of two rows: 12 rows, of which a rank has 6.
        (
            2,
            4,
            [((0, 6), (0, 0), (0, 0)), ((6, 8), (0, 2), (0, 2)), ((8, 14), (2, 2), (2, 2)), ((14, 16), (2, 4), (2, 4))],
        ),
        # 3 rows each: bounds lie within heads.
        (
            2,
            8,
            [
                ((0, 3), (0, 0), (0, 0)),
                ((3, 6), (0, 0), (0, 0)),
                ((6, 8), (0, 1), (0, 0)),
                ((8, 8), (1, 2), (0, 2)),
                ((8, 11), (2, 2), (2, 2)),
                ((11, 14), (2, 2), (2, 2)),
                ((14, 16), (2, 3), (2, 2)),
                ((16, 16), (3, 4), (2, 4)),
            ],
        ),
        # One group of 20 rows.
        (
            1,
            4,
            [
                ((0, 5), (0, 0), (0, 0)),
                ((5, 10), (0, 0), (0, 0)),
                ((10, 15), (0, 0), (0, 0)),
                ((15, 16), (0, 2), (0, 2)),
            ],
        ),
    ],
)
def test_more_shards_than_key_value_heads_cut_groups_of_heads(
    num_kv_heads: int, size: int, expected: list[tuple[tuple[int, int], ...]]
) -> None:
    dims = replace(make_spec(tied=True).dims, num_kv_heads=num_kv_heads)
    shapes = [(dims.dim(symbol), HIDDEN) for symbol in ("q", "kv", "kv")]
    for rank, rows in enumerate(expected):
        split = Split(rank, size, vocab_padding=1)
        boxes = [split_box(Partition.QKV, shape, part, dims, split) for part, shape in enumerate(shapes)]
        assert boxes == [(each, (0, HIDDEN)) for each in rows]


def test_sections_of_a_tensor_begin_where_those_before_end() -> None:
    """16 query rows, 8 key rows, 8 value rows; of a group of 4, 2 and 2, even ranks of eight have the queries."""
    spec = make_spec(tied=True, fused=True)
    rule = next(rule for rule in spec.family.weights if rule.partition is Partition.QKV)
    assert spec.expected_tensors()["model.layers.0.self_attn.qkv_proj.weight"] == (32, HIDDEN)
    rows = [[box[0] for box in shard_boxes(rule, spec.dims, Split(rank, 8, vocab_padding=1))] for rank in (2, 3)]
    assert rows == [[(4, 8), (18, 18), (26, 26)], [(8, 8), (18, 20), (26, 28)]]


def test_replicas_share_the_writing() -> None:
    totals = [sum(count_elements(slices).values()) for slices in rank_slices(2, 2, tied=False)]
    assert sum(totals) == sum(t.numel() for t in hf_tensors(tied=False).values())
    assert min(totals) > 0.1 * sum(totals)


def test_unknown_parameter() -> None:
    at = ShardPosition(tp_rank=0, tp_size=1, replica=0, num_replicas=1)
    parameters = [("decoder.layers.2.mlp.linear_fc2.weight", torch.zeros(HIDDEN, FFN))]
    with pytest.raises(KeyError, match=r"decoder\.layers\.2\.mlp\.linear_fc2\.weight .* family qwen3"):
        list(shard_slices(parameters, make_spec(tied=True), at))


def checksum_by_definition(tensor: torch.Tensor) -> int:
    """Σ bits_p · (2654435761·p + 1) mod 2⁶⁴ over flat positions p, bits as signed integers."""
    ints = {4: np.int32, 2: np.int16}[tensor.element_size()]
    raw = tensor.contiguous().view(torch.int32 if ints is np.int32 else torch.int16).flatten().tolist()
    return sum(bits * (2654435761 * p + 1) for p, bits in enumerate(raw)) % (1 << 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksum_of_a_whole_tensor(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    shape = tuple(tensor.shape)
    assert checksum(tensor, (), shape) == checksum_by_definition(tensor)
    assert checksum(tensor.transpose(0, 2).contiguous().transpose(0, 2), (), shape) == checksum_by_definition(tensor)


@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (8, 1)])
def test_checksums_add_up_over_ranks(tp: int, dp: int) -> None:
    hf = hf_tensors(tied=False)
    shapes = {name: tuple(tensor.shape) for name, tensor in hf.items()}
    totals = dict.fromkeys(hf, 0)
    for slices in rank_slices(tp, dp, tied=False):
        for name, value in slice_checksums(slices, shapes).items():
            totals[name] = (totals[name] + value) % (1 << 64)
    assert totals == {name: checksum_by_definition(tensor) for name, tensor in hf.items()}


class LargestInt64(TorchDispatchMode):
    """Notes how many elements the largest int64 result of any operation has."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int64:
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


@pytest.mark.parametrize("chunk", [1, 7, 60, 1000])
def test_checksum_looks_at_few_elements_at_a_time(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.weights.slices.CHECKSUM_CHUNK", chunk)
    tensor = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
    with LargestInt64() as largest:
        whole = checksum(tensor, (), (5, 4, 3))
    assert whole == checksum_by_definition(tensor)
    assert largest.num_elements == min(chunk, 60)
    inner = (slice(1, 4), slice(2, 4), slice(0, 2))
    rest = tensor.clone()
    rest[inner] = 0.0
    # Bits of 0.0 are 0, and add nothing.
    assert checksum(tensor[inner], inner, (5, 4, 3)) == (whole - checksum_by_definition(rest)) % (1 << 64)


def swapped(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The first two rows (columns) exchanged: the same values elsewhere."""
    order = torch.arange(tensor.shape[dim])
    order[:2] = torch.tensor([1, 0])
    return tensor.index_select(dim, order)


def test_checksum_sees_misplaced_and_changed_elements() -> None:
    tensor = hf_tensors(tied=True)["model.layers.0.self_attn.q_proj.weight"]
    shape = tuple(tensor.shape)
    one_bit = tensor.clone()
    one_bit.view(torch.int32)[3, 2] ^= 1
    changed = [swapped(tensor, 0), swapped(tensor, 1), tensor.flip(0), tensor.view(shape[::-1]).t(), one_bit]
    sums = [checksum(t, (), shape) for t in [tensor, *changed]]
    assert len(set(sums)) == len(sums)
    # A slice at the place of another.
    half = shape[0] // 2
    assert checksum(tensor[:half], (slice(0, half),), shape) != checksum(tensor[:half], (slice(half, None),), shape)


def test_two_misplaced_shards_do_not_cancel() -> None:
    """Two ranks that exchange their rows store the same multiset of values."""
    hf = hf_tensors(tied=True)
    name = "model.layers.0.mlp.gate_proj.weight"
    shape = tuple(hf[name].shape)
    top, bottom = hf[name].chunk(2)
    first, second = slice(0, FFN // 2), slice(FFN // 2, FFN)
    right = checksum(top, (first,), shape) + checksum(bottom, (second,), shape)
    wrong = checksum(bottom, (first,), shape) + checksum(top, (second,), shape)
    assert right % (1 << 64) == checksum_by_definition(hf[name])
    assert wrong % (1 << 64) != right % (1 << 64)
