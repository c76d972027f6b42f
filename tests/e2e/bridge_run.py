"""Run in a process of its own (`RankPool`): one cluster whose engines get their weights over the bridge."""

import itertools
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from megarl.cluster.cluster import Cluster
from megarl.cluster.processes import wait_all
from megarl.cluster.roles import actor_role
from megarl.cluster.sync_plan import engine_ranks, plan_input_of
from megarl.parallel.worker import RankWorker
from megarl.sync.plan.build import Holding
from megarl.train.export import export_model
from megarl.types import FloatArray, row_from_sample
from megarl.weights.families import read_model_spec
from tests.e2e.support import open_policy, random_prompts, random_sequences, rows_of, small_config
from tests.helpers.boxes import covered, received_bytes
from tests.helpers.rank_pool import RankContext

ROUNDS = 3
# In this time a sync comes to where it waits for a rank that does not go on.
_REACH_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What engine and trainer say of the same sequences after each sync, and bytes over the wire.

    minimum: per worker, counted element by element; planned: per worker; measured: of each sync, all workers together.
    """

    engine: list[list[FloatArray]]
    trainer: list[list[FloatArray]]
    minimum: list[int]
    planned: list[int]
    measured: list[float]


def sequences() -> list[list[int]]:
    return random_sequences(8, 48)


def run(_: RankContext, model: str, settings: Sequence[str], export: str) -> Report:
    """Three rounds of training and syncing, then an export."""
    config = small_config(Path(model), "actor.optimizer.lr=0.003", *settings)
    with Cluster(config) as cluster:
        policy = open_policy(cluster, config)
        sync = policy.sync
        engine, trainer = list[list[FloatArray]](), list[list[FloatArray]]()
        measured = [policy.sync.push(0, verify=True)["sync/wire_bytes"]]
        for step in range(1, ROUNDS + 1):
            rollout = policy.rollout(random_prompts([12] * 8, seed=step), step=step)
            policy.update([row_from_sample(sample) for sample in rollout.samples], step=step)
            # Only every other sync is checked, and fills what is not sent with NaN.
            measured.append(policy.sync.push(step, verify=step % 2 == 1)["sync/wire_bytes"])
            engine.append(cluster.engines.prompt_logprobs(sequences()))
            trainer.append(policy.logprobs(rows_of(sequences())))
        export_model(cluster.workers, actor_role(config), Path(export))
        held = [p.call(RankWorker.held_weights) for p in cluster.workers.processes]
        boxes = wait_all(held, timeout_s=60, doing="asking what ranks hold")
        plan = sync.plan
        shapes = {name: spec.shape for name, spec in plan.specs.items()}
        # Colocated: each worker is on the device of a rank.
        engine_config = config.rollout.engine
        plan_input = plan_input_of(read_model_spec(model), config.model, config.actor, engine_config, config.sync)
        near = itertools.chain(*engine_ranks(plan_input, engine_config, config.placement.trainer))
        widths = {name: spec.dtype.itemsize for name, spec in plan.specs.items()}
        minimum = [
            sum(widths[name] * count for name, count in lacking)
            for lacking in (
                _lacking(plan.needs[receiver], boxes[rank], shapes)
                for receiver, rank in zip(sorted(plan.needs), near, strict=True)
            )
        ]
        sync.close()
        assert not list(Path("/dev/shm").glob(f"megarl-{cluster.scope.run_id}-bridge-*"))
        planned = [received_bytes(plan, receiver) for receiver in sorted(plan.needs)]
        return Report(engine=engine, trainer=trainer, minimum=minimum, planned=planned, measured=measured)


def run_killed(_: RankContext, model: str) -> tuple[str, list[str]]:
    """What a sync says whose engine is killed while it receives; and what the run leaves on this machine."""
    config = small_config(Path(model), "rollout.engine.tp=2")
    with Cluster(config) as cluster:
        policy = open_policy(cluster, config)
        sync = policy.sync
        sync.push(0, verify=False)
        # One rank does not go on, so that every worker waits for what it would send.
        os.kill(cluster.pids["trainer rank 1"], signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            pushed = pool.submit(sync.push, 1, verify=False)
            time.sleep(_REACH_S)
            assert pushed.running()
            os.kill(cluster.pids["engine 0"], signal.SIGKILL)
            error = pushed.exception()
        cluster.close(failed=True)
        pids = [name for name, pid in cluster.pids.items() if psutil.pid_exists(pid)]
        files = [str(path) for path in Path("/dev/shm").glob(f"megarl-{cluster.scope.run_id}-bridge-*")]
    return f"{type(error).__name__}: {error}", pids + files


def _lacking(needed: Holding, held: Holding, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """(tensor, elements) that one process needs and another does not hold."""
    for name, boxes in needed.items():
        yield name, int((covered(shapes[name], boxes) & ~covered(shapes[name], held.get(name, ()))).sum())
