"""Models with experts: planned, counted by hand, and refused by a run."""

import json
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config.schema import LayoutConfig
from megarl.parallel.weights.families import ModelSpec, read_model_spec
from megarl.plan.memory import layer_activation_bytes
from megarl.plan.shards import num_stage_parameters
from tests.helpers.small_model import write_config

ROOT = Path(__file__).parents[3]
DRY_RUN = "train configs/run/gsm8k-qwen3-30b-a3b.yaml --dry-run --device-gib 80"
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
    def count(layout: LayoutConfig, stage: int) -> int:
        return num_stage_parameters(small_experts, layout, stage, vocab_multiple=2)

    assert count(LayoutConfig(), 0) == 4 * (ATTENTION + NORMS + ROUTER + ALL_EXPERTS) + 2 * 10 * 8 + 8
    # Tensor-parallel ranks hold the router and a slice of every expert; 12 rows of the padded vocabulary, 6 each.
    layer = (ATTENTION + ALL_EXPERTS) // 2 + NORMS + ROUTER
    assert count(LayoutConfig(tp=2, pp=2), 0) == 2 * layer + 6 * 8
    assert count(LayoutConfig(tp=2, pp=2), 1) == 2 * layer + 6 * 8 + 8


def test_activations_of_a_layer(small_experts: ModelSpec) -> None:
    # Two experts of 10 for every token, and two copies of it in and out of them.
    layout = LayoutConfig(tp=2, sequence_parallel=True)
    elements = 4 * 8 // 2 + 2 * 2 * 8 + 3 * (8 + 4 + 2 * 10) // 2
    assert layer_activation_bytes(small_experts.dims, layout, num_tokens=5, dtype_bytes=2) == 2 * 5 * elements


def test_the_plan_counts_experts_and_says_that_it_is_only_a_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    main([*DRY_RUN.split(), "--json"])
    plan = json.loads(capsys.readouterr().out)
    # 48 layers of 128 experts, each three matrices of 768 × 2048.
    num_experts = 48 * 128 * 3 * 768 * 2048
    attention, norms = 2048 * 128 * (2 * 32 + 2 * 4), 2 * 2048 + 2 * 128
    num_others = 48 * (attention + norms + 128 * 2048) + 2 * 151936 * 2048 + 2048
    (role,) = plan["roles"]
    assert role["num_expert_parameters"] == num_experts
    assert role["num_parameters"] == num_experts + num_others
    assert plan["sync_bytes"] == 2 * (num_experts + num_others)
    main(DRY_RUN.split())
    text = capsys.readouterr().out
    assert "30,532,122,624 parameters (28,991,029,248 in experts), trained" in text
    assert "NOT YET    megarl can plan this run but not do it: mixture-of-experts models need expert" in text


def test_a_run_is_refused_before_it_leaves_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    model = write_config(tmp_path / "experts", **EXPERTS, max_position_embeddings=8192)
    runs = tmp_path / "runs"
    with pytest.raises(SystemExit) as caught:
        main(["train", "configs/run/gsm8k-qwen3-30b-a3b.yaml", f"model.path={model}", f"run.dir={runs}"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: model.path: {model} is a qwen3_moe model, which can be planned")
    assert line.endswith("choose a dense model, such as Qwen3-8B")
    assert not runs.exists()
