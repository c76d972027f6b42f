"""The size of Ray's object store by hand, and that a pass needs no more than is counted."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.cluster.object_store import object_store, routing_bytes
from megarl.config.batches import pass_bytes
from megarl.config.parse import from_dict
from megarl.config.schema import Config
from megarl.types import Row
from tests.helpers.small_model import write_config
from tests.unit.plan.test_experts import EXPERTS

MIB, GIB = 2**20, 2**30


def rollout(prompts: int, **trainer: Any) -> Config:
    """Groups of 8 rows of 1,024 + 15,360 tokens."""
    tree = {
        "data": {"max_prompt_tokens": 1024},
        "rollout": {"num_samples": 8, "max_response_tokens": 15360},
        "trainer": {"prompts_per_step": prompts, **trainer},
    }
    return from_dict(Config, tree)


def size(config: Config, command: str = "train", *, room: int = 1 << 50) -> int:
    derived = object_store(config.cluster, pass_bytes(config, command), room=room)
    assert derived is not None
    assert derived.key == "cluster.object_store_mib"
    assert isinstance(derived.value, int)
    return derived.value


@pytest.mark.parametrize(
    ("config", "mib", "least_gb"),
    [
        # An update: 32 Mi tokens, 4 + 1 bytes and four float32 numbers each; twice that.
        (rollout(256), 256 + 2 * 32 * 21, 0.7),
        (rollout(1024), 256 + 2 * 128 * 21, 2.8),
        # Scoring all rows takes more than an update of a quarter: two float32 numbers come back.
        (rollout(1024, mini_batch_prompts=256), 256 + 2 * 128 * 13, 1.7),
        (rollout(1), 256 + 6, 0.2),
    ],
)
def test_the_store_follows_the_rows_of_a_step(config: Config, mib: int, least_gb: float) -> None:
    assert size(config) == mib
    assert mib * MIB >= least_gb * 1e9


def test_rows_with_hints_and_recorded_experts_take_more(tmp_path: Path) -> None:
    """Rows of 16,384 tokens: with 1,024 tokens of a hint, and again with those of another prompt."""
    config, tokens = rollout(256), 2048 * 16384
    assert pass_bytes(config) == ("2,048 rows of 16,384 tokens", tokens * 21)
    tree: dict[str, Any] = {"method": "global", "hint": {"max_tokens": 1024}, "shuffled_baseline": True}
    cpo = from_dict(Config, {"algo": {"cpo": tree}, "actor": {"micro_batch_tokens": 32768}})
    hinted = replace(config, algo=cpo.algo, actor=cpo.actor)
    assert pass_bytes(hinted)[1] == 2048 * (16384 + 2 * 17408) * 13
    write_config(tmp_path, **EXPERTS)
    moe = {"model": {"path": str(tmp_path)}, "actor": {"moe": {"replay_routing": True}}}
    routed = from_dict(Config, moe)
    # Four layers, two experts of each token, int16.
    assert pass_bytes(config, "train", routing_bytes(routed.model, routed.actor.moe))[1] == tokens * (21 + 2 * 4 * 2)
    assert routing_bytes(routed.model, config.actor.moe) == 0
    top_k = replace(config, rollout=replace(config.rollout, top_k=20))
    assert pass_bytes(top_k)[1] == tokens * (21 + 4 * 20)


def test_supervised_commands_have_their_own_rows() -> None:
    tree = {"sft": {"batch_size": 64, "max_tokens": 1000}, "train_reward": {"batch_size": 16}}
    config = from_dict(Config, tree | {"data": {"max_prompt_tokens": 100}, "rollout": {"max_response_tokens": 400}})
    assert pass_bytes(config, "sft") == ("64 rows of 1,000 tokens", 64 * 1000 * 21)
    assert pass_bytes(config, "train-reward") == ("32 rows of 500 tokens", 32 * 500 * 21)
    assert size(config, "eval") == 256


def test_memory_bounds_it(tmp_path: Path) -> None:
    config = rollout(1024)
    assert size(config, room=GIB) == 1024
    derived = object_store(config.cluster, pass_bytes(config), room=GIB)
    assert derived is not None
    assert "but at most 30% of the host's memory and 50% of /dev/shm" in derived.reason
    assert size(config, room=MIB) == 75
    running = replace(config, cluster=replace(config.cluster, address="10.0.0.1:6379"))
    assert object_store(running.cluster, pass_bytes(running)) is None


def test_a_row_takes_as_much_as_is_counted() -> None:
    """Pickled, as Ray takes it: a prompt of one token, a response of 3,999, and what an update reads."""
    n = 3999
    numbers = {name: np.ones(n, np.float32) for name in ("advantages", "old_logprobs", "ref_logprobs", "correction")}
    row = Row(
        uid="a",
        sample_index=0,
        token_ids=np.arange(n + 1, dtype=np.int32),
        num_prompt_tokens=1,
        loss_mask=np.ones(n, np.bool_),
        quantities=numbers,
    )
    config = from_dict(Config, {"data": {"max_prompt_tokens": 1}, "rollout": {"max_response_tokens": n}})
    config = replace(
        config, rollout=replace(config.rollout, num_samples=1), trainer=replace(config.trainer, prompts_per_step=1)
    )
    assert pass_bytes(config)[1] == pytest.approx(len(pickle.dumps(row, protocol=5)), rel=0.02)
