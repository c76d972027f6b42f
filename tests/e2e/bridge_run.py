"""Run in a process of its own (`RankPool`): one cluster whose engines get their weights over the bridge."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megarl.cluster import Cluster
from megarl.cluster.bridge import BridgeSync
from megarl.cluster.processes import wait_all
from megarl.export import export_model
from megarl.parallel.weights.bridge.boxes import slices_of
from megarl.parallel.weights.bridge.plan import Holding
from megarl.roles import actor_role
from megarl.types import FloatArray, row_from_sample
from tests.e2e.support import open_policy, random_prompts, random_sequences, rows_of, small_config
from tests.helpers.rank_pool import RankContext

ROUNDS = 3


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
    config = small_config(Path(model), "actor.optimizer.lr=0.003", "sync.transport=bridge", *settings)
    with Cluster(config) as cluster:
        policy = open_policy(cluster, config)
        sync = cluster.weight_sync(policy.specs)
        assert isinstance(sync, BridgeSync)
        policy = replace(policy, sync=sync)
        engine, trainer = list[list[FloatArray]](), list[list[FloatArray]]()
        measured = [policy.sync.push(0, verify=True)["sync/wire_bytes"]]
        for step in range(1, ROUNDS + 1):
            rollout = policy.rollout(random_prompts([12] * 8, seed=step), step=step)
            policy.update([row_from_sample(sample) for sample in rollout.samples], step=step)
            # Only every other sync is checked, and fills what is not sent with NaN.
            measured.append(policy.sync.push(step, verify=step % 2 == 1)["sync/wire_bytes"])
            engine.append(cluster.engines.prompt_logprobs(sequences()))
            trainer.append(policy.score(rows_of(sequences())))
        export_model(cluster.workers, actor_role(config), Path(export))
        held = [(p, p.actor.call.remote("held_weights")) for p in cluster.workers.processes]
        boxes = wait_all(held, timeout_s=60, doing="asking what ranks hold")
        plan, num_ranks = sync.plan, len(boxes)
        shapes = {name: spec.shape for name, spec in plan.specs.items()}
        # Colocated: worker i is on the device of rank i.
        widths = {name: spec.dtype.itemsize for name, spec in plan.specs.items()}
        minimum = [
            sum(widths[name] * count for name, count in lacking)
            for lacking in (_lacking(plan.needs[s], boxes[s - num_ranks], shapes) for s in sorted(plan.needs))
        ]
        sync.close()
        assert not list(Path("/dev/shm").glob(f"{cluster.scope.shm_file('bridge').name}*"))
        planned = [plan.received_bytes(sink) for sink in sorted(plan.needs)]
        return Report(engine=engine, trainer=trainer, minimum=minimum, planned=planned, measured=measured)


def _lacking(needed: Holding, held: Holding, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """(tensor, elements) that one process needs and another does not hold."""
    for name, box in needed.items():
        lacking = np.zeros(shapes[name], dtype=bool)
        lacking[slices_of(box)] = True
        if name in held:
            lacking[slices_of(held[name])] = False
        yield name, int(lacking.sum())
