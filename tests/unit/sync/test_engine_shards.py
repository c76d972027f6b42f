"""What each worker of a vLLM engine needs, against boxes by hand; and how much of it reaches each over the wire."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.sync.plan.assign import Holding
from megarl.sync.plan.build import build_plan
from megarl.sync.plan.engine_shards import engine_needs, expert_ranges, stage_range
from megarl.weights.boxes import Box, full_box, num_elements
from megarl.weights.families import Dims, Experts, ModelSpec, read_model_spec
from megarl.weights.rope import DefaultRope
from megarl.weights.safetensors_map import TensorSpec
from megarl.weights.tables import FAMILIES
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.helpers.boxes import covered, received_bytes
from tests.helpers.hf_models import MODELS, make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.vllm_stages import stage_tensors
from tests.unit.weights.test_slices import sectioned

# Eight query heads process_plan two key/value heads; vLLM pads 100 words to 128.
DIMS = Dims(
    num_layers=1, hidden=6, ffn=8, num_heads=8, num_kv_heads=2, head_dim=4, vocab=100, tied=False, qkv_bias=True
)
EXPERTS = Experts(num=6, per_token=2, ffn=4, normalized=True, layers=(0,))
LAYER = "model.layers.0."


def make_spec(family: str, dims: Dims) -> ModelSpec:
    return ModelSpec(
        path=Path("model"),
        family=FAMILIES.get(family),
        dims=dims,
        rope_theta=1e4,
        rope_scaling=DefaultRope(),
        norm_eps=1e-6,
        max_positions=64,
        hf_config={},
    )


def shards(rank: int, size: int, *, family: str = "qwen2", dims: Dims = DIMS, ep: bool = False) -> Holding:
    return engine_needs(make_spec(family, dims), size, expert_parallel=ep)[rank]


def test_one_worker_needs_all_of_every_tensor() -> None:
    shapes = make_spec("qwen2", DIMS).expected_tensors()
    assert shards(0, 1) == {name: (full_box(shape),) for name, shape in shapes.items()}


def test_a_tied_head_is_not_sent() -> None:
    assert "lm_head.weight" in shards(0, 2)
    assert "lm_head.weight" not in shards(0, 2, dims=replace(DIMS, tied=True))


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (
            0,
            {
                "model.embed_tokens.weight": ((0, 64), (0, 6)),
                "lm_head.weight": ((0, 64), (0, 6)),
                "model.norm.weight": ((0, 6),),
                f"{LAYER}self_attn.q_proj.weight": ((0, 16), (0, 6)),
                f"{LAYER}self_attn.q_proj.bias": ((0, 16),),
                f"{LAYER}self_attn.k_proj.weight": ((0, 4), (0, 6)),
                f"{LAYER}self_attn.v_proj.bias": ((0, 4),),
                f"{LAYER}self_attn.o_proj.weight": ((0, 6), (0, 16)),
                f"{LAYER}mlp.gate_proj.weight": ((0, 4), (0, 6)),
                f"{LAYER}mlp.up_proj.weight": ((0, 4), (0, 6)),
                f"{LAYER}mlp.down_proj.weight": ((0, 6), (0, 4)),
            },
        ),
        (
            1,
            {
                "model.embed_tokens.weight": ((64, 100), (0, 6)),
                f"{LAYER}input_layernorm.weight": ((0, 6),),
                f"{LAYER}self_attn.k_proj.weight": ((4, 8), (0, 6)),
                f"{LAYER}self_attn.o_proj.weight": ((0, 6), (16, 32)),
                f"{LAYER}mlp.up_proj.weight": ((4, 8), (0, 6)),
            },
        ),
    ],
)
def test_two_workers(rank: int, expected: dict[str, Box]) -> None:
    found = shards(rank, 2)
    assert found.keys() == make_spec("qwen2", DIMS).expected_tensors().keys()
    assert {name: found[name] for name in expected} == {name: (box,) for name, box in expected.items()}


def test_key_and_value_heads_repeat_where_workers_are_more() -> None:
    k_proj = [shards(rank, 4)[f"{LAYER}self_attn.k_proj.weight"][0][0] for rank in range(4)]
    q_proj = [shards(rank, 4)[f"{LAYER}self_attn.q_proj.weight"][0][0] for rank in range(4)]
    assert k_proj == [(0, 4), (0, 4), (4, 8), (4, 8)]
    assert q_proj == [(0, 8), (8, 16), (16, 24), (24, 32)]
    # The padding is all at the last worker: rows 96 to 127 of 100.
    assert shards(3, 4)["model.embed_tokens.weight"] == (((96, 100), (0, 6)),)


def test_workers_without_a_word_get_no_box() -> None:
    """Of 60 words, padded to 64, the last of 16 workers has rows 60 to 63: padding."""
    dims = replace(DIMS, vocab=60, num_heads=16, ffn=16)
    assert shards(15, 16, dims=dims)["model.embed_tokens.weight"] == ()


def test_experts_are_split_by_width_or_whole() -> None:
    dims = replace(DIMS, experts=EXPERTS)
    expert = f"{LAYER}mlp.experts.{{}}."
    split = shards(1, 2, family="qwen3_moe", dims=dims)
    assert split[f"{LAYER}mlp.gate.weight"] == (((0, 6), (0, 6)),)
    for number in range(6):
        assert split[f"{expert.format(number)}gate_proj.weight"] == (((2, 4), (0, 6)),)
        assert split[f"{expert.format(number)}down_proj.weight"] == (((0, 6), (2, 4)),)
    # Six experts over four workers: two, two, one, one.
    for rank, numbers in enumerate([{0, 1}, {2, 3}, {4}, {5}]):
        whole = shards(rank, 4, family="qwen3_moe", dims=dims, ep=True)
        for number in range(6):
            name = f"{expert.format(number)}up_proj.weight"
            assert whole.get(name) == ((((0, 4), (0, 6)),) if number in numbers else None)


def test_sections_by_hand() -> None:
    """Two workers: 32 query rows, then 8 key and 8 value rows in one tensor; 8 gate rows, then 8 up rows in another."""
    spec = sectioned(make_spec("qwen2", DIMS))
    assert spec.expected_tensors()[f"{LAYER}self_attn.qkv_proj.weight"] == (48, 6)
    rows = {"self_attn.qkv_proj": [[(0, 16), (32, 36), (40, 44)], [(16, 32), (36, 40), (44, 48)]]}
    rows["mlp.gate_up_proj"] = [[(0, 4), (8, 12)], [(4, 8), (12, 16)]]
    for rank, found in enumerate(engine_needs(spec, 2)):
        for name, by_rank in rows.items():
            assert found[f"{LAYER}{name}.weight"] == tuple((each, (0, 6)) for each in by_rank[rank])
        assert found[f"{LAYER}self_attn.qkv_proj.bias"] == tuple((each,) for each in rows["self_attn.qkv_proj"][rank])
    (whole,) = engine_needs(spec, 1)
    assert whole[f"{LAYER}self_attn.qkv_proj.weight"] == (((0, 48), (0, 6)),)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_workers_together_need_all_of_every_tensor(size: int) -> None:
    spec = make_spec("qwen2", DIMS)
    for name, shape in spec.expected_tensors().items():
        assert np.any([covered(shape, shards(rank, size)[name]) for rank in range(size)], axis=0).all()


def test_a_tp2_engine_receives_the_minimum() -> None:
    """Four tensor-parallel ranks, of which 0 and 3 share memory with the two workers; bfloat16.

    A rank's quarter of the split tensors is all that its neighbour does not receive, and whole tensors it has.
    """
    # With a key/value head per rank Megatron splits these tensors as vLLM does.
    dims = replace(DIMS, num_kv_heads=4)
    shapes = make_spec("qwen2", dims).expected_tensors()
    specs = {name: TensorSpec(shape=shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    held = {rank: shards(rank, 4, dims=dims) for rank in range(4)}
    needed = {10: shards(0, 2, dims=dims), 11: shards(1, 2, dims=dims)}
    plan = build_plan(specs, held, needed, neighbours={10: [0], 11: [3]}, bucket_bytes=200)
    # Elements per layer that a quarter has: q 8·6, k 4·6, v 4·6, their biases 16, o 6·8, gate and up 2·6, down 6·2.
    split = 8 * 6 + 4 * 6 + 4 * 6 + 16 + 6 * 8 + 2 * 6 + 2 * 6 + 6 * 2
    # Embedding and head: worker 0 needs rows 0 to 63 and has 0 to 31; worker 1 needs 64 to 99 and has 96 to 99.
    assert received_bytes(plan, 10) == 2 * (split + 2 * 32 * 6)
    assert received_bytes(plan, 11) == 2 * (split + 2 * 32 * 6)
    needs = [sum(num_elements(box) for boxes in needed[receiver].values() for box in boxes) for receiver in (10, 11)]
    for receiver, elements in zip((10, 11), needs, strict=True):
        assert received_bytes(plan, receiver) + received_bytes(plan, receiver, local=True) == 2 * elements


@pytest.mark.parametrize(("size", "num_experts"), [(2, 6), (4, 6), (8, 256), (3, 64)])
def test_whole_experts_lie_where_vllm_has_them(size: int, num_experts: int) -> None:
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    for rank in range(size):
        _, places, _ = determine_expert_map(size, rank, num_experts)
        assert places is not None
        assert [*expert_ranges(num_experts, size)[rank]] == places.ge(0).nonzero().flatten().tolist()


@pytest.mark.parametrize("num_layers", [1, 2, 7, 16, 61])
def test_stages_have_the_layers_that_vllm_gives_them(num_layers: int) -> None:
    from vllm.distributed.utils import get_pp_indices

    for stages in range(1, min(num_layers, 9) + 1):
        ours = [stage_range(num_layers, stage, stages) for stage in range(stages)]
        assert ours == [range(*get_pp_indices(num_layers, stage, stages)) for stage in range(stages)]


def test_a_stage_needs_its_layers_and_its_end() -> None:
    """Five layers over three stages of two workers: one, two, two, with vLLM's preference for the middle."""
    dims = replace(DIMS, num_layers=5)
    whole = engine_needs(make_spec("qwen2", dims), 2)
    needs = engine_needs(make_spec("qwen2", dims), 2, stages=3)
    assert len(needs) == 6
    layers = [(0, 1), (2, 3), (4,)]
    ends = [{"model.embed_tokens.weight"}, set(), {"model.norm.weight", "lm_head.weight"}]
    for i, held in enumerate(needs):
        stage, rank = divmod(i, 2)
        expected = {f"model.layers.{layer}." for layer in layers[stage]}
        names = {n for n in whole[rank] if any(n.startswith(prefix) for prefix in expected)} | ends[stage]
        assert held == {name: whole[rank][name] for name in names}


@pytest.mark.parametrize(
    ("family", "tied", "first", "last"),
    [
        ("qwen3", True, {"model.embed_tokens.weight"}, {"model.embed_tokens.weight", "model.norm.weight"}),
        ("qwen3", False, {"model.embed_tokens.weight"}, {"model.norm.weight", "lm_head.weight"}),
        ("gemma", True, {"model.embed_tokens.weight", "model.norm.weight"}, None),
        ("mixtral", False, {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}, None),
    ],
)
def test_ends_of_each_stage(family: str, tied: bool, first: set[str], last: set[str] | None) -> None:
    """vLLM's last stage computes a tied head with the vocabulary; of some families all stages have all ends."""
    dims = replace(
        DIMS, num_layers=2, tied=tied, experts=replace(EXPERTS, layers=(0, 1)) if family == "mixtral" else None
    )
    needs = engine_needs(make_spec(family, dims), 1, stages=2)
    assert [{name for name in held if "layers" not in name} for held in needs] == [first, last or first]


@pytest.mark.long
def test_ends_are_where_vllm_builds_them(tmp_path: Path) -> None:
    """Of three stages of every family, tied or not: the layers, the vocabulary, the last norm and the head."""
    models = {
        (name, tied): make_model(tmp_path / f"{name}-{tied}", name, tied=tied, head_dim=32, hidden_size=96)
        # vLLM builds no stage whose layers are all dense in a model that has experts elsewhere.
        for name, tied in [*((name, False) for name in MODELS), ("qwen3", True), ("gemma", True)]
        # Nor does it build Qwen3 with windows in some layers.
        if name not in ("qwen3_moe-mixed", "qwen3-windows")
    }
    for path in models.values():
        make_byte_tokenizer().save_pretrained(path)
    with RankPool(3, timeout_s=240.0) as pool:
        built = pool.run(stage_tensors, [str(path) for path in models.values()])
    for i, (name, path) in enumerate(models.items()):
        needs = engine_needs(read_model_spec(str(path)), 1, stages=3)
        for stage, held in enumerate(needs):
            theirs, ours = ({part_of(tensor) for tensor in names} for names in (built[stage][i], held))
            assert ours == theirs, (name, stage)


def part_of(tensor: str) -> str:
    """The layer of a tensor by its number, or the tensor itself."""
    return tensor.split(".")[2] if tensor.startswith("model.layers.") else tensor
