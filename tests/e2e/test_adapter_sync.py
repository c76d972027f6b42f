"""Engines that are sent adapters alone generate with the trainer's policy, and get no other byte."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.cluster.cluster import Cluster
from megarl.types import FloatArray, RolloutBatch, Row, row_from_sample
from megarl_lab.recipes.tasks.generate import TaskFiles
from tests.e2e import bridge_run, restart_run
from tests.e2e.support import (
    Policy,
    largest_difference,
    mean_difference,
    open_policy,
    random_prompts,
    random_sequences,
    rows_of,
    small_config,
)
from tests.e2e.test_bridge import LAYOUTS, fresh_answers, run_and_export
from tests.e2e.test_engine_restart import SETTINGS
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.rank_pool import RankPool

# float32 rounding of two implementations; wrong or stale adapters are off by 1e-2 and more.
NATS = 1e-5
RANK = 4
ENGINE_TP2, TWO_ENGINES = "rollout.engine.tp=2", "rollout.engine.num_engines=2"
LORA = f"actor.lora={{rank: {RANK}, alpha: 16, sync: adapter}}"
# A [r, in] and B [out, r] of q, k, v, o, gate, up and down of `make_checkpoint`'s two layers, in float32.
ADAPTER_BYTES = 4 * 2 * RANK * ((64 + 128) + 2 * (64 + 64) + (128 + 64) + 2 * (64 + 96) + (96 + 64))
# The tied embedding, the last norm, and in each layer two norms, those of queries and keys, and the matrices.
NUM_PARAMETERS = 264 * 64 + 64 + 2 * (2 * 64 + 2 * 32 + 64 * (128 + 2 * 64 + 128) + 3 * 64 * 96)
RUN = (*SETTINGS, "validation.every_steps=1")


def rows_and_logprobs(rollout: RolloutBatch) -> tuple[list[Row], list[FloatArray]]:
    rows = [row_from_sample(sample) for sample in rollout.samples]
    return rows, [row.quantities["rollout_logprobs"] for row in rows]


def train(policy: Policy, steps: Sequence[int]) -> list[float]:
    """Update on fresh rollouts and push; return what the wires carried."""
    measured = []
    for step in steps:
        rows, _ = rows_and_logprobs(policy.rollout(random_prompts([12] * 8, seed=step), step=step))
        policy.update(rows, step=step)
        measured.append(policy.sync.push(step, verify=True)["sync/wire_bytes"])
    return measured


def test_adapters_alone_make_the_engine_the_trainers_policy(tmp_path: Path) -> None:
    """With what the prefix cache holds of the adapters before, and with requests in flight."""
    model = make_checkpoint(tmp_path / "model", tied=True)
    alone = ("actor.layout={tp: 1, sequence_parallel: false}", "placement.mode=split")
    config = small_config(model, LORA, *alone, "actor.optimizer.lr=0.01")
    # Three blocks of 32 tokens, which the engine caches.
    shared, sequences = random_sequences(1, 96)[0], random_sequences(8, 48)
    prompts = [replace(prompt, token_ids=(*shared, *prompt.token_ids)) for prompt in random_prompts([8] * 4)]
    with Cluster(config) as cluster:
        policy = open_policy(cluster, config)
        measured = [policy.sync.push(0, verify=True)["sync/wire_bytes"]]
        base = cluster.engines.prompt_logprobs(sequences)
        policy.rollout(prompts)
        measured += train(policy, [1, 2])
        trained = cluster.engines.prompt_logprobs(sequences)
        assert mean_difference(base, trained) > 1e-2
        assert largest_difference(trained, policy.logprobs(rows_of(sequences))) <= NATS
        rows, sampled = rows_and_logprobs(policy.rollout(prompts, step=2))
        before = policy.logprobs(rows)
        assert largest_difference(sampled, before) <= NATS
        # vLLM scales B in the tensors that it is given: the same adapters again give the same bits.
        policy.sync.push(2, verify=True)
        assert largest_difference(cluster.engines.prompt_logprobs(sequences), trained) == 0
        policy.update(rows, step=3)

        def push(*_: object) -> None:
            """When the first sample has ended, the others are under way."""
            measured.append(policy.sync.push(3, verify=True)["sync/wire_bytes"])

        rollout = policy.rollout(random_prompts([8] * 24), max_tokens=176, step=3, at_first=push)
        versions = [sample.segments[1].weight_versions for sample in rollout.samples]
        assert any(v[0] == 2 and v[-1] == 3 for v in versions)
        rows, sampled = rows_and_logprobs(rollout)
        new = [(v == 3) for v in versions]
        assert largest_difference(pick(sampled, new), pick(policy.logprobs(rows), new)) <= NATS
        policy.sync.close()
    assert measured == [ADAPTER_BYTES] * 4


def pick(values: Sequence[FloatArray], chosen: Sequence[np.ndarray]) -> list[FloatArray]:
    return [each[mask] for each, mask in zip(values, chosen, strict=True)]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("layout", "engines"), [("TP2", ENGINE_TP2), ("TP2xPP2", ENGINE_TP2), ("PP2", TWO_ENGINES)])
def test_engines_answer_as_new_ones_with_merged_weights(
    layout: str, engines: str, engine_process: RankPool, tmp_path: Path
) -> None:
    """Workers on the trainer's devices get over wires what the rank beside them lacks."""
    report, export = run_and_export("untied", [LAYOUTS[layout], LORA, engines], tmp_path)
    assert largest_difference(report.engine[-1], fresh_answers(engine_process, export)) <= NATS
    for engine, trainer in zip(report.engine, report.trainer, strict=True):
        assert largest_difference(engine, trainer) <= NATS
    assert mean_difference(report.engine[0], report.engine[-1]) > 1e-3
    assert report.planned == report.minimum
    assert report.measured == [sum(report.minimum)] * (1 + bridge_run.ROUNDS)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_whole_runs(sums: TaskFiles, tmp_path: Path) -> None:
    """Of three steps, with validation and export; the trainer has two ranks, and two engines have devices of theirs."""
    model = make_checkpoint(tmp_path / "model", tied=True)
    inputs = (f"model.path={model}", f"data.train=[{sums.train}]", f"data.val=[{sums.val}]")
    given = [*RUN, *inputs, "placement.mode=split", TWO_ENGINES]
    bytes_of = {"adapter": 2 * ADAPTER_BYTES, "merged": 2 * 4 * NUM_PARAMETERS}
    for sync, num_bytes in bytes_of.items():
        with RankPool(1, timeout_s=400.0) as pool:
            own = (f"actor.lora={{rank: {RANK}, alpha: 16, sync: {sync}}}", f"run.dir={tmp_path / sync}")
            (seen,) = pool.run(restart_run.run, [*given, *own], [], False)[0]
        steps = [metrics for metrics in seen.metrics if "sync/wire_bytes" in metrics]
        assert [metrics["sync/wire_bytes"] for metrics in steps] == [num_bytes] * restart_run.NUM_STEPS
        assert max(metrics["mismatch/abs_mean"] for metrics in steps) <= NATS
