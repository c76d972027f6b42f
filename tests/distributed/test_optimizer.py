"""bfloat16 parameters move by float32 steps, and the reference does not move."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.config.lora import LoraConfig
from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from tests.helpers import ranks
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.requests import update_request, with_advantages
from tests.helpers.rows import random_rows

GetPool = Callable[[int], RankPool]
GetCheckpoint = Callable[..., Path]

LENGTHS = [(4, 6), (2, 9), (7, 3)]
# Steps of the norm's bfloat16 weights, which are in [0.5, 2), are 2⁻⁸ and 2⁻⁷: half of one is 4 learning rates.
LEARNING_RATE = 4.5e-4
NUM_STEPS = 12


@pytest.mark.parametrize("distributed", [True, False])
def test_bfloat16_weights_follow_float32_ones(rank_pool: GetPool, checkpoint: GetCheckpoint, distributed: bool) -> None:
    model = ModelConfig(path=str(checkpoint(tied=False, dtype="bfloat16")), dtype="bfloat16")
    actor = ActorConfig(optimizer=OptimizerConfig(distributed=distributed, weight_decay=0.0))
    rows = with_advantages(random_rows(LENGTHS))
    requests = [update_request(rows, step=step, lr=LEARNING_RATE) for step in range(NUM_STEPS)]
    history = rank_pool(1).run(ranks.final_norm_over_steps, actor, model, rows, requests)[0]

    first, second, last = history[0], history[1], history[-1]
    assert first.model.dtype == torch.bfloat16
    assert first.main.dtype == torch.float32
    assert torch.equal(first.main, first.model.float())
    # Adam's first step is one learning rate against the gradient, whatever its size.
    torch.testing.assert_close((second.main - first.main).abs(), torch.full((64,), LEARNING_RATE), rtol=1e-2, atol=0)
    # Rounding hides it from the model, until enough of them have added up.
    assert torch.equal(second.model, first.model)
    moved = last.model != first.model
    assert moved.sum() > len(moved) / 4
    for copies in history:
        assert torch.equal(copies.model, copies.main.bfloat16())


@pytest.mark.parametrize("layout", [LayoutConfig(), LayoutConfig(tp=2, sequence_parallel=True)], ids=["tp1", "tp2-sp"])
def test_reference_stays_frozen(rank_pool: GetPool, checkpoint: GetCheckpoint, layout: LayoutConfig) -> None:
    model = ModelConfig(path=str(checkpoint(tied=True)), dtype="float32")
    rows = with_advantages(random_rows(LENGTHS))
    request = update_request(rows)
    results = rank_pool(layout.world_size).run(
        ranks.models_around_update, ActorConfig(layout=layout), model, rows, request
    )
    for before, after in results:
        assert before.actor.keys() == before.reference.keys() == after.reference.keys()
        for name, value in before.reference.items():
            assert torch.equal(value, before.actor[name]), name
            assert torch.equal(value, after.reference[name]), name
            assert not torch.equal(value, after.actor[name]), name
        for models in (before, after):
            assert not models.shared_addresses
            assert not models.trainable_reference


def test_every_group_has_the_configured_time_out(rank_pool: GetPool) -> None:
    for seconds in rank_pool(2).run(ranks.group_timeouts, LayoutConfig(tp=2)):
        assert seconds == [ranks.COLLECTIVE_TIMEOUT_S] * 2


def test_deterministic_runs_ask_transformer_engine_and_torch_for_it(
    rank_pool: GetPool, checkpoint: GetCheckpoint
) -> None:
    model = ModelConfig(path=str(checkpoint(tied=True)), dtype="float32")
    (told,) = rank_pool(1).run(ranks.deterministic_settings, model, [True, False])
    assert told == [("0", True), ("1", False)]


TP2 = {"tp": 2, "sequence_parallel": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "tp2-sp": {"layout": LayoutConfig(**TP2)},
    "pp2": {"layout": LayoutConfig(pp=2)},
    "dp2": {"layout": LayoutConfig(dp=2)},
    "dp2, plain optimizer": {"layout": LayoutConfig(dp=2), "distributed": False},
    "tp2-sp, bfloat16": {"layout": LayoutConfig(**TP2), "dtype": "bfloat16"},
    "dp2, bfloat16, plain optimizer": {"layout": LayoutConfig(dp=2), "dtype": "bfloat16", "distributed": False},
    "ep2 of experts": {"layout": LayoutConfig(dp=2, ep=2), "family": "qwen3_moe"},
    "tp2-sp etp2 of experts": {"layout": LayoutConfig(**TP2, etp=2), "family": "qwen3_moe"},
    "tp2-sp of adapters": {"layout": LayoutConfig(**TP2), "lora": LoraConfig(rank=4)},
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_how_far_layers_move(rank_pool: GetPool, tmp_path: Path, name: str) -> None:
    """Without a gradient, AdamW multiplies matrices by 1 − lr · weight_decay, and leaves norms as they are."""
    case = {"layout": LayoutConfig(), "dtype": "float32", "distributed": True, "family": "qwen3", "lora": None}
    case |= SETTINGS[name]
    path = make_model(tmp_path / "model", case["family"], tied=False, dtype=case["dtype"], num_hidden_layers=2)
    optimizer = OptimizerConfig(distributed=case["distributed"], weight_decay=0.4, clip_grad_norm=1e9)
    actor = ActorConfig(layout=case["layout"], optimizer=optimizer, lora=case["lora"])
    rows = with_advantages(random_rows(LENGTHS), 0.0)
    request = replace(update_request(rows, lr=0.25), measures=True)
    model = ModelConfig(path=str(path), dtype=case["dtype"])
    found = rank_pool(actor.layout.world_size).run(ranks.update_metrics, actor, model, rows, request)

    squares: dict[str, list[float]] = {}
    for key, weight in load_file(path / "model.safetensors").items():
        words = key.split(".")
        layer = f"layer_{words[2]}" if words[1] == "layers" else words[-2]
        decayed, whole = squares.setdefault(layer, [0.0, 0.0])
        square = weight.double().square().sum().item()
        squares[layer] = [decayed + (weight.ndim > 1) * square, whole + square]
    expected = {layer: 0.1 * (decayed / whole) ** 0.5 for layer, (decayed, whole) in squares.items()}
    for old, new in (("embed_tokens", "embedding"), ("norm", "final_norm"), ("lm_head", "head")):
        expected[new] = expected.pop(old)
    if case["lora"] is not None:
        # All of them are matrices; half of these are 0.
        expected = {layer: 0.1 for layer in expected if layer.startswith("layer_")}
    for metrics in (each for each in found if each is not None):
        ratios = {key: value for key, value in metrics.items() if key.startswith("actor/update_ratio/")}
        assert ratios == pytest.approx({f"actor/update_ratio/{key}": x for key, x in expected.items()}, rel=1e-5)
