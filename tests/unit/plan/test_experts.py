"""Models with experts, planned: counted by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.models import MoeConfig
from megarl.config.schema import LayoutConfig
from megarl.config.target import checked_for, named_target
from megarl.plan import recompute
from megarl.plan.build import plan_run
from megarl.plan.memory import layer_activation_bytes
from megarl.plan.recompute import moe_kernels
from megarl.plan.render import to_json, to_text
from megarl.weights.dims import Routing
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.shards import num_local_experts, num_stage_parameters
from tests.helpers.small_model import write_config

ROOT = Path(__file__).parents[3]
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
}
# h 8, q 8, k 4, heads of 2: attention, norms of layer and heads.
ATTENTION, NORMS = 8 * 8 + 2 * 4 * 8 + 8 * 8, 2 * 8 + 2 * 2
ROUTER, ALL_EXPERTS = 6 * 8, 6 * 3 * 10 * 8


@pytest.fixture
def small_experts(tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_config(tmp_path, **EXPERTS))


def test_parameters_of_a_rank(small_experts: ModelSpec) -> None:
    def count(layout: LayoutConfig, stage: int) -> tuple[int, int]:
        counted = num_stage_parameters(small_experts, layout, stage, vocab_multiple=2)
        return counted.others, counted.experts

    assert count(LayoutConfig(), 0) == (4 * (ATTENTION + NORMS + ROUTER) + 2 * 10 * 8 + 8, 4 * ALL_EXPERTS)
    # Tensor-parallel ranks hold the router; 12 rows of the padded vocabulary, 6 each. Experts are whole, as etp is 1.
    others = 2 * (ATTENTION // 2 + NORMS + ROUTER)
    assert count(LayoutConfig(tp=2, pp=2), 0) == (others + 6 * 8, 2 * ALL_EXPERTS)
    assert count(LayoutConfig(tp=2, pp=2), 1) == (others + 6 * 8 + 8, 2 * ALL_EXPERTS)
    # Three of six experts, and half of each.
    assert count(LayoutConfig(tp=2, ep=2), 0)[1] == 4 * ALL_EXPERTS // 2
    assert count(LayoutConfig(tp=2, dp=2, ep=2, etp=2), 0)[1] == 4 * ALL_EXPERTS // 4
    assert num_local_experts(small_experts, LayoutConfig(dp=3, ep=3)) == 2


def test_activations_of_a_layer(small_experts: ModelSpec) -> None:
    # Two experts of 10 for every token, and two copies of it in and out of them, of half of the tokens.
    layout = LayoutConfig(tp=2, sequence_parallel=True)
    elements = 4 * 8 // 2 + 2 * 2 * 8 // 2 + 3 * (8 + 4 + 2 * 10) // 2
    assert layer_activation_bytes(small_experts.dims, layout, num_tokens=5, dtype_bytes=2) == 2 * 5 * elements
    # With split experts every rank gets all tokens, and half of every expert.
    layout = LayoutConfig(tp=2, etp=2, sequence_parallel=True)
    elements = 4 * 8 // 2 + 2 * 2 * 8 + 3 * (8 + 4 + 2 * 10) // 2
    assert layer_activation_bytes(small_experts.dims, layout, num_tokens=5, dtype_bytes=2) == 2 * 5 * elements


def test_kernels_for_experts_are_derived(monkeypatch: pytest.MonkeyPatch, small_experts: ModelSpec) -> None:
    """Where Transformer Engine has them, and the model's routing is theirs."""
    monkeypatch.setattr(recompute, "transformer_engine_version", lambda: (2, 11))
    experts = small_experts.dims.experts
    assert experts is not None
    routing = Routing(num_groups=2, groups_per_token=1, group_rating=1, scale=1.0, biased=False)
    used = {each.key: each.value for each in moe_kernels(MoeConfig(), experts)}
    assert used == {"actor.moe.fuse_permute": True, "actor.moe.fuse_router": True}
    permute, router = moe_kernels(MoeConfig(), replace(experts, routing=routing))
    assert (permute.value, router.value) == (True, False)
    assert "the model has n_group=2" in router.reason
    assert list(moe_kernels(MoeConfig(), None)) == []


def test_the_published_plan_splits_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with checked_for(named_target(None, gpus=True)):
        found = plan_run(load_config(Path("configs/run/gsm8k-qwen3-30b-a3b.yaml")), device_bytes=80 << 30)
    plan, text = json.loads(to_json(found)), to_text(found)
    # 48 layers of 128 experts, each three matrices of 768 × 2048.
    num_experts = 48 * 128 * 3 * 768 * 2048
    attention, norms = 2048 * 128 * (2 * 32 + 2 * 4), 2 * 2048 + 2 * 128
    num_others = 48 * (attention + norms + 128 * 2048) + 2 * 151936 * 2048 + 2048
    (role,) = plan["roles"]
    assert role["num_expert_parameters"] == num_experts
    assert role["num_parameters"] == num_experts + num_others
    assert plan["sync_bytes"] == 2 * (num_experts + num_others)
    first, last = plan["shards"]
    # Two stages, each over eight ranks, which have no replica.
    assert first["num_expert_parameters"] == last["num_expert_parameters"] == num_experts // 16
    assert first["num_experts"] == 16
    others = first["num_parameters"] - num_experts // 16
    # Float32 main parameters and two moments: of experts whole, of the rest over two replicas.
    assert first["resident"]["optimizer"] == 12 * num_experts // 16 + 12 * others // 2
    assert "derived    actor.moe.fuse_permute=True: Transformer Engine has the kernel\n" in text
    assert "30,532,122,624 parameters (28,991,029,248 in experts), trained" in text
    assert "dp 2 × pp 2, sequence parallel, experts over ep 8 × etp 1\n" in text
    assert "parameters per rank (1,811,939,328 in 16 experts per layer)\n" in text


def test_only_layers_with_experts_are_counted(tmp_path: Path) -> None:
    """Layers 1 and 3 of four; stages of chunks of one layer are layers 0 and 2, and 1 and 3."""
    spec = read_model_spec(write_config(tmp_path, **EXPERTS, decoder_sparse_step=2))
    layouts = {LayoutConfig(pp=2): (1, 1), LayoutConfig(pp=2, virtual_pp=2): (0, 2)}
    dense = 3 * 12 * 8
    for layout, with_experts in layouts.items():
        for stage, count in enumerate(with_experts):
            counted = num_stage_parameters(spec, layout, stage, vocab_multiple=2)
            assert counted.experts == count * ALL_EXPERTS
            ends = 10 * 8 if stage == 0 else 10 * 8 + 8
            assert counted.others == 2 * (ATTENTION + NORMS) + count * ROUTER + (2 - count) * dense + ends
