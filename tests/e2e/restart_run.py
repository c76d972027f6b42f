"""Run in a process of its own (`RankPool`): the same training twice on one cluster, the second time an engine dies."""

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megarl.cluster import Cluster
from megarl.collection import Collected
from megarl.config import load_config
from megarl.inputs import open_train_inputs
from megarl.metrics import read_metrics
from megarl.observe import RunRecorder
from megarl.rollout.source import OnSample, ignore_sample
from megarl.trainer import Trainer
from megarl.types import Prompt, RolloutBatch, Row, Sample
from tests.e2e.support import RUN_FILE
from tests.helpers.rank_pool import RankContext
from tools.bench.kill_resume import MEASURED

DEADLY_STEP, NUM_STEPS = 2, 3
# In this time a sync comes to where it waits for an engine that does not go on.
_REACH_S = 2.0


@dataclass(kw_only=True)
class Seen:
    """Metrics of each step but what is measured; how many requests were submitted again; the weights at the end."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    num_again: list[int] = field(default_factory=list)
    weights: bytes = b""


class DeadlyTrainer(Trainer):
    """Kills `victim`, once, when its `moment` comes."""

    victim: str
    moment: str
    _struck: bool = False

    def _strikes(self, moment: str, step: int) -> bool:
        strikes = moment == self.moment and step == DEADLY_STEP and not self._struck
        self._struck |= strikes
        return strikes

    def _kill(self) -> None:
        os.kill(self.cluster.pids[self.victim], signal.SIGKILL)

    def generate(self, prompts: Sequence[Prompt], step: int, on_sample: OnSample = ignore_sample) -> RolloutBatch:
        def kill_at_the_first(prompt: Prompt, sample: Sample) -> None:
            on_sample(prompt, sample)
            if self._strikes("generating", step):
                self._kill()

        return super().generate(prompts, step, kill_at_the_first)

    def learn(self, collected: Collected, step: int) -> tuple[list[Row], dict[str, float]]:
        if self._strikes("idle", step):
            self._kill()
        return super().learn(collected, step)

    def _push(self, version: int) -> dict[str, float]:
        if self._strikes("syncing", version):
            # It takes no weights any more, so that the sync is under way when it dies.
            os.kill(self.cluster.pids[self.victim], signal.SIGSTOP)
            threading.Timer(_REACH_S, self._kill).start()
        return super()._push(version)


def run(_: RankContext, settings: Sequence[str], moment: str, victim: str) -> tuple[Seen, Seen]:
    """What an undisturbed run and one whose engine dies leave behind."""
    configs = [load_config(RUN_FILE, [*settings, f"run.name={name}"]) for name in ("undisturbed", "disturbed")]
    seen = Seen(), Seen()
    with Cluster(configs[0], roles=open_train_inputs(configs[0]).roles) as cluster:
        submit_again = cluster.engines.submit_again
        for config, its_moment, its_seen in zip(configs, ("never", moment), seen, strict=True):

            def counted(submission, finished, *, exactly, counts=its_seen.num_again):  # type: ignore[no-untyped-def]
                counts.append(len(submission.requests) - len(finished))
                return submit_again(submission, finished, exactly=exactly)

            cluster.engines.submit_again = counted  # type: ignore[method-assign]
            recorder = RunRecorder(config)
            trainer = DeadlyTrainer(open_train_inputs(config), cluster, recorder)
            trainer.victim, trainer.moment = victim, its_moment
            trainer.fit()
            records = read_metrics(recorder.paths.metrics)
            its_seen.metrics = [{k: v for k, v in r.metrics.items() if not k.startswith(MEASURED)} for r in records]
            its_seen.weights = Path(recorder.paths.export / "model.safetensors").read_bytes()
    return seen
