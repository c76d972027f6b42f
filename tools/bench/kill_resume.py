"""Kill a small run with SIGKILL at random moments, resume it each time, and compare it with an uninterrupted run:

    python tools/bench/kill_resume.py --out DIR --kills 20 --seed 0

Prints a line per start and exits with 1 if metrics (times and memory aside), their steps, or the final weights differ.
"""

import argparse
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint import complete_steps
from megarl.data.tasks import TASKS
from megarl.data.tasks.generate import GenerateConfig, generate
from megarl.data.tiny_model import TinyModelConfig, make_tiny_model
from megarl.metrics import MetricsRecord, RunPaths, read_metrics

RUN_FILES = {
    command: Path(__file__).parents[2] / "configs" / "run" / f"sums-{kind}.yaml"
    for command, kind in (("train", "rl"), ("sft", "sft"))
}
MEGARL = (sys.executable, "-W", "ignore", "-m", "megarl.cli")
# What a resumed run may measure differently.
MEASURED = ("timing_s/", "perf/", "memory/")
SETTINGS = (
    "use.model=qwen3-tiny",
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
    """A run of the command line, and where it writes."""

    inputs: Path
    name: str
    command: str = "train"
    settings: Sequence[str] = ()

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
            return subprocess.Popen(self.arguments, stdout=log, stderr=subprocess.STDOUT)

    def records(self) -> list[MetricsRecord]:
        return read_metrics(self.paths.metrics) if self.paths.metrics.exists() else []

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


def differences(run: SmallRun, reference: SmallRun) -> list[str]:
    """Where two finished runs differ: steps, metrics that are not measured, bytes of the exported weights."""
    found = []
    ours, theirs = ([(r.step, _compared(r)) for r in each.records()] for each in (run, reference))
    if [step for step, _ in ours] != [step for step, _ in theirs]:
        found.append(f"steps: {[step for step, _ in ours]} and {[step for step, _ in theirs]}")
    for (step, mine), (_, other) in zip(ours, theirs, strict=False):
        names = sorted(mine.keys() | other.keys())
        found += [f"step {step} {n}: {mine.get(n)} and {other.get(n)}" for n in names if mine.get(n) != other.get(n)]
    weights = [(each.paths.export / "model.safetensors").read_bytes() for each in (run, reference)]
    if weights[0] != weights[1]:
        found.append("exported weights")
    return found


def _compared(record: MetricsRecord) -> dict[str, float]:
    return {name: value for name, value in record.metrics.items() if not name.startswith(MEASURED)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """So many seconds after so many more steps than the run had when it was started."""

    num_steps: int
    delay_s: float


def draw_moment(rng: random.Random, duration_s: float) -> Moment:
    """One in four while processes start, the others around a step, its checkpoint, or what follows."""
    if rng.random() < 0.25:
        return Moment(num_steps=0, delay_s=rng.uniform(0.0, duration_s / 2))
    return Moment(num_steps=rng.randint(1, 5), delay_s=rng.uniform(0.0, 2.0))


def kill_at(process: subprocess.Popen[bytes], run: SmallRun, moment: Moment) -> int | None:
    """SIGKILL the driver at a moment; its exit code if it ended before."""
    began = time.time()
    while process.poll() is None and run.num_steps_since(began) < moment.num_steps:
        time.sleep(0.02)
    try:
        return process.wait(timeout=moment.delay_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="an empty directory to work in")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    inputs, rng = make_inputs(arguments.out), random.Random(arguments.seed)
    settings = [f"trainer.total_steps={arguments.steps}"]
    reference = SmallRun(inputs=inputs, name="reference", settings=settings)
    began = time.monotonic()
    if exit_code := reference.start().wait():
        raise SystemExit(f"the reference run ended with {exit_code}; see {reference.paths.root}.log")
    duration_s = time.monotonic() - began
    print(f"seed {arguments.seed}; the uninterrupted run took {duration_s:.1f} s", flush=True)
    print("| run | last step in metrics | checkpoints | outcome |\n|---|---|---|---|", flush=True)
    num_kills, num_runs, failed = 0, 0, False
    run = SmallRun(inputs=inputs, name=f"killed{num_runs}", settings=settings)
    while num_kills < arguments.kills or run.paths.root.exists():
        moment = draw_moment(rng, duration_s)
        process = run.start()
        # Once there were enough kills, the run under way may finish.
        code = process.wait() if num_kills == arguments.kills else kill_at(process, run, moment)
        if code is None:
            num_kills += 1
            outcome = f"killed {moment.delay_s:.2f} s after {moment.num_steps} more steps"
        else:
            wrong = [f"exit code {code}"] if code else differences(run, reference)
            failed |= bool(wrong)
            outcome = f"DIFFERS: {'; '.join(wrong[:3])}" if wrong else "finished, equal to the uninterrupted run"
        there = sorted(path.name for path in run.paths.checkpoints.glob("step_*"))
        torn = len(there) - len(complete_steps(run.paths.checkpoints))
        shown = f"{complete_steps(run.paths.checkpoints)}" + (f" and {torn} torn" if torn else "")
        print(f"| {run.name} | {run.last_step()} | {shown} | {outcome} |", flush=True)
        if code is not None:
            num_runs += 1
            run = SmallRun(inputs=inputs, name=f"killed{num_runs}", settings=settings)
    print(f"{num_kills} kills, {num_runs} runs finished, {'with differences' if failed else 'all equal'}")
    if not failed:
        shutil.rmtree(inputs / "runs")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
