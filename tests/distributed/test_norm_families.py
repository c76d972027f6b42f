"""Families with norms after attention and MLP, with two kinds of rope, or with norms over all heads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, MoeConfig, OptimizerConfig
from megarl.train.export import export_model
from megarl.types import Row
from tests.distributed.test_load_export import PoolWriters
from tests.helpers import rank_parts
from tests.helpers.checkpoint_ranks import load_train, train_save_train
from tests.helpers.compare import assert_within
from tests.helpers.family_parity import (
    assert_equals_transformers,
    assert_gradients,
    assert_rows,
    make_rows,
    run_ranks,
    run_transformers,
)
from tests.helpers.hf_models import assert_same_tensors, make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.rows import random_rows
from tests.helpers.towers import make_whole

GetPool = Callable[[int], RankPool]
TP2 = LayoutConfig(tp=2, sequence_parallel=True)


def rows_with_shared_prompts() -> Sequence[Row]:
    """The last row again, with a prompt longer than the windows of models, and before other responses."""
    rows = make_rows()
    last, generator = rows[-1], np.random.default_rng(1)
    others = [
        replace(
            last,
            sample_index=i,
            token_ids=np.concatenate([last.token_ids[: last.num_prompt_tokens], generator.integers(0, 517, length)]),
            loss_mask=np.arange(length) % 3 != 1,
        )
        for i, length in ((1, 3), (2, 19))
    ]
    return [*rows, *others]


@pytest.mark.parametrize(
    "name", ["olmo3", *(pytest.param(name, marks=pytest.mark.long) for name in ("gemma2", "gemma3", "olmo2"))]
)
def test_shared_prompts_and_recompute(rank_pool: GetPool, tmp_path: Path, name: str) -> None:
    rows = rows_with_shared_prompts()
    expected = run_transformers(make_model(tmp_path / "model", name, tied=False), rows=rows)
    assert_equals_transformers(rank_pool(2), expected, TP2, tmp_path, rows=rows, recompute="full")


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo3"])
def test_parts_are_recomputed(rank_pool: GetPool, tmp_path: Path, name: str) -> None:
    expected = run_transformers(make_model(tmp_path / "model", name, tied=True))
    assert_equals_transformers(rank_pool(2), expected, TP2, tmp_path, recompute="selective")


def test_minimax_m2_equals_transformers(rank_pool: GetPool, tmp_path: Path) -> None:
    expected = run_transformers(make_model(tmp_path / "model", "minimax_m2", tied=False))
    assert_equals_transformers(rank_pool(2), expected, replace(TP2, ep=2), tmp_path)


def test_language_model_of_gemma3_with_a_vision_tower(rank_pool: GetPool, tmp_path: Path) -> None:
    """What transformers computes with the same language model alone; the tower is exported as it was read."""
    text = run_transformers(make_model(tmp_path / "text", "gemma3", tied=True))
    model = make_whole(tmp_path / "model", "gemma3", text.path)
    measured = run_ranks(rank_pool(2), model, TP2, tmp_path, make_rows(), MoeConfig(), "none")
    assert_rows("logits", [m.logits for m in measured], text.logits)
    assert_rows("log-probs", [m.logprobs for m in measured], text.logprobs)
    expected = {f"language_model.{name}": gradient for name, gradient in text.gradients.items()}
    assert_gradients(tmp_path / "gradients/model.safetensors", expected)
    writers = PoolWriters(rank_pool(2), TP2, ModelConfig(path=str(model), dtype="float32", vocab_multiple=4))
    export_model(writers, writers.role, tmp_path / "export")
    assert_same_tensors(tmp_path / "export", model)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma3", "olmo3", "minimax_m2"])
def test_checkpoints_continue_under_another_layout(rank_pool: GetPool, tmp_path: Path, name: str) -> None:
    """Norms over all heads are split by ranks, and norms after attention and MLP are whole on each."""
    model = ModelConfig(path=str(make_model(tmp_path / "model", name, tied=False)), dtype="float32")
    rows = random_rows([(5, 12), (3, 20), (9, 7), (4, 15)], holes=False)
    (tmp_path / "saved").mkdir()

    def actor(layout: LayoutConfig) -> ActorConfig:
        return ActorConfig(layout=layout, optimizer=OptimizerConfig(lr=1e-3), micro_batch_tokens=64)

    saved = rank_pool(2).run(train_save_train, actor(TP2), model, rows, str(tmp_path / "saved"), portable=True)
    stages = LayoutConfig(pp=2, first_stage_layers=3)
    loaded = rank_pool(2).run(load_train, actor(stages), model, rows, str(tmp_path / "saved"), same_layout=False)
    (expected,), (got,) = ([history for history in each if history] for each in (saved, loaded))
    for step, want in zip(got, expected, strict=True):
        assert step == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_norm_over_all_heads(rank_pool: GetPool, num_ranks: int) -> None:
    """Values and gradients of both ranks' heads together are those that torch finds for the formula in float64."""
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(5, 1, 4, 3, generator=generator) for _ in range(2))
    weight = torch.rand(12, generator=generator)
    parts = rank_pool(num_ranks).run(rank_parts.wide_norm, weight, x, gradient, eps=0.1)
    inputs = [x.double().requires_grad_(), weight.double().requires_grad_()]
    flat = inputs[0].flatten(-2)
    normed = (flat * (flat.pow(2).mean(-1, keepdim=True) + 0.1).rsqrt() * inputs[1]).view(x.shape)
    expected = [normed.detach(), *torch.autograd.grad(normed, inputs, gradient.double())]
    for name, axis, got, right in zip(
        ("values", "x", "weight"), (2, 2, 0), zip(*parts, strict=True), expected, strict=True
    ):
        assert_within(name, torch.cat(got, axis).double(), right, atol=1e-6)
