"""Memory formulae on sizes that can be worked out by hand."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config.recompute import RecomputeConfig
from megarl.config.schema import ActorConfig, HeadConfig, LayoutConfig, ModelConfig, OptimizerConfig
from megarl.plan.devices import plan_shard
from megarl.plan.memory import (
    activation_bytes,
    gradient_bytes,
    head_bytes,
    kv_bytes_per_token,
    layer_activation_bytes,
    num_kept_layers,
    optimizer_bytes,
    optimizer_host_bytes,
    recomputed_bytes,
    weight_bytes,
)
from megarl.plan.run_plan import ShardPlan
from megarl.types.messages import Role, RoleSpec
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.towers import Tower, TowerWork

ROOT = Path(__file__).parents[3]


def test_weights_gradients_and_optimizer() -> None:
    # bfloat16: 2 + 4 + (4 + 4 + 4)/D bytes per parameter; float32: 4 + 4 + (4 + 4)/D.
    adam = OptimizerConfig()
    assert (weight_bytes(100, 2), gradient_bytes(100, 2, adam)) == (200, 400)
    assert (optimizer_bytes(100, 2, 1, adam), optimizer_bytes(100, 2, 4, adam)) == (1200, 300)
    assert (optimizer_bytes(100, 4, 1, adam), optimizer_bytes(101, 4, 4, adam)) == (800, 202)


def test_settings_of_the_optimizer_that_take_less() -> None:
    """Moments of 2 + 1 bytes and float32 main parameters; a quarter of 12 on the host; sums in bfloat16."""
    small = OptimizerConfig(exp_avg_dtype="bfloat16", exp_avg_sq_dtype="float8")
    assert optimizer_bytes(100, 2, 1, small) == 700
    assert optimizer_bytes(100, 2, 2, OptimizerConfig(offload_fraction=0.25)) == 450
    # On the host 4 + 4 + 4, and 4 of gradients.
    assert optimizer_host_bytes(100, 2, OptimizerConfig(offload_fraction=0.25)) == 200
    rounded = OptimizerConfig(grad_reduce_in_fp32=False)
    assert (gradient_bytes(100, 2, rounded), gradient_bytes(100, 4, rounded)) == (200, 400)


def test_one_layer(small: ModelSpec) -> None:
    # h 8, q 8, k 4, f 12: 4·8 + 3·(8 + 4 + 12) = 104 elements per token.
    assert layer_activation_bytes(small.dims, LayoutConfig(), num_tokens=10, dtype_bytes=2) == 2 * 10 * 104
    # tp 2 splits the wide ones (36), sequence parallelism the norms' too (16).
    assert layer_activation_bytes(small.dims, LayoutConfig(tp=2), num_tokens=10, dtype_bytes=2) == 2 * 10 * (32 + 36)
    split = LayoutConfig(tp=2, sequence_parallel=True)
    assert layer_activation_bytes(small.dims, split, num_tokens=10, dtype_bytes=4) == 4 * 10 * (16 + 36)
    # Of tp 4 and two key heads of 2 elements, every rank has a whole one: 32 + 3·(8 + 4·2 + 12)/4.
    assert layer_activation_bytes(small.dims, LayoutConfig(tp=4), num_tokens=10, dtype_bytes=2) == 2 * 10 * (32 + 21)


@pytest.mark.parametrize(
    ("layout", "stage", "num_micro_batches", "expected"),
    [
        (LayoutConfig(), 0, 8, 6),  # one in flight
        (LayoutConfig(pp=4), 0, 8, 4 * 6),  # 1F1B: the first stage starts four before the first returns
        (LayoutConfig(pp=4), 3, 8, 6),
        (LayoutConfig(pp=4), 0, 2, 2 * 6),  # there are only two
        # Interleaved, chunks of 3 layers: warm-up 2·(4 − 0 − 1) + (2 − 1)·4 = 10 chunks, and one more.
        (LayoutConfig(pp=4, virtual_pp=2), 0, 8, 11 * 3),
        (LayoutConfig(pp=4, virtual_pp=2), 3, 8, 5 * 3),
        (LayoutConfig(pp=4, virtual_pp=2), 0, 4, 8 * 3),
    ],
)
def test_layers_in_flight(layout: LayoutConfig, stage: int, num_micro_batches: int, expected: int) -> None:
    assert num_kept_layers(layout, stage, 6, num_micro_batches) == expected


def test_activations_with_and_without_recompute(small: ModelSpec) -> None:
    layout = LayoutConfig(pp=2)
    each = {"num_tokens": 10, "num_micro_batches": 5, "dtype_bytes": 2}
    # Two layers per stage, two micro-batches in flight on the first: four times one layer.

    def needed(**recompute: Any) -> int:
        return activation_bytes(small.dims, layout, 0, recompute=RecomputeConfig(**recompute), **each)

    assert needed() == 4 * 2 * 10 * 104
    # Nothing of attention; of the MLP 3·12, once while it is recomputed.
    assert needed(recompute="selective", recompute_modules=("core_attn",)) == 4 * 2 * 10 * 104
    assert needed(recompute="selective") == 4 * 2 * 10 * (104 - 36) + 2 * 10 * 36
    # Layer inputs (8 elements per token) four times, and one layer in full.
    assert needed(recompute="full") == 4 * 2 * 10 * 8 + 2 * 10 * 104
    # One of two layers, in both micro-batches; or two as one.
    assert needed(recompute="full", recompute_layers=1) == 2 * 2 * 10 * 8 + 2 * 2 * 10 * 104 + 2 * 10 * 104
    assert needed(recompute="full", recompute_unit=2) == 2 * 2 * 10 * 8 + 2 * 2 * 10 * 104


def test_chunks_on_their_way_stay(small: ModelSpec) -> None:
    """Of two chunks of a layer each, 2·1 + 1·2 + 1 = 5 are in flight on the first stage, which sent 8 elements each."""
    layout = LayoutConfig(pp=2, virtual_pp=2, overlap_p2p=True)
    each = {"num_tokens": 10, "num_micro_batches": 6, "dtype_bytes": 2}
    ways = (RecomputeConfig(), RecomputeConfig(recompute="full"))
    kept, full = (activation_bytes(small.dims, layout, 0, recompute=way, **each) for way in ways)
    assert kept == 5 * 2 * 10 * (104 + 8)
    assert full == 5 * 2 * 10 * (8 + 8) + 2 * 10 * 104


def test_norms_after_attention_and_mlp_keep_their_inputs() -> None:
    """Gemma-2-9B, tp 4: hidden 3,584, four norms; 16 query heads and 8 key heads of 256, an MLP of 14,336."""
    dims = read_model_spec(ROOT / "configs/model/hf/gemma-2-9b").dims
    layout = LayoutConfig(tp=4, sequence_parallel=True)
    per_token = (2 + 4) * 3584 // 4 + 3 * (4096 + 2048 + 14336) // 4
    assert layer_activation_bytes(dims, layout, num_tokens=10, dtype_bytes=2) == 2 * 10 * per_token


def test_what_parts_of_layers_with_experts_save() -> None:
    """Qwen3-30B-A3B, tp 2: hidden 2,048, of 128 experts of 768 each token sees 8."""
    dims = read_model_spec(ROOT / "configs/model/hf/qwen3-30b-a3b").dims
    layout = LayoutConfig(tp=2, sequence_parallel=True)

    def saved(*modules: str) -> int:
        return recomputed_bytes(dims, layout, modules, num_tokens=1, dtype_bytes=2)

    assert saved("moe_act") == 2 * 8 * 768 // 2
    assert saved("layernorm") == 2 * 2048 // 2
    # Gate, up and product; and into and out of experts.
    assert saved("moe") == 2 * (3 * 8 * 768 + 2 * 8 * 2048) // 2
    assert saved("moe_act", "layernorm") == saved("moe_act") + saved("layernorm")
    assert saved("mlp", "shared_experts", "core_attn") == 0


def test_output_head(small: ModelSpec) -> None:
    # 12 padded rows over tp 2: 6 on this rank; 3 of 10 positions at a time.
    layout = LayoutConfig(tp=2)
    each = {"vocab_multiple": 2, "num_tokens": 10, "dtype_bytes": 2}
    chunk, kept, hidden = 2 * 3 * 6, 2 * 10 * 6, 2 * 10 * 8
    for regime, memory_mib, logits in [
        ("recompute", 9, chunk),
        ("keep", 0, kept),
        ("auto", 1, kept),
        ("auto", 0, chunk),
    ]:
        head = HeadConfig(regime=regime, memory_mib=memory_mib, chunk_tokens=3)
        assert head_bytes(small.dims, layout, **each, head=head, backward=False) == chunk + hidden
        assert head_bytes(small.dims, layout, **each, head=head, backward=True) == logits + hidden
        # Sums of the output weight's gradients in float32: 6 rows of 8.
        apart = head_bytes(small.dims, layout, **each, head=head, backward=True, sums_apart=True)
        assert apart == logits + hidden + 4 * 6 * 8
    # Without a number of rows 64 at least: here all.
    assert head_bytes(small.dims, layout, **each, head=HeadConfig(), backward=False) == kept + hidden


def test_gated_delta_nets() -> None:
    """Of 48 layers 12 have softmax attention, with 2 key-value heads of 256; the states of the others are per row."""
    dims = read_model_spec(ROOT / "configs/model/hf/qwen3-next-80b-a3b").dims
    # In float32, 128 · 128 for each of 32 value heads; of convolutions the last 3 inputs.
    state = 4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 + 32) * 128
    per_row = 4096 * 12 * 2 * 2 * 256 * 2 + 36 * state
    each = {"layers": range(48), "row_tokens": 4096, "dtype_bytes": 2}
    assert kv_bytes_per_token(dims, tp=1, **each) == math.ceil(per_row / 4096)
    assert kv_bytes_per_token(dims, tp=2, **each) == math.ceil(per_row / 2 / 4096)
    # A quarter has q, k, v three times, gates and their products of 16 heads; the rest q, k, v before and after
    # convolutions and norms, gates, outputs and their products of 16 key and 32 value heads.
    mixing = (3 * (16 + 2) * 256 + 2 * 16 * 256) // 4 + 3 * (3 * (2 * 16 + 32) * 128 + 3 * 32 * 128) // 4
    # Ten experts of 512 and a shared one see a token.
    expected = 2 * 10 * (4 * 2048 + 2 * 10 * 2048 + mixing + 3 * 11 * 512)
    assert layer_activation_bytes(dims, LayoutConfig(), num_tokens=10, dtype_bytes=2) == expected


def test_kv_cache(small: ModelSpec) -> None:
    # Keys and values, 4 layers, 2 heads of 2, 2 bytes; a device of two has one head, and one of four no less.
    each = {"layers": range(4), "row_tokens": 10, "dtype_bytes": 2}
    assert kv_bytes_per_token(small.dims, tp=1, **each) == 2 * 4 * 2 * 2 * 2
    assert kv_bytes_per_token(small.dims, tp=2, **each) == 2 * 4 * 1 * 2 * 2
    assert kv_bytes_per_token(small.dims, tp=4, **each) == 2 * 4 * 1 * 2 * 2
    # Two layers of four keep 3 tokens of 10: 26 times 16 bytes in all.
    windowed = replace(small.dims, windows=(3, None, 3, None))
    assert kv_bytes_per_token(windowed, tp=1, **each) == math.ceil(26 * 2 * 2 * 2 * 2 / 10)


def test_a_tower_takes_memory_on_the_first_stage(small: ModelSpec) -> None:
    """All of 16 tokens may show images: 2 bytes of 4·20 + 10 elements each, or half of the 20 at a time;
    two micro-batches are in flight, for which only what is trained keeps any.
    """
    work = TowerWork(
        patches=4,
        per_patch=1,
        per_feature=1,
        kept_per_patch=20,
        kept_per_feature=10,
        windows=(None, None),
        width=1,
        features=1,
    )
    tower = Tower(part="all", work=work, rules=(), trained=(), names={}, mrope=None)
    settings = ActorConfig(layout=LayoutConfig(pp=2), micro_batch_tokens=16)
    role = RoleSpec(role=Role.ACTOR, model=ModelConfig(dtype="bfloat16"), settings=settings)

    def shards(tower: Tower | None) -> list[ShardPlan]:
        spec = replace(small, tower=tower)
        return [plan_shard(role, spec, stage, num_micro_batches=8) for stage in range(2)]

    (first, last), (texts, texts_last) = shards(tower), shards(None)
    assert first.activations - texts.activations == 2 * 2 * 16 * (4 * 20 + 10)
    assert first.forward == max(texts.forward, 2 * 16 * (4 * 10 + 10))
    assert last == texts_last
    (frozen, _) = shards(replace(tower, part="none"))
    assert frozen.activations - texts.activations == 2 * 16 * (4 * 10 + 10)
    (projector, _) = shards(replace(tower, part="projector"))
    assert projector.activations - texts.activations == 2 * 16 * (4 * 10 + 2 * 10)
