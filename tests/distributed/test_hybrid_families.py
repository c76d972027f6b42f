"""Families with gated delta nets: rows that share a prompt, and published models whose language model is a part."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from megarl.config.schema import LayoutConfig, ModelConfig, MoeConfig
from megarl.convert.commands import hf_to_mcore, mcore_to_hf
from megarl.convert.engine import ConvertSettings
from megarl.train.export import export_model
from megarl.types import Row
from megarl.weights.families import read_model_spec
from tests.distributed.test_load_export import PoolWriters
from tests.helpers.family_parity import (
    assert_equals_transformers,
    assert_rows,
    make_rows,
    run_ranks,
    run_transformers,
)
from tests.helpers.hf_models import VOCAB_SIZE, assert_same_tensors, make_model, read_tensors
from tests.helpers.rank_pool import RankPool
from tests.helpers.towers import TOWERS, make_whole

GetPool = Callable[[int], RankPool]
TP2 = LayoutConfig(tp=2, sequence_parallel=True)


def test_experts_beside_delta_nets_equal_transformers(rank_pool: GetPool, tmp_path: Path) -> None:
    """Further layouts are long, in test_moe_families.py."""
    expected = run_transformers(make_model(tmp_path / "model", "qwen3_next", tied=False))
    assert_equals_transformers(rank_pool(2), expected, replace(TP2, ep=2), tmp_path)


def rows_of_two_prompts() -> list[Row]:
    """One prompt of 70 tokens, longer than a chunk of the delta rule, and one of 9; each with answers of all lengths.

    Rows of a micro-batch have the same prompt.
    """
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB_SIZE, length) for length in (70, 9)]
    return [
        Row(
            uid=f"p{i % 2}",
            sample_index=i,
            token_ids=np.concatenate([prompts[i % 2], rng.integers(0, VOCAB_SIZE, num_response)]),
            num_prompt_tokens=len(prompts[i % 2]),
            loss_mask=np.ones(num_response, dtype=np.bool_),
        )
        for i, num_response in enumerate((3, 40, 20, 2))
    ]


def test_rows_that_share_a_prompt_equal_transformers(rank_pool: GetPool, tmp_path: Path) -> None:
    """Each continues the state, and the convolutions' window, that the prompt leaves."""
    rows = rows_of_two_prompts()
    expected = run_transformers(make_model(tmp_path / "model", "qwen3_5", tied=False), rows=rows)
    assert_equals_transformers(rank_pool(2), expected, TP2, tmp_path, rows=rows)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_language_models_of_multimodal_models_are_trained(rank_pool: GetPool, tmp_path: Path, name: str) -> None:
    """What transformers computes with the same language model alone; the tower and MTP layers stay as they were read,
    in exports and through conversions.
    """
    text = run_transformers(make_model(tmp_path / "text", name, tied=False))
    model = make_whole(tmp_path / "model", name, text.path)
    measured = run_ranks(rank_pool(2), model, TP2, tmp_path, make_rows(), MoeConfig(), "none")
    assert_rows("logits", [m.logits for m in measured], text.logits)
    assert_rows("log-probs", [m.logprobs for m in measured], text.logprobs)
    names = {key for key in read_tensors(model) if key.startswith(("model.visual.", "mtp."))}
    assert len(names) > 10
    assert read_tensors(tmp_path / "weights").keys() == read_tensors(model).keys() - names

    writers = PoolWriters(rank_pool(2), TP2, ModelConfig(path=str(model), dtype="float32", vocab_multiple=4))
    export_model(writers, writers.role, tmp_path / "export")
    assert_same_tensors(tmp_path / "export", model)
    assert read_model_spec(tmp_path / "export").family.name == name
    hf_to_mcore(model, ConvertSettings(out=tmp_path / "dist", num_workers=1))
    mcore_to_hf(tmp_path / "dist", ConvertSettings(out=tmp_path / "back", num_workers=1))
    assert_same_tensors(tmp_path / "back", model)
    loaded = getattr(transformers, TOWERS[name].model).from_pretrained(tmp_path / "back")
    assert torch.equal(loaded.lm_head.weight, read_tensors(model)["lm_head.weight"])
