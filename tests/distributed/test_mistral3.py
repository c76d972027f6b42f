"""Mistral Small 3.1 and later as published: a Mistral that is the language model of a larger model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from megarl.config.schema import LayoutConfig, ModelConfig, MoeConfig
from megarl.train.export import export_model
from tests.distributed.test_load_export import PoolWriters
from tests.helpers.family_parity import assert_gradients, assert_rows, make_rows, run_ranks, run_transformers
from tests.helpers.hf_models import assert_same_tensors, make_model, read_tensors
from tests.helpers.rank_pool import RankPool
from tests.helpers.towers import make_whole


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(LayoutConfig(tp=2, sequence_parallel=True), id="tp2-sp"),
        pytest.param(LayoutConfig(dp=2), id="dp2", marks=pytest.mark.long),
        pytest.param(LayoutConfig(pp=2, first_stage_layers=3), id="pp2", marks=pytest.mark.long),
    ],
)
def test_the_language_model_is_trained_and_the_rest_stays(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, layout: LayoutConfig
) -> None:
    """Its six heads of 12 dimensions are wider than the stream of 48."""
    text = run_transformers(make_model(tmp_path / "text", "mistral-small", tied=False))
    model = make_whole(tmp_path / "model", "mistral3", text.path)
    measured = run_ranks(rank_pool(2), model, layout, tmp_path, make_rows(), MoeConfig(), "none")
    assert_rows("logits", [m.logits for m in measured], text.logits)
    assert_rows("log-probs", [m.logprobs for m in measured], text.logprobs)
    of_whole = {f"language_model.{name}": gradient for name, gradient in text.gradients.items()}
    assert_gradients(tmp_path / "gradients/model.safetensors", of_whole)

    writers = PoolWriters(rank_pool(2), layout, ModelConfig(path=str(model), dtype="float32", vocab_multiple=4))
    export_model(writers, writers.role, tmp_path / "export")
    assert_same_tensors(tmp_path / "export", model)
    assert len([name for name in read_tensors(model) if not name.startswith("language_model.")]) > 10
    loaded = transformers.Mistral3ForConditionalGeneration.from_pretrained(tmp_path / "export")
    assert torch.equal(loaded.lm_head.weight, read_tensors(model)["language_model.lm_head.weight"])
