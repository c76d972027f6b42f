"""Every rule: what passes, and the message of what does not."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest

from megarl.config import Config, from_dict
from megarl.config.check import (
    check_sft,
    check_train,
    check_train_preference,
    check_train_reward,
)
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


@pytest.mark.parametrize("check", [check_train, check_sft])
def test_valid_configuration_passes(check: Callable[[Config], None]) -> None:
    check(config())


# --- ranges


def check_ranges(config: Config) -> None:
    check_values(config, ())


AT_LEAST_1 = [
    "checkpoint.keep_last",
    "model.vocab_multiple",
    "data.max_prompt_tokens",
    "algo.aggregation_horizon_tokens",
    "actor.layout.tp",
    "actor.layout.dp",
    "actor.micro_batch_tokens",
    "actor.head.chunk_tokens",
    "reference.layout.tp",
    "reference.micro_batch_tokens",
    "critic.layout.first_stage_layers",
    "critic.micro_batch_tokens",
    "rollout.num_samples",
    "rollout.max_response_tokens",
    "rollout.engine.max_num_seqs",
    "rollout.engine.max_model_tokens",
    "rollout.engine.kv_cache_mib",
    "rollout.engine.block_size",
    "trainer.prompts_per_step",
    "trainer.mini_batch_prompts",
    "trainer.num_epochs",
    "validation.num_samples",
    "validation.max_prompts",
    "sft.batch_size",
    "sft.total_steps",
    "logging.num_rollouts",
    "cluster.num_cpus",
]
POSITIVE = [
    "algo.policy_loss.clip_high",
    "algo.kl.target_nats",
    "algo.kl.horizon",
    "actor.optimizer.lr",
    "actor.optimizer.eps",
    "critic.optimizer.lr",
    "rollout.temperature",
    "rollout.timeout_s",
    "trainer.mismatch_gate_nats",
    "cluster.start_timeout_s",
    "cluster.engine_start_timeout_s",
    "cluster.collective_timeout_s",
]
AT_LEAST_0 = [
    "sync.canary_every",
    "checkpoint.every_steps",
    "checkpoint.keep_best",
    "run.seed",
    "algo.kl.coef",
    "algo.entropy_coef",
    "actor.optimizer.weight_decay",
    "actor.optimizer.warmup_steps",
    "critic.warmup_steps",
    "logging.rollout_every_steps",
]
SHARE = [
    "actor.optimizer.decay_frac",
    "rollout.top_p",
    "rollout.engine.gpu_memory_utilization",
]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        *((key, 0, "0, expected >= 1") for key in AT_LEAST_1),
        *((key, 0.0, "0.0, expected > 0") for key in POSITIVE),
        *((key, 0.0, "0.0, expected in (0, 1]") for key in SHARE),
        *((key, 1.01, "1.01, expected in (0, 1]") for key in SHARE),
        ("algo.policy_loss.clip_low", 0.0, "0.0, expected in (0, 1]"),
        ("algo.policy_loss.clip_low", 1.01, "1.01, expected in (0, 1]"),
        ("algo.policy_loss.dual_clip", 1.0, "1.0, expected > 1, or null for no bound"),
        ("critic.value_clip", 0.0, "0.0, expected > 0, or null for no clipping"),
        ("actor.optimizer.betas", [0.9, 1.0], "1.0, expected in [0, 1)"),
        ("actor.optimizer.betas", [-0.1, 0.9], "-0.1, expected in [0, 1)"),
        ("actor.optimizer.clip_grad_norm", 0.0, "0.0, expected > 0 (1e9 never clips)"),
        ("actor.optimizer.min_lr_frac", -0.1, "-0.1, expected in [0, 1]"),
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


@pytest.mark.parametrize("key", AT_LEAST_0)
def test_negative(key: str) -> None:
    assert message(check_ranges, **{key: -1}) in (f"{key}: got {n}, expected >= 0" for n in ("-1", "-1.0"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 0) for key in AT_LEAST_0),
        *((key, 1.0) for key in SHARE),
        ("algo.policy_loss.clip_low", 1.0),
        ("algo.policy_loss.clip_high", 5.0),
        ("algo.policy_loss.dual_clip", None),
        ("actor.optimizer.betas", [0.0, 0.999]),
        ("actor.optimizer.min_lr_frac", 0.0),
        ("actor.optimizer.min_lr_frac", 1.0),
        ("rollout.top_k", -1),
        ("rollout.top_k", 1),
        ("cluster.object_store_mib", 75),
    ],
)
def test_edge_of_the_range(key: str, value: Any) -> None:
    changed = config(**{key: value})
    check_ranges(changed)
    got = attrgetter(key)(changed)
    assert got == (tuple(value) if isinstance(value, list) else value)


# --- every kind of run


def test_model_path() -> None:
    assert message(check_train, model__path="") == (
        "model.path: is empty; set it to a directory with config.json and *.safetensors"
    )


def test_sequence_parallel_needs_tensor_parallel() -> None:
    assert message(check_train, actor__layout__sequence_parallel=True) == (
        "actor.layout.sequence_parallel: got true with tp=1, but it shards over tensor-parallel ranks; "
        "set actor.layout.sequence_parallel=false or actor.layout.tp >= 2"
    )
    check_train(config(actor__layout__sequence_parallel=True, actor__layout__tp=2))


def test_longest_row_fits_a_micro_batch() -> None:
    lengths = {"data__max_prompt_tokens": 100, "rollout__max_response_tokens": 28}
    assert message(check_train, actor__micro_batch_tokens=127, **lengths) == (
        "actor.micro_batch_tokens: got 127, expected >= 128 (data.max_prompt_tokens=100 + "
        "rollout.max_response_tokens=28), or the longest row fits no micro-batch; raise it or shorten the two"
    )
    check_train(config(actor__micro_batch_tokens=128, **lengths))


def test_longest_row_of_supervised_training() -> None:
    sft = {"sft__train": ("a.jsonl",)}
    lengths = {"data__max_prompt_tokens": 100, "rollout__max_response_tokens": 28}
    assert message(check_sft, actor__micro_batch_tokens=127, **lengths, **sft).startswith(
        "actor.micro_batch_tokens: got 127, expected >= 128 (data.max_prompt_tokens=100 + rollout.max_response_tokens"
    )
    # One limit for the whole row takes the place of the two.
    check_sft(config(actor__micro_batch_tokens=64, sft__max_tokens=64, **lengths, **sft))
    assert message(check_sft, actor__micro_batch_tokens=63, sft__max_tokens=64, **lengths, **sft) == (
        "actor.micro_batch_tokens: got 63, expected >= 64 (sft.max_tokens=64), or the longest row fits no micro-batch; "
        "raise it or shorten rows"
    )


def test_longest_row_fits_the_engine() -> None:
    lengths = {"data__max_prompt_tokens": 100, "rollout__max_response_tokens": 28}
    assert message(check_train, rollout__engine__max_model_tokens=127, **lengths) == (
        "rollout.engine.max_model_tokens: got 127, expected >= 128 (data.max_prompt_tokens=100 + "
        "rollout.max_response_tokens=28); raise it, shorten the two, or set it to null"
    )
    check_train(config(rollout__engine__max_model_tokens=128, **lengths))


# --- RL training


def test_train_data_is_for_training_only() -> None:
    assert message(check_train, data__train=[]) == (
        "data.train: is empty; list parquet or JSONL files, as in data.train=[a.parquet]"
    )
    check_sft(config(data__train=[]))


def test_keep_best_needs_scores() -> None:
    best = {"checkpoint__keep_best": 1, "checkpoint__every_steps": 20, "data__val": ["v.parquet"]}
    check_train(config(**best))
    assert message(check_train, **best | {"data__val": []}) == (
        "checkpoint.keep_best: got 1, but data.val is empty, so no checkpoint has a score; "
        "set data.val, or checkpoint.keep_best=0"
    )
    assert message(check_train, **best | {"checkpoint__every_steps": 15}) == (
        "checkpoint.every_steps: got 15, expected a multiple of validation.every_steps=10, or checkpoints have no "
        "score to keep the best by; change either, or set checkpoint.keep_best=0"
    )
    greedy = {"checkpoint__best_metric": "val/test_score_greedy", "validation__greedy": False}
    assert message(check_train, **best | greedy) == (
        "checkpoint.best_metric: got 'val/test_score_greedy', but validation.greedy=false; set it to true, or "
        "checkpoint.best_metric=val/test_score"
    )


@pytest.mark.parametrize(
    ("check", "section"),
    [(check_sft, "sft"), (check_train_reward, "train_reward"), (check_train_preference, "train_preference")],
)
def test_keep_best_needs_held_out_rows_in_supervised_runs(check: Callable[[Config], None], section: str) -> None:
    best = {
        "checkpoint__keep_best": 1,
        "checkpoint__every_steps": 20,
        f"{section}__train": ("a.jsonl",),
        f"{section}__val": ("v.jsonl",),
        f"{section}__val_every_steps": 10,
    }
    check(config(**best))
    # Without held-out rows every checkpoint but the last ones was removed in silence.
    assert message(check, **best | {f"{section}__val": ()}) == (
        f"checkpoint.keep_best: got 1, but {section}.val is empty, so no checkpoint has a score; "
        f"set {section}.val, or checkpoint.keep_best=0"
    )
    assert message(check, **best | {"checkpoint__every_steps": 15}) == (
        f"checkpoint.every_steps: got 15, expected a multiple of {section}.val_every_steps=10, or checkpoints have no "
        "score to keep the best by; change either, or set checkpoint.keep_best=0"
    )


def test_truncated_sampling_needs_a_limit_and_a_choice() -> None:
    assert message(check_train, rollout__top_p=0.95) == (
        "rollout.top_p: got 0.95, but rollout.top_k=-1 does not limit the number of tokens that it leaves to sample "
        "from, which training records for every token; set rollout.top_k, as in rollout.top_k=100, or rollout.top_p=1.0"
    )
    assert message(check_train, rollout__top_k=1) == (
        "rollout.top_k: got 1, which leaves nothing to choose, so no token has a gradient; set it to at least 2, or to "
        "-1"
    )
    assert message(check_train, rollout__top_k=50, algo__cpo__method="verifier_sign") == (
        "rollout.top_k: got 50, but algo.cpo.method=verifier_sign compares log-probs over the whole vocabulary; set "
        "rollout.top_k=-1 and rollout.top_p=1.0"
    )
    check_train(config(rollout__top_k=2))
    check_train(config(rollout__top_p=0.95, rollout__top_k=50))
    assert message(check_train, rollout__temperature=0.0) == "rollout.temperature: got 0.0, expected > 0"


def test_a_single_prompt_has_nobody_elses_hint() -> None:
    settings = {"algo__cpo__method": "verifier_sign", "algo__cpo__shuffled_baseline": True}
    got = message(check_train, trainer__prompts_per_step=1, trainer__mini_batch_prompts=1, **settings)
    assert got.startswith("algo.cpo.shuffled_baseline: got true with trainer.prompts_per_step=1, ")
    check_train(config(trainer__prompts_per_step=2, trainer__mini_batch_prompts=1, **settings))


def test_mini_batches_are_whole() -> None:
    assert message(check_train, trainer__prompts_per_step=8, trainer__mini_batch_prompts=3) == (
        "trainer.mini_batch_prompts: got 3, which does not divide trainer.prompts_per_step=8; "
        "set it to a divisor, or to null"
    )
    check_train(config(trainer__prompts_per_step=8, trainer__mini_batch_prompts=4))


def test_dp_need_not_divide_the_rows() -> None:
    check_train(config(actor__layout__dp=4, trainer__prompts_per_step=3, rollout__num_samples=2))
    check_sft(config(sft__batch_size=6, actor__layout__dp=4))


def test_replay_needs_a_directory() -> None:
    assert message(check_train, rollout__source="replay") == (
        "rollout.replay_dir: is not set, but rollout.source=replay; "
        "set it to the records directory of an earlier run with rollout.record=true"
    )
    check_train(config(rollout__source="replay", rollout__replay_dir="runs/a/records"))


def test_warm_up_is_shortened_to_what_a_run_has() -> None:
    # 10 steps of 8 / 4 mini-batches, each passed 3 times: 60 optimizer steps.
    run = {
        "trainer__total_steps": 10,
        "trainer__prompts_per_step": 8,
        "trainer__mini_batch_prompts": 4,
        "trainer__num_epochs": 3,
    }
    assert warmup_warnings(config(actor__optimizer__warmup_steps=61, **run)) == [
        "actor.optimizer.warmup_steps: got 61, and the run has 60 optimizer steps; its learning rate rises until the "
        "last one"
    ]
    assert warmup_warnings(config(actor__optimizer__warmup_steps=60, **run)) == []


# --- supervised warm start


def test_sft_data_is_for_sft_only() -> None:
    assert message(check_sft, sft__train=[]) == (
        "sft.train: is empty; list parquet or JSONL files, as in sft.train=[a.parquet]"
    )
    check_train(config(sft__train=[]))


def test_sft_does_not_mind_how_rollouts_are_drawn() -> None:
    check_sft(config(rollout__top_p=0.9, rollout__num_samples=1))


def test_common_rules_come_with_both_kinds_of_run() -> None:
    for check in (check_train, check_sft):
        assert message(check, model__path="").startswith("model.path: is empty")


# --- the model's dimensions

QWEN3_0_6B: dict[str, object] = {  # dimensions from its public config.json
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
}


def model_message(hf_config: dict[str, object], **changes: Any) -> str:
    return message(lambda c: check_model(c, hf_config), **changes)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_tp_that_divides(tp: int) -> None:
    """With 16, two ranks share a key-value head."""
    check_model(config(actor__layout__tp=tp), QWEN3_0_6B)


@pytest.mark.parametrize(
    ("tp", "undivided"),
    [
        (3, "num_attention_heads=16"),
        (5, "num_attention_heads=16 and intermediate_size=3072"),
    ],
)
def test_tp_that_does_not_divide_heads(tp: int, undivided: str) -> None:
    assert model_message(QWEN3_0_6B, actor__layout__tp=tp) == (
        f"actor.layout.tp: got {tp}, which does not divide the model's {undivided} and neither divides "
        "num_key_value_heads=8 nor is a multiple of it; valid values: 1, 2, 4, 8, 16"
    )


@pytest.mark.parametrize(
    ("head_dim", "reason", "valid"),
    [
        # 9 ranks share 3 groups of 3 + 2 heads: 15 · 64 = 960 rows are no multiple of 9, 15 · 48 = 720 are.
        (64, "9, which does not divide the 384 rows of the model's key and value heads", "1, 3"),
        (48, "6, which does not divide the model's num_attention_heads=9", "1, 3, 9"),
    ],
)
def test_ranks_that_share_key_value_heads_have_equally_many_rows(head_dim: int, reason: str, valid: str) -> None:
    hf_config = {**QWEN3_0_6B, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1152}
    hf_config = {name: size for name, size in hf_config.items() if name != "head_dim"}
    tp, _, _ = reason.partition(",")
    assert model_message({**hf_config, "hidden_size": 9 * head_dim}, actor__layout__tp=int(tp)) == (
        f"actor.layout.tp: got {reason}; valid values: {valid}"
    )


def test_tp_beside_a_number_of_key_value_heads() -> None:
    """6 divides 12 query heads and the feed-forward, but 4 key-value heads neither divide nor are divided."""
    hf_config = {**QWEN3_0_6B, "num_attention_heads": 12, "num_key_value_heads": 4}
    assert model_message(hf_config, actor__layout__tp=6) == (
        "actor.layout.tp: got 6, which neither divides num_key_value_heads=4 nor is a multiple of it; "
        "valid values: 1, 2, 4"
    )


def test_norms_over_all_heads_need_whole_key_heads() -> None:
    """QWEN3_0_6B has 16 heads, which share 8 key heads."""
    hf_config = QWEN3_0_6B | {"qk_norm_type": "per_layer"}
    check_model(config(actor__layout__tp=8), hf_config)
    assert message(lambda c: check_model(c, hf_config), actor__layout__tp=16) == (
        "actor.layout.tp: got 16, which exceeds num_key_value_heads=8, though a norm over all heads needs whole ones "
        "on a rank; valid values: 1, 2, 4, 8"
    )


def test_experts_of_qwen3_are_trained_by_more_ranks_than_key_value_heads() -> None:
    for name in ("qwen3-30b-a3b", "qwen3-235b-a22b"):
        spec = read_model_spec(PACKAGED / "model" / "hf" / name)
        layout = {"actor__layout__tp": 8, "actor__layout__sequence_parallel": True}
        assert spec.dims.num_kv_heads == 4
        check_model(config(**layout), spec.hf_config)


QWEN3_NEXT = {**QWEN3_0_6B, "num_key_value_heads": 2, "linear_num_key_heads": 16}


@pytest.mark.parametrize(
    ("hf_config", "layout", "expected"),
    [
        (
            QWEN3_NEXT,
            {"actor__layout__cp": 2},
            "actor.layout.cp: got 2, but gated delta nets pass a state from token to token of a row, and no "
            "context-parallel form of them is implemented; set actor.layout.cp=1, and more tp or recompute",
        ),
        (
            {**QWEN3_NEXT, "linear_num_key_heads": 6, "num_key_value_heads": 4},
            {"actor__layout__tp": 4},
            "actor.layout.tp: got 4, which does not divide the model's linear_num_key_heads=6; valid values: 1, 2",
        ),
        (
            QWEN3_NEXT,
            {"actor__layout__tp": 4},
            "actor.layout.tp: got 4, which does not divide num_key_value_heads=2, and heads of gated attention cannot "
            "be split; valid values: 1, 2",
        ),
    ],
)
def test_layouts_keep_rows_and_heads_of_delta_nets_whole(
    hf_config: dict[str, object], layout: dict[str, int], expected: str
) -> None:
    assert model_message(hf_config, **layout) == expected
    check_model(config(actor__layout__tp=2), QWEN3_NEXT)


def test_engines_keep_key_heads_of_delta_nets_whole() -> None:
    assert model_message({**QWEN3_NEXT, "linear_num_key_heads": 6}, rollout__engine__tp=4) == (
        "rollout.engine.tp: got 4, which does not divide the model (num_attention_heads=16, intermediate_size=3072, "
        "linear_num_key_heads=6, num_key_value_heads=2); valid values: 1, 2"
    )


def test_tp_that_does_not_divide_the_feed_forward() -> None:
    hf_config = {**QWEN3_0_6B, "intermediate_size": 6}
    assert model_message(hf_config, actor__layout__tp=4) == (
        "actor.layout.tp: got 4, which does not divide the model's intermediate_size=6; valid values: 1, 2"
    )


def test_key_value_heads_default_to_query_heads() -> None:
    hf_config = {k: v for k, v in QWEN3_0_6B.items() if k != "num_key_value_heads"}
    check_model(config(actor__layout__tp=16), hf_config)
    assert model_message(hf_config, actor__layout__tp=5).endswith("valid values: 1, 2, 4, 8, 16")


def test_rows_fit_the_positions_of_the_model() -> None:
    hf_config = {**QWEN3_0_6B, "max_position_embeddings": 2047}
    lengths = {"data__max_prompt_tokens": 1024, "rollout__max_response_tokens": 1024}
    assert model_message(hf_config, **lengths) == (
        "data.max_prompt_tokens=1024 + rollout.max_response_tokens=1024 = 2048, but the model has "
        "max_position_embeddings=2047; shorten one of the two"
    )
    check_model(config(**lengths), {**QWEN3_0_6B, "max_position_embeddings": 2048})
    check_model(config(sft__max_tokens=2047, **lengths), hf_config, for_sft=True)
    with pytest.raises(
        ConfigError, match=r"^sft\.max_tokens=2048, but the model has max_position_embeddings=2047; low"
    ):
        check_model(config(sft__max_tokens=2048, **lengths), hf_config, for_sft=True)


@pytest.mark.parametrize("value", [None, "16", 0, 16.0])
def test_config_json_without_a_dimension(value: object) -> None:
    hf_config = {**QWEN3_0_6B, "num_attention_heads": value}
    assert model_message(hf_config) == (
        f"model.path: config.json has num_attention_heads={value!r}, expected a positive int; is it a causal LM?"
    )


# --- mixtures and profiles


def test_weights_of_files() -> None:
    check_train(config(data__train=[{"path": "a", "weight": 0.5}, "b"]))
    assert message(check_train, data__train=["a", {"path": "b", "weight": 0}]) == (
        "data.train[1].weight: got 0.0, expected > 0; leave the file out instead"
    )


def test_profiled_steps_lie_in_the_run() -> None:
    check_train(config(logging__profile_steps=[1, 100]))
    for steps in ([0, 3], [4, 3], [3, 101]):
        assert message(check_train, logging__profile_steps=steps) == (
            f"logging.profile_steps: got {steps}, expected first and last step with "
            "1 <= first <= last <= trainer.total_steps=100"
        )


def test_a_run_without_steps_only_validates() -> None:
    """So a warm-up that no step follows is no error, but a run that does nothing is one."""
    fine = config(trainer__total_steps=0, actor__optimizer__warmup_steps=5, data__val=("val.parquet",))
    check_train(fine)
    got = message(check_train, trainer__total_steps=0, data__val=())
    assert got.startswith("trainer.total_steps: got 0, which only validates, but data.val is empty")


def test_pass_at_needs_so_many_answers() -> None:
    got = message(check_train, validation__pass_at=(1, 4), validation__num_samples=2)
    assert got.startswith("validation.pass_at: got [1, 4], expected at most validation.num_samples=2")


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


def test_large_models_have_half_an_hour_to_start_and_suspended_jobs_a_day() -> None:
    """An engine of 30B loads, compiles and captures graphs. torch counts the time for which ranks are stopped; the
    driver's limit, which finds hangs before, does not.
    """
    cluster = Config().cluster
    assert cluster.node_timeout_s == 30.0
    assert (cluster.engine_start_timeout_s, cluster.collective_timeout_s) == (1800.0, 86400.0)
    assert Config().rollout.timeout_s < cluster.collective_timeout_s


def test_ranks_wait_longer_for_each_other_than_for_a_lost_host_to_be_known() -> None:
    assert message(check_sft, cluster__collective_timeout_s=30.0) == (
        "cluster.collective_timeout_s: got 30, expected more than cluster.node_timeout_s=30, or ranks give up before a "
        "lost host can be named; raise it, or lower cluster.node_timeout_s"
    )
    check_sft(config(cluster__collective_timeout_s=30.0, cluster__node_timeout_s=29.0))
