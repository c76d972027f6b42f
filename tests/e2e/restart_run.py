"""Run in a process of its own (`RankPool`): the same training again and again on one cluster, in which engines die."""

import os
import signal
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from megarl.cluster import Cluster, Process
from megarl.cluster.engines import Submission
from megarl.config import load_config
from megarl.record.metrics import read_metrics
from megarl.record.recorder import RunRecorder
from megarl.rollout.source import OnSample, ignore_sample
from megarl.train.collect import Collected
from megarl.train.inputs import open_train_inputs
from megarl.train.loop import Trainer
from megarl.types import Prompt, RolloutBatch, Row, Sample
from tests.e2e.support import RUN_FILE
from tests.helpers.rank_pool import RankContext
from tools.bench.kill_resume import MEASURED

DEADLY_STEP, NUM_STEPS = 2, 3
# In this time a sync comes to where it waits for an engine that does not go on.
_REACH_S = 2.0


class Death(NamedTuple):
    """When a process of `Cluster.pids` is killed."""

    moment: Literal["generating", "idle", "syncing"]
    victim: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Metrics of each step but what is measured; how many requests were submitted again; the weights at the end."""

    metrics: list[dict[str, float]]
    num_again: list[int]
    weights: bytes


class DeadlyTrainer(Trainer):
    """Lets `death` come, if any does; `num_again` notes what is submitted again."""

    death: Death | None
    num_again: list[int]

    def _victim(self, moment: str, step: int) -> int | None:
        """The process that dies now; once."""
        if self.death is None or self.death.moment != moment or step != DEADLY_STEP:
            return None
        pid, self.death = self.cluster.pids[self.death.victim], None
        return pid

    def generate(self, prompts: Sequence[Prompt], step: int, on_sample: OnSample = ignore_sample) -> RolloutBatch:
        def kill_at_the_first(prompt: Prompt, sample: Sample) -> None:
            on_sample(prompt, sample)
            if pid := self._victim("generating", step):
                os.kill(pid, signal.SIGKILL)

        return super().generate(prompts, step, kill_at_the_first)

    def learn(self, collected: Collected, step: int) -> tuple[list[Row], dict[str, float]]:
        if pid := self._victim("idle", step):
            os.kill(pid, signal.SIGKILL)
        return super().learn(collected, step)

    def _push(self, version: int) -> dict[str, float]:
        if pid := self._victim("syncing", version):
            # It takes no weights any more, so that the sync is under way when it dies.
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(_REACH_S, os.kill, (pid, signal.SIGKILL)).start()
        return super()._push(version)


def _move_apart(cluster: Cluster) -> None:
    """Let every process be on a host of its own, as far as the driver knows: they share no memory."""

    def moved(process: Process) -> Process:
        there = replace(process, location=replace(process.location, host=process.name))
        process.roster.enter(there)
        return there

    for group in (*cluster.workers.groups, cluster.engines):
        group.processes[:] = map(moved, group.processes)


def run(_: RankContext, settings: Sequence[str], deaths: Sequence[Death], apart: bool) -> list[Seen]:
    """What an undisturbed run leaves behind, and then one for each death."""
    config = load_config(RUN_FILE, [*settings, "run.name=undisturbed"])
    with Cluster(config, roles=open_train_inputs(config).roles) as cluster:
        if apart:
            _move_apart(cluster)
        return [_train(cluster, settings, death) for death in (None, *deaths)]


def _train(cluster: Cluster, settings: Sequence[str], death: Death | None) -> Seen:
    config = load_config(RUN_FILE, [*settings, f"run.name={'undisturbed' if death is None else '-'.join(death)}"])
    recorder = RunRecorder(config)
    trainer = DeadlyTrainer(open_train_inputs(config), cluster, recorder)
    trainer.death, trainer.num_again = death, []
    submit_again = type(cluster.engines).submit_again

    def counted(submission: Submission, finished: Collection[int], *, exactly: bool) -> Submission:
        trainer.num_again.append(len(submission.requests) - len(finished))
        return submit_again(cluster.engines, submission, finished, exactly=exactly)

    cluster.engines.submit_again = counted  # type: ignore[method-assign]
    trainer.fit()
    records = read_metrics(recorder.paths.metrics)
    return Seen(
        metrics=[{k: v for k, v in r.metrics.items() if not k.startswith(MEASURED)} for r in records],
        num_again=trainer.num_again,
        weights=Path(recorder.paths.export / "model.safetensors").read_bytes(),
    )
