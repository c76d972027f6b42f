"""What backward computes again gives the same gradients, to the bit, and runs twice."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, MoeConfig
from tests.helpers.family_parity import make_rows
from tests.helpers.hf_models import DENSE, make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.recompute_ranks import backward_of

LAYERS = "0.decoder.layers"
SPARSE = MoeConfig(aux_loss_coef=0.7)


@pytest.mark.parametrize(
    ("family", "recompute", "twice", "once"),
    [
        ("qwen3", {"recompute": "selective"}, ["0.mlp", "4.mlp"], ["0.self_attention", "0.pre_mlp_layernorm"]),
        (
            "qwen3",
            {"recompute": "selective", "recompute_modules": ("layernorm", "core_attn")},
            ["0.input_layernorm", "4.pre_mlp_layernorm", "3.self_attention.core_attention"],
            ["0.mlp", "0.self_attention"],
        ),
        ("qwen3", {"recompute": "full", "recompute_layers": 2}, ["0.mlp", "1.mlp"], ["2.mlp", "4.mlp"]),
        ("qwen3", {"recompute": "full", "recompute_unit": 5}, ["0.mlp", "4.mlp"], []),
        # What it adds to the residual stream is multiplied in both passes.
        ("granite", {"recompute": "full", "recompute_unit": 5}, ["0.mlp", "4.mlp"], []),
        (
            "qwen3_moe",
            {"recompute": "selective", "recompute_modules": ("moe", "layernorm")},
            ["1.mlp.router", "1.pre_mlp_layernorm"],
            ["1.self_attention"],
        ),
        (
            "qwen3_5",
            {"recompute": "full", "recompute_layers": 3},
            ["0.self_attention.in_proj", "2.self_attention"],
            ["3.self_attention.in_proj", "4.mlp"],
        ),
        (
            "deepseek_v3",
            {"recompute": "selective", "recompute_modules": ("shared_experts", "mla_up_proj", "moe_act")},
            ["4.mlp.shared_experts", "4.self_attention.linear_kv_up_proj"],
            ["4.mlp.router", "4.self_attention"],
        ),
    ],
)
def test_gradients_are_the_same(
    rank_pool: Callable[[int], RankPool],
    tmp_path: Path,
    family: str,
    recompute: dict[str, Any],
    twice: list[str],
    once: list[str],
) -> None:
    model = ModelConfig(path=str(make_model(tmp_path, family, tied=False)), dtype="float32", vocab_multiple=4)
    actor, rows = ActorConfig(moe=MoeConfig() if family in DENSE else SPARSE), make_rows()
    batches = [[0, 2], list(range(3, len(rows))), [1]]
    pool = rank_pool(1)
    (expected,) = pool.run(backward_of, actor, model, rows, batches)
    (got,) = pool.run(backward_of, replace(actor, **recompute), model, rows, batches)
    assert got.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.equal(got.gradients[name], gradient), name
    for name in twice:
        assert got.calls[f"{LAYERS}.{name}"] == 2 * expected.calls[f"{LAYERS}.{name}"] > 0, name
    for name in once:
        assert got.calls[f"{LAYERS}.{name}"] == expected.calls[f"{LAYERS}.{name}"] > 0, name


def test_with_several_micro_batches_in_flight(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    """Routers are told the pack of the micro-batch that is computed again, not of the last one."""
    model = ModelConfig(path=str(make_model(tmp_path, "qwen3_moe", tied=False)), dtype="float32", vocab_multiple=4)
    layout, rows = LayoutConfig(pp=2, pipeline_layout="Ettt|ttL"), make_rows()
    actor = ActorConfig(layout=layout, moe=SPARSE)
    batches = [[i] for i in range(len(rows))]
    expected = rank_pool(2).run(backward_of, actor, model, rows, batches)
    again = replace(actor, recompute="selective", recompute_modules=("moe",))
    for got, wanted in zip(rank_pool(2).run(backward_of, again, model, rows, batches), expected, strict=True):
        for name, gradient in wanted.gradients.items():
            assert torch.equal(got.gradients[name], gradient), name
