"""Ranges of single settings, and what a model's config.json allows."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest

from megarl.config import Config, from_dict
from megarl.config.check import check_sft
from megarl.config.check_model import check_model
from megarl.config.check_optimizers import warmup_warnings
from megarl.config.load import PACKAGED
from megarl.config.setting import check_values
from megarl.errors import ConfigError
from megarl.host.device.platform import PLATFORMS
from megarl.weights.families import read_model_spec

# Passes every rule of both kinds of run.
VALID: dict[str, Any] = {
    "model.path": "models/tiny",
    "data.train": ["train.parquet"],
    "sft.train": ["demos.parquet"],
}


def config(**changes: Any) -> Config:
    """A valid configuration with changes; `__` stands for the dots of a key."""
    tree: dict[str, Any] = {}
    for dotted, value in {**VALID, **{key.replace("__", "."): v for key, v in changes.items()}}.items():
        *sections, key = dotted.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return from_dict(Config, tree)


def message(check: Callable[[Config], None], **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config(**changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_ranges(config: Config) -> None:
    check_values(config, ())


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("critic.layout.first_stage_layers", 0, "0, expected >= 1"),
        ("algo.kl.coef", -1, "-1.0, expected >= 0"),
        ("rollout.timeout_s", 0.0, "0.0, expected > 0"),
        ("rollout.top_p", 1.01, "1.01, expected in (0, 1]"),
        ("algo.policy_loss.clip_low", 0.0, "0.0, expected in (0, 1]"),
        ("algo.policy_loss.dual_clip", 1.0, "1.0, expected > 1, or null for no bound"),
        ("critic.value_clip", 0.0, "0.0, expected > 0, or null for no clipping"),
        ("actor.optimizer.betas", [0.9, 1.0], "1.0, expected in [0, 1)"),
        ("actor.optimizer.clip_grad_norm", 0.0, "0.0, expected > 0 (1e9 never clips)"),
        ("actor.optimizer.min_lr_frac", 1.1, "1.1, expected in [0, 1]"),
        ("rollout.top_k", 0, "0, expected >= 1, or -1 for no limit"),
        ("validation.every_steps", 0, "0, expected >= 1 (data.val=[] skips validation)"),
        ("validation.temperature", 0.0, "0.0, expected > 0 (validation.greedy=true is argmax)"),
        ("cluster.object_store_mib", 74, "74, expected >= 75"),
        ("cluster.node_timeout_s", 2.9, "2.9, expected >= 3"),
    ],
)
def test_out_of_range(key: str, value: Any, expected: str) -> None:
    assert message(check_ranges, **{key: value}) == f"{key}: got {expected}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algo.kl.coef", 0),
        ("algo.policy_loss.clip_low", 1.0),
        ("algo.policy_loss.dual_clip", None),
        ("actor.optimizer.betas", [0.0, 0.999]),
        ("actor.optimizer.min_lr_frac", 1.0),
        ("rollout.top_k", -1),
        ("cluster.object_store_mib", 75),
    ],
)
def test_edge_of_the_range(key: str, value: Any) -> None:
    changed = config(**{key: value})
    check_ranges(changed)
    got = attrgetter(key)(changed)
    assert got == (tuple(value) if isinstance(value, list) else value)


def test_warm_up_is_shortened_to_what_a_run_has() -> None:
    # 10 steps of 8 / 4 mini-batches, each passed 3 times: 60 optimizer steps.
    run = {
        "trainer__total_steps": 10,
        "trainer__prompts_per_step": 8,
        "trainer__mini_batch_prompts": 4,
        "trainer__num_epochs": 3,
    }
    (warning,) = warmup_warnings(config(actor__optimizer__warmup_steps=61, **run))
    assert warning.startswith("actor.optimizer.warmup_steps: got 61, and the run has 60 optimizer steps")
    assert warmup_warnings(config(actor__optimizer__warmup_steps=60, **run)) == []


QWEN3_0_6B: dict[str, object] = {  # dimensions from its public config.json
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
}
QWEN3_NEXT = {**QWEN3_0_6B, "num_key_value_heads": 2, "linear_num_key_heads": 16}
# 9 ranks share 3 groups of 3 + 2 heads: 15 · 64 = 960 rows are no multiple of 9, 15 · 48 = 720 are.
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1152, "head_dim": None}


def model_message(hf_config: dict[str, object], **changes: Any) -> str:
    return message(lambda c: check_model(c, hf_config), **changes)


@pytest.mark.parametrize(
    ("model", "layout", "expected"),
    [
        ({}, {"tp": 3}, "tp: got 3, which does not divide the model's num_attention_heads=16 and neither divides num_"),
        ({}, {"tp": 5}, "tp: got 5, which does not divide the model's num_attention_heads=16 and intermediate_size=3"),
        ({"intermediate_size": 6}, {"tp": 4}, "tp: got 4, which does not divide the model's intermediate_size=6"),
        (
            {**NINE_HEADS, "hidden_size": 9 * 64},
            {"tp": 9},
            "tp: got 9, which does not divide the 384 rows of the model's key and value heads; valid values: 1, 3",
        ),
        (
            {**NINE_HEADS, "hidden_size": 9 * 48},
            {"tp": 6},
            "tp: got 6, which does not divide the model's num_attention_heads=9; valid values: 1, 3, 9",
        ),
        # 6 divides the query heads and the feed-forward, but 4 key-value heads neither divide nor are divided.
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            {"tp": 6},
            "tp: got 6, which neither divides num_key_value_heads=4 nor is a multiple of it; valid values: 1, 2, 4",
        ),
        (
            {"qk_norm_type": "per_layer"},
            {"tp": 16},
            "tp: got 16, which exceeds num_key_value_heads=8, though a norm over all heads needs whole ones",
        ),
        (QWEN3_NEXT, {"cp": 2}, "cp: got 2, but gated delta nets pass a state from token to token of a row"),
        (
            QWEN3_NEXT | {"linear_num_key_heads": 6, "num_key_value_heads": 4},
            {"tp": 4},
            "tp: got 4, which does not divide the model's linear_num_key_heads=6; valid values: 1, 2",
        ),
        (QWEN3_NEXT, {"tp": 4}, "tp: got 4, which does not divide num_key_value_heads=2, and heads of gated attention"),
    ],
)
def test_layouts_that_a_model_cannot_be_split_to(
    model: dict[str, object], layout: dict[str, int], expected: str
) -> None:
    hf_config = {name: size for name, size in {**QWEN3_0_6B, **model}.items() if size is not None}
    got = model_message(hf_config, **{f"actor__layout__{name}": size for name, size in layout.items()})
    assert got.startswith(f"actor.layout.{expected}")


@pytest.mark.parametrize(
    ("model", "tp"),
    [
        ({}, 2),
        # Two ranks share a key-value head.
        ({}, 16),
        ({"qk_norm_type": "per_layer"}, 8),
        (QWEN3_NEXT, 2),
        # Key-value heads default to query heads.
        ({"num_key_value_heads": None}, 16),
    ],
)
def test_layouts_that_a_model_can_be_split_to(model: dict[str, object], tp: int) -> None:
    hf_config = {name: size for name, size in {**QWEN3_0_6B, **model}.items() if size is not None}
    check_model(config(actor__layout__tp=tp), hf_config)


def test_experts_of_qwen3_are_trained_by_more_ranks_than_key_value_heads() -> None:
    spec = read_model_spec(PACKAGED / "model/hf/qwen3-235b-a22b")
    assert spec.dims.num_kv_heads == 4
    check_model(config(actor__layout__tp=8, actor__layout__sequence_parallel=True), spec.hf_config)


def test_engines_keep_key_heads_of_delta_nets_whole() -> None:
    got = model_message({**QWEN3_NEXT, "linear_num_key_heads": 6}, rollout__engine__tp=4)
    assert got.startswith("rollout.engine.tp: got 4, which does not divide the model (num_attention_heads=16, ")
    assert got.endswith("valid values: 1, 2")


def test_rows_fit_the_positions_of_the_model() -> None:
    hf_config = {**QWEN3_0_6B, "max_position_embeddings": 2047}
    lengths = {"data__max_prompt_tokens": 1024, "rollout__max_response_tokens": 1024}
    assert model_message(hf_config, **lengths).startswith(
        "data.max_prompt_tokens=1024 + rollout.max_response_tokens=1024 = 2048, but the model has max_position_embeddi"
    )
    check_model(config(**lengths), {**QWEN3_0_6B, "max_position_embeddings": 2048})
    check_model(config(sft__max_tokens=2047, **lengths), hf_config, for_sft=True)
    with pytest.raises(ConfigError, match=r"^sft\.max_tokens=2048, but the model has max_position_embeddings=2047;"):
        check_model(config(sft__max_tokens=2048, **lengths), hf_config, for_sft=True)


@pytest.mark.parametrize("value", [None, "16", 0, 16.0])
def test_config_json_without_a_dimension(value: object) -> None:
    got = model_message({**QWEN3_0_6B, "num_attention_heads": value})
    assert got.startswith(f"model.path: config.json has num_attention_heads={value!r}, expected a positive int")


@pytest.mark.parametrize(
    ("device", "installed", "dtype", "refused"),
    [
        ("cuda", True, "float32", True),
        ("cuda", True, "bfloat16", False),
        ("cuda", False, "float32", False),
        ("cpu", True, "float32", False),
    ],
)
def test_transformer_engine_does_not_train_in_float32(
    device: str, installed: bool, dtype: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.config.models.platform", PLATFORMS[device])
    monkeypatch.setattr("megarl.config.target.find_spec", lambda name: installed or None)
    if not refused:
        check_sft(config(model__dtype=dtype))
        return
    with pytest.raises(ConfigError, match=r"^model.dtype: got float32, but Transformer Engine .*model.dtype=bfloat16$"):
        check_sft(config(model__dtype=dtype))
