"""Run in a process of its own (`RankPool`): the same training again and again on one cluster, in which engines die."""

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple
from unittest.mock import patch

from megarl.cluster.cluster import Cluster
from megarl.config import load_config
from megarl.record.metrics import read_metrics
from megarl.record.recorder import RunRecorder
from megarl.rollout.source import Group
from megarl.train.inputs import open_train_inputs
from megarl.train.wiring import build_trainer
from megarl.types import Row, Sample
from tests.e2e.support import RUN_FILE, TP2, move_apart
from tests.helpers.kill_resume import MEASURED
from tests.helpers.rank_pool import RankContext

DEADLY_STEP, NUM_STEPS = 2, 3
# In this time a sync comes to where it waits for an engine that does not go on.
_REACH_S = 2.0


class Death(NamedTuple):
    """When a process of `Cluster.pids` is killed."""

    moment: Literal["generating", "idle", "syncing"]
    victim: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Metrics of each step but what is measured; how many requests were submitted again; what the exports hold."""

    metrics: list[dict[str, float]]
    num_again: list[int]
    weights: bytes


class Kill:
    """Kills the victim of `death`, once, when its moment of the deadly step is there."""

    def __init__(self, cluster: Cluster, death: Death | None) -> None:
        self._cluster, self._death = cluster, death

    def __call__(self, moment: str, step: int) -> None:
        if self._death is None or self._death.moment != moment or step != DEADLY_STEP:
            return
        pid, self._death = self._cluster.pids[self._death.victim], None
        if moment == "syncing":
            # It takes no weights any more, so that the sync is under way when it dies.
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(_REACH_S, os.kill, (pid, signal.SIGKILL)).start()
        else:
            os.kill(pid, signal.SIGKILL)


def run(_: RankContext, settings: Sequence[str], deaths: Sequence[Death], apart: bool) -> list[Seen]:
    """What an undisturbed run leaves behind, and then one for each death."""
    config = load_config(RUN_FILE, [*TP2, *settings, "run.name=undisturbed"])
    with Cluster(config, roles=open_train_inputs(config).roles) as cluster:
        if apart:
            move_apart(cluster)
        return [_train(cluster, settings, death) for death in (None, *deaths)]


def _train(cluster: Cluster, settings: Sequence[str], death: Death | None) -> Seen:
    config = load_config(RUN_FILE, [*TP2, *settings, f"run.name={'undisturbed' if death is None else '-'.join(death)}"])
    recorder = RunRecorder(config)
    trainer = build_trainer(open_train_inputs(config), cluster, recorder)
    kill, num_again = Kill(cluster, death), list[int]()
    check, push, start_again = trainer.gate.check, trainer.supervisor.push, cluster.engines.start_again
    finish, step = Group.finish, 0

    async def deadly_finish(group: Group, sample: Sample) -> None:
        nonlocal step
        step = group.plan.step
        await finish(group, sample)
        kill("generating", step)

    def deadly_check(rows: Sequence[Row]) -> None:
        kill("idle", step)
        check(rows)

    def deadly_push(version: int) -> dict[str, float]:
        kill("syncing", version)
        return push(version)

    trainer.supervisor.push = deadly_push  # type: ignore[method-assign]

    def counted(engine: int, *, exactly: bool) -> None:
        num_again.append(sum(each.engine == engine for each in cluster.engines._open.values()))
        start_again(engine, exactly=exactly)

    trainer.gate.check = deadly_check  # type: ignore[method-assign]
    cluster.engines.start_again = counted  # type: ignore[method-assign]
    with patch.object(Group, "finish", deadly_finish):
        trainer.fit()
    cluster.engines.start_again = start_again  # type: ignore[method-assign]
    records, exports = read_metrics(recorder.paths.metrics), (recorder.paths.export, recorder.paths.export_adapter)
    return Seen(
        metrics=[{k: v for k, v in r.metrics.items() if not k.startswith(MEASURED)} for r in records],
        num_again=num_again,
        weights=b"".join(file.read_bytes() for directory in exports for file in directory.glob("*.safetensors")),
    )
