"""Engines whose core is a process of its own, as vLLM has it on CUDA: syncs, updates in flight, deaths, and the end."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from megarl.cluster.cluster import Cluster
from megarl.cluster.roles import engine_spec
from megarl.errors import WorkerError
from megarl.host.janitor import mapped_files
from megarl.types import row_from_sample
from tests.e2e import engines
from tests.e2e.support import (
    largest_difference,
    mean_difference,
    open_policy,
    random_prompts,
    random_sequences,
    rows_of,
    small_config,
)
from tests.e2e.test_speculation import check_switch, requests
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.rank_pool import RankPool

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
NATS = 1e-5


@pytest.fixture(autouse=True)
def _core_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


def test_requests_in_flight_go_on_by_the_new_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The test sends its own function to the worker.
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    models = [make_checkpoint(tmp_path / f"seed{seed}", tied=True, seed=seed) for seed in (0, 1)]
    asked = [*requests(1.0, num=1, num_tokens=12), *requests(1.0, num=4, num_tokens=64)]
    files = [str(file) for file in models[1].glob("*.safetensors")]
    with RankPool(1, timeout_s=240.0) as pool:
        updated = pool.run(engines.update_in_flight, engine_spec(small_config(models[0])), files, asked)[0]
    # This process, vLLM's core, and on CPUs a worker.
    assert (updated.client, updated.num_processes) == ("SyncMPClient", 3)
    check_switch(models, asked, updated.completions)


def test_syncs_and_deaths_of_an_engine_with_two_workers(tmp_path: Path) -> None:
    config = small_config(
        make_checkpoint(tmp_path / "model", tied=True), "rollout.engine.tp=2", "actor.optimizer.lr=0.003"
    )
    sequences = random_sequences(4, 40)
    with Cluster(config) as cluster:
        engine = {name: pid for name, pid in cluster.pids.items() if name.startswith("engine 0")}
        # Besides the actor its two workers and, last, the core.
        assert list(engine) == ["engine 0", *(f"engine 0 worker {i}" for i in range(3))]
        assert set(engine.values()) <= set(cluster.scope.processes())
        shared = {file for pid in engine.values() for file in mapped_files(pid)}
        assert shared
        policy = open_policy(cluster, config)
        policy.sync.push(0, verify=True)

        def push(*_: object) -> None:
            """When the first sample has ended, the others are under way."""
            policy.sync.push(1, verify=True)

        rows = [row_from_sample(sample) for sample in policy.rollout(random_prompts([12] * 4)).samples]
        policy.update(rows, step=1)
        samples = policy.rollout(random_prompts([8] * 12), max_tokens=176, step=2, at_first=push).samples
        versions = np.concatenate([sample.segments[1].weight_versions for sample in samples])
        assert set(versions.tolist()) == {0, 1}
        given, trainer = cluster.engines.prompt_logprobs(sequences), policy.logprobs(rows_of(sequences))
        assert largest_difference(given, trainer) <= NATS
        new = [row_from_sample(sample) for sample in samples if (sample.segments[1].weight_versions == 1).all()]
        if new:
            assert mean_difference([row.quantities["rollout_logprobs"] for row in new], policy.logprobs(new)) <= NATS
        policy.sync.close()
        os.kill(engine["engine 0 worker 2"], signal.SIGKILL)
        with pytest.raises(WorkerError, match="engine 0"):
            policy.rollout(random_prompts([8] * 12), max_tokens=176, step=3)
        scope = cluster.scope
    assert scope.processes() == []
    assert scope.leftovers() == []
    assert [file for file in shared if file.exists()] == []
