"""Small runs that are killed at random moments and resumed, and what must be equal to uninterrupted ones."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from megarl.config import load_config
from megarl.record.checkpoints import complete_steps
from megarl.record.metrics import MetricsRecord, RunPaths, read_metrics
from megarl.rollout.replay import read_record, record_path
from megarl.types import SegmentSource
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, generate
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model
from tests.helpers.killed import Killed, kill
from tests.helpers.rewriting import NOTES, num_branches
from tests.helpers.waiting import wait_until

RUN_FILES = {
    command: Path(__file__).parents[2] / "configs" / "run" / f"sums-{kind}.yaml"
    for command, kind in (("train", "rl"), ("sft", "sft"))
}
MEGARL = (sys.executable, "-W", "ignore", "-m", "megarl.cli")
# A resumed run may measure these differently; environment workers may die, or be too slow, in one run alone.
MEASURED = (
    "timing_",
    "perf/",
    "memory/",
    "process/",
    "engine/",
    "environment/restart",
    "foreign_connections/",
    "canary/",
)
SETTINGS = (
    "use.model=qwen3-tiny",
    "actor.layout={tp: 2, dp: 1, sequence_parallel: true}",
    "rollout.engine.num_engines=1",
    "run.deterministic=true",
    "data.max_prompt_tokens=128",
    "rollout.num_samples=4",
    "rollout.max_response_tokens=32",
    "rollout.engine.max_num_seqs=64",
    "trainer.prompts_per_step=4",
    # A model of random weights earns nothing: the entropy gives it a gradient, and the KL a coefficient that adapts.
    "algo.entropy_coef=0.1",
    "algo.kl.where=reward",
    "algo.kl.controller=adaptive",
    "algo.kl.horizon=100",
    "actor.optimizer.lr=0.003",
    "actor.optimizer.warmup_steps=4",
    "actor.optimizer.schedule=cosine",
    "validation.every_steps=3",
    "validation.max_prompts=4",
    "logging.tensorboard=false",
    "checkpoint.every_steps=1",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallRun:
    """A run of the command line, and where it writes. `environment`: variables that only this run has."""

    inputs: Path
    name: str
    command: str = "train"
    settings: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.inputs / "runs" / self.name)

    @property
    def arguments(self) -> list[str]:
        return [
            *MEGARL,
            *(self.command, str(RUN_FILES[self.command]), "--resume"),
            *SETTINGS,
            f"run.dir={self.inputs / 'runs'}",
            f"run.name={self.name}",
            f"model.path={self.inputs / 'model'}",
            f"data.train=[{self.inputs / 'data' / 'train.parquet'}]",
            f"data.val=[{self.inputs / 'data' / 'val.parquet'}]",
            f"sft.train=[{self.inputs / 'data' / 'sft.parquet'}]",
            *self.settings,
        ]

    def start(self) -> subprocess.Popen[bytes]:
        """Start, or continue after the last complete checkpoint; output goes to NAME.log."""
        self.paths.root.parent.mkdir(parents=True, exist_ok=True)
        with self.paths.root.with_suffix(".log").open("ab") as log:
            environment = os.environ | {NOTES: str(self.notes)} | dict(self.environment)
            return subprocess.Popen(self.arguments, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def records(self) -> list[MetricsRecord]:
        return read_metrics(self.paths.metrics) if self.paths.metrics.exists() else []

    @property
    def notes(self) -> Path:
        """Where an agent notes the branches that it begins."""
        return self.paths.root.with_suffix(".branches")

    def num_steps_since(self, time_s: float) -> int:
        """Training steps logged after a moment of Unix time."""
        return sum(record.time_s > time_s and "actor/lr" in record.metrics for record in self.records())

    def last_step(self) -> int:
        """The last step with metrics; -1 before the first."""
        return max((record.step for record in self.records()), default=-1)


def make_inputs(directory: Path) -> Path:
    """A tiny model and a few prompts."""
    generate(TASKS.get("sums"), directory / "data", GenerateConfig(seed=0, num_sft=64, num_train=64, num_val=4))
    sizes = TinyModelConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=96)
    make_tiny_model(directory / "model", sizes, seed=0)
    return directory


# Long samples, few rows in a step, and an engine that keeps the trainer waiting: samples are under way at every update.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "sync": (),
    "one_step_off": ("use.schedule=one_step_off",),
    "async": (
        "use.schedule=async",
        "run.deterministic=false",
        "rollout.record=true",
        "rollout.max_response_tokens=384",
        "rollout.engine.max_num_seqs=2",
        "trainer.prompts_per_step=1",
    ),
}


def asynchronous_faults(run: SmallRun, reference: SmallRun, num_steps: int) -> tuple[list[str], str]:
    """Say in words what is wrong with a finished asynchronous run, and what its records hold."""
    found, num_across, num_samples, num_resumed, max_lag = [], 0, 0, 0, 0
    for step in range(1, num_steps + 1):
        ours, theirs = (read_record(record_path(each.paths.records, step)) for each in (run, reference))
        if list(ours.prompts) != list(theirs.prompts):
            found.append(f"step {step}: prompts {list(ours.prompts)}, expected {list(theirs.prompts)}")
        for sample in ours.samples:
            policy = [segment for segment in sample.segments if segment.source is SegmentSource.POLICY]
            versions = np.concatenate([segment.weight_versions for segment in policy])
            max_lag = max(max_lag, step - 1 - int(versions.min()))
            num_samples += 1
            num_across += len(np.unique(versions)) > 1
            num_resumed += len(policy) > 1
    if max_lag > (limit := load_config(RUN_FILES["train"], run.settings).rollout.schedule.staleness):
        found.append(f"a token has a lag of {max_lag}, the limit is {limit}")
    replay = ("rollout.record=false", "rollout.source=regenerate", f"rollout.replay_dir={run.paths.records}")
    regenerated = replace(run, name=f"{run.name}-again", settings=(*run.settings, *replay))
    if exit_code := regenerated.start().wait():
        found.append(f"regenerating ended with {exit_code}; see {regenerated.paths.root}.log")
    elif _weights(regenerated) != _weights(run):
        found.append("regenerated weights")
    of_all = f"of {num_samples} samples {num_across} across updates, {num_resumed} resumed in their middle"
    return found, f"{of_all}; lag at most {max_lag}"


def _weights(run: SmallRun) -> bytes:
    return (run.paths.export / "model.safetensors").read_bytes()


def differences(run: SmallRun, reference: SmallRun) -> list[str]:
    """Where two finished runs differ: steps, metrics that are not measured, bytes of the exported weights."""
    found = []
    ours, theirs = ([record.step for record in each.records()] for each in (run, reference))
    if ours != theirs:
        found.append(f"steps: {ours} and {theirs}")
    found += differing_metrics(run, reference)
    if _weights(run) != _weights(reference):
        found.append("exported weights")
    return found


def assert_survives(whole: SmallRun) -> None:
    """A run with these settings that is killed after its first step and resumed, and one that samples the records of
    the finished run `whole` again, are equal to it to the bit.
    """
    killed = replace(whole, name="killed")
    process = killed.start()
    try:
        wait_until(lambda: killed.last_step() >= 1, "step 1", timeout_s=240.0, seen=killed.last_step, process=process)
        assert kill(process).leftovers == ()
    finally:
        process.kill()
        process.wait()
    again = ("rollout.record=false", "rollout.source=regenerate", f"rollout.replay_dir={whole.paths.records}")
    for run in (killed, replace(whole, name="again", settings=(*whole.settings, *again))):
        assert run.start().wait() == 0, run.paths.root.with_suffix(".log").read_text()
        assert differences(run, whole) == []


def differing_metrics(run: SmallRun, reference: SmallRun) -> list[str]:
    """Compare the records that both have, in their order."""
    found = []
    for ours, theirs in zip(run.records(), reference.records(), strict=False):
        mine, other = _compared(ours), _compared(theirs)
        names = sorted(mine.keys() | other.keys())
        found += [
            f"step {ours.step} {n}: {mine.get(n)} and {other.get(n)}" for n in names if mine.get(n) != other.get(n)
        ]
    return found


def _compared(record: MetricsRecord) -> dict[str, float]:
    return {name: value for name, value in record.metrics.items() if not name.startswith(MEASURED)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """So many seconds after so many more steps, and more branches of conversations, than a run had at its start.

    after_checkpoint: branches are counted from the first checkpoint on that the start completes.
    """

    num_steps: int
    delay_s: float
    num_branches: int = 0
    after_checkpoint: bool = False


def draw_moment(rng: random.Random, duration_s: float, *, trees: bool = False) -> Moment:
    """One in four while processes start, the others around a step, its checkpoint, or what follows.

    trees: half of all are just after a branch has begun, one of the next two steps or of those after a checkpoint.
    """
    if trees and rng.random() < 0.5:
        late = rng.random() < 0.5
        return Moment(num_steps=0, delay_s=0.0, num_branches=rng.randint(1, 24 if late else 120), after_checkpoint=late)
    if rng.random() < 0.25:
        return Moment(num_steps=0, delay_s=rng.uniform(0.0, duration_s / 2))
    return Moment(num_steps=rng.randint(1, 5), delay_s=rng.uniform(0.0, 2.0))


def kill_at(process: subprocess.Popen[bytes], run: SmallRun, moment: Moment) -> Killed | None:
    """SIGKILL the driver at a moment; None if it ended before."""
    began, earlier = time.time(), complete_steps(run.paths.checkpoints)
    while process.poll() is None and moment.after_checkpoint and complete_steps(run.paths.checkpoints) == earlier:
        time.sleep(0.02)
    num_before = num_branches(run.notes)
    while process.poll() is None and (
        run.num_steps_since(began) < moment.num_steps or num_branches(run.notes) < num_before + moment.num_branches
    ):
        time.sleep(0.02)
    try:
        process.wait(timeout=moment.delay_s)
    except subprocess.TimeoutExpired:
        return kill(process)
    return None
