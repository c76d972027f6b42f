"""Measure what the driver itself costs in a step, between the engines' replies and the weight sync:

    python -m megarl_lab.bench.driver --sizes 2048x1024-4096 8192x16384-16384 --limits

A size is ROWSxSHORTEST-LONGEST, with responses of evenly spread lengths. The trainer's step, its passes and Ray are the
real ones; samples are made up, and ranks fetch their rows and answer at once with numbers. GRPO takes one forward pass
for old log-probs and `--mini-batches` optimizer steps. Each size has a process of its own. Prints a table and JSON: CPU
seconds of the driver and of its stages per million tokens, the memory that the step added to it at most, and the bytes
that leave it for ranks on hosts of their own. With --limits, exits with 1 if a size exceeds a limit.

`megarl_lab.bench.driver_cost` measures what samples cost before that, while they are generated.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import ray
import torch

from megarl.algos.build import algorithm_of
from megarl.cluster.actors import RankActor
from megarl.cluster.processes import locate
from megarl.cluster.ray_session import open_ray
from megarl.cluster.remotes import Process
from megarl.cluster.roles import actor_role
from megarl.cluster.workers import RankGroup, RoleWorkers
from megarl.config.generation import RolloutConfig, Sampling
from megarl.config.models import ActorConfig, LayoutConfig, ModelConfig
from megarl.config.schema import ClusterConfig, Config, LoggingConfig, TrainerConfig
from megarl.host.device.platform import apply_environment
from megarl.host.ray_environment import RAY_ENVIRONMENT
from megarl.record.metrics import MetricsLogger, Timers
from megarl.record.performance import PerformanceMeter
from megarl.record.progress import Progress
from megarl.record.recorder import RunRecorder
from megarl.record.text_table import align
from megarl.rollout.engine import Completion
from megarl.rollout.source import Group, SamplingPlan
from megarl.rollout.vllm_source import extended
from megarl.train.collect import Collected
from megarl.train.forward import ForwardStage
from megarl.train.gate import MismatchGate
from megarl.train.groups import JudgedGroup, filter_groups
from megarl.train.loop import Trainer
from megarl.train.outcome import FirstSteps
from megarl.train.passes import RolePasses, RoleUpdater
from megarl.train.update import UpdateStage
from megarl.types import FinishReason, Prompt, Reward, RolloutBatch, Sample, prompt_segment, version_spans
from megarl.types.messages import (
    LoadRequest,
    Role,
)
from megarl.weights.families import read_model_spec
from megarl_lab.bench.instant_ranks import InstantRanks

NUM_SAMPLES, PROMPT_TOKENS, TIMEOUT_S = 8, 128, 600.0
# CPU seconds per million tokens, and bytes per token.
MAX_CPU_S, MAX_BYTES = 0.12, 60.0
# How often the driver's memory is looked at.
LOOK_S = 0.01
# The line with the results as JSON begins with this.
_JSON = "json: "


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverCost:
    """The cost of a step of one size. sent_bytes_per_token: over all passes, to ranks on hosts of their own."""

    size: str
    million_tokens: float
    cpu_s_per_million: float
    bytes_per_token: float
    sent_bytes_per_token: float
    wall_s: float
    stages: dict[str, float]
    load: float


@dataclass(slots=True)
class MadeRollouts:
    """Stands for `Rollouts`: its samples have the engines' answers and rewards, and their groups pass the filter."""

    config: Config
    lengths: Sequence[int]
    answers: list[Completion] = field(default_factory=list)
    scheduler: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(release=lambda: None))

    def admit(self, version: int) -> None: ...

    def settle(self) -> None: ...

    def generate(self) -> None:
        """Make the engines' answers, which is not the driver's work."""
        random = np.random.default_rng(0)
        for length in self.lengths:
            ids = random.integers(0, 150_000, length, dtype=np.int32)
            logprobs = -random.random(length, dtype=np.float32)
            self.answers.append(completion(ids, logprobs))

    def take(self, step: int) -> Collected:
        plan = SamplingPlan(
            step=step,
            num_samples=NUM_SAMPLES,
            sampling=Sampling(temperature=1.0),
            max_response_tokens=max(self.lengths),
            run_seed=0,
        )
        prompts = [
            Prompt(uid=f"p{i}", token_ids=(i, *range(PROMPT_TOKENS - 1)), data_source="d", ground_truth="")
            for i in range(len(self.lengths) // NUM_SAMPLES)
        ]
        judged, answers = [], iter(self.answers)
        for prompt in prompts:
            samples = [extended(_begun(prompt, i), next(answers)) for i in range(NUM_SAMPLES)]
            group = Group(prompt=prompt, plan=plan, samples=dict(enumerate(samples)))
            rewards = tuple(Reward(score=float(i % 2), correct=i % 2 == 1) for i in range(NUM_SAMPLES))
            judged.append(JudgedGroup(group=group, samples=tuple(samples), rewards=rewards, num_sampled=NUM_SAMPLES))
        self.answers.clear()
        kept, metrics = filter_groups(judged, self.config.algo.filter)
        rollout = RolloutBatch(
            prompts={prompt.uid: prompt for prompt in prompts},
            samples=tuple(sample for each in kept for sample in each.samples),
        )
        return Collected(rollout=rollout, rewards=[r for each in kept for r in each.rewards], metrics=metrics)


def completion(ids: np.ndarray, logprobs: np.ndarray) -> Completion:
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=FinishReason.STOP,
        versions=version_spans(np.zeros(len(ids), np.int64)),
    )


def _begun(prompt: Prompt, index: int) -> Sample:
    return Sample(
        uid=prompt.uid,
        sample_index=index,
        seed=index,
        segments=(prompt_segment(prompt.token_ids),),
        finish_reason=FinishReason.ABORT,
    )


def nothing(*_: object, **__: object) -> dict[str, float]:
    """Do nothing, in the place of what belongs to other processes or files."""
    return {}


def open_trainer(config: Config, lengths: Sequence[int], ranks: Sequence[Process[RankActor]]) -> Trainer:
    """Return a trainer of which ranks, samples, weight syncs and files are stand-ins, and all else is real."""
    role, timers = actor_role(config), Timers(clock=time.process_time)
    spec = read_model_spec(config.model.path)
    algorithm = algorithm_of(config)
    workers = RoleWorkers([RankGroup(layout=role.layout, processes=list(ranks))], timeout_s=TIMEOUT_S)
    workers.load(LoadRequest.of(config.run, [role]))
    passes = RolePasses(workers, role, dims=spec.dims)
    updater = RoleUpdater(workers, role, algorithm, total_steps=1000, dims=spec.dims)
    gate = MismatchGate(config.trainer, config.model, config.rollout.engine)
    gate.passed = True
    return Trainer(
        inputs=cast(Any, SimpleNamespace(config=config, spec=spec, algorithm=algorithm, tokenizer=None)),
        state=algorithm.initial_state(),
        cluster=cast(Any, SimpleNamespace(pids={})),
        recorder=cast(RunRecorder, SimpleNamespace(timeline=nothing, problems=nothing, sample_rollouts=nothing)),
        memory=cast(Any, SimpleNamespace(metrics=nothing)),
        rollouts=cast(Any, MadeRollouts(config, lengths)),
        forward=ForwardStage(passes={Role.ACTOR: passes}, hints=None, enter=cast(Any, nothing), timers=timers),
        gate=gate,
        updates=UpdateStage(
            trainer=config.trainer,
            updaters={Role.ACTOR: updater},
            has_critic=False,
            enter=cast(Any, nothing),
            timers=timers,
        ),
        supervisor=cast(Any, SimpleNamespace(outdate=nothing, push=nothing, metrics=nothing, busy={})),
        validator=None,
        checkpoints=cast(Any, None),
        profiler=cast(Any, None),
        meter=PerformanceMeter(spec.dims, num_ranks=1, num_epochs=1, peak_tflops=None),
        timers=timers,
        first_steps=FirstSteps(total_steps=1000),
    )


def run_step(trainer: Trainer) -> dict[str, float]:
    """Run and log a step; return its CPU seconds by stage, `step` and `log` among them."""
    logged: dict[str, float] = {}
    log = SimpleNamespace(log=lambda step, metrics: logged.update(metrics))
    cast(MadeRollouts, trainer.rollouts).generate()
    with trainer.timers("step"):
        result = trainer.step(1)
    started_s = time.process_time()
    trainer._log(1, result, cast(MetricsLogger, log), cast(Progress, SimpleNamespace(update=lambda *_: None)))
    stages = {name.removeprefix("timing_s/"): value for name, value in logged.items() if name.startswith("timing_s/")}
    return {**stages, "log": time.process_time() - started_s}


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Look at this process's resident memory until the end, and append the most that it grew by."""
    process, done, found = psutil.Process(), threading.Event(), list[int]()
    before = highest = process.memory_info().rss

    def look() -> None:
        nonlocal highest
        while not done.wait(LOOK_S):
            highest = max(highest, process.memory_info().rss)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    yield found
    done.set()
    watcher.join()
    found.append(highest - before)


def measure(size: str, options: argparse.Namespace) -> DriverCost:
    """Measure a size in this process, which does nothing else."""
    torch.set_num_threads(1)
    num_rows, bounds = size.split("x")
    shortest, longest = map(int, bounds.split("-"))
    # Each group has short and long answers.
    lengths = np.linspace(shortest, longest, int(num_rows)).astype(int)
    lengths = np.random.default_rng(0).permutation(lengths)
    num_tokens = int(lengths.sum()) + len(lengths) * PROMPT_TOKENS
    num_prompts = len(lengths) // NUM_SAMPLES
    config = Config(
        model=replace(ModelConfig(), path=str(options.model)),
        actor=ActorConfig(layout=LayoutConfig(dp=options.ranks), micro_batch_tokens=2 * longest + 2 * PROMPT_TOKENS),
        rollout=RolloutConfig(num_samples=NUM_SAMPLES, max_response_tokens=longest),
        trainer=TrainerConfig(
            prompts_per_step=num_prompts, mini_batch_prompts=num_prompts // options.mini_batches, total_steps=1
        ),
        logging=LoggingConfig(rollout_every_steps=0),
    )
    with tempfile.TemporaryDirectory() as directory:
        store_mib = max(256, 64 * num_tokens >> 20)
        open_ray(
            ClusterConfig(num_cpus=2, object_store_mib=store_mib),
            num_cpus=2,
            temp_dir=Path(directory),
            environment={"TMPDIR": directory, "OMP_NUM_THREADS": "1"},
        )
        actor = ray.remote(num_cpus=0)(InstantRanks).remote()
        begun: list[Process[RankActor]] = [Process(name=f"rank {i}", actor=actor) for i in range(options.ranks)]
        ranks = locate(begun, timeout_s=TIMEOUT_S)
        # The first step of a process imports modules and starts threads.
        run_step(open_trainer(config, lengths[: NUM_SAMPLES * options.mini_batches].tolist(), ranks))
        # As `Trainer.fit` does.
        gc.collect()
        gc.freeze()
        sent = ray.get(actor.fetched_bytes.remote())
        trainer = open_trainer(config, lengths.tolist(), ranks)
        began, load = time.monotonic(), psutil.getloadavg()[0]
        with peak_memory() as peak:
            stages = run_step(trainer)
        wall_s = time.monotonic() - began
        sent = ray.get(actor.fetched_bytes.remote()) - sent
        ray.shutdown()
    millions = num_tokens / 1e6
    return DriverCost(
        size=size,
        million_tokens=millions,
        cpu_s_per_million=(stages["step"] + stages["log"]) / millions,
        bytes_per_token=peak[0] / num_tokens,
        sent_bytes_per_token=sent / num_tokens,
        wall_s=wall_s,
        stages={name: seconds / millions for name, seconds in stages.items()},
        load=load,
    )


def exceeded(costs: Sequence[DriverCost]) -> list[str]:
    """Return the sizes that exceed a limit."""
    return [each.size for each in costs if each.cpu_s_per_million > MAX_CPU_S or each.bytes_per_token > MAX_BYTES]


def _measured_elsewhere(size: str, options: argparse.Namespace) -> DriverCost:
    """Measure a size in a process of its own."""
    settings = ["--model", str(options.model), "--ranks", str(options.ranks)]
    settings += ["--mini-batches", str(options.mini_batches)]
    command = [sys.executable, "-m", "megarl_lab.bench.driver", "--sizes", size, *settings]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
    (found,) = (json.loads(line.removeprefix(_JSON)) for line in text.splitlines() if line.startswith(_JSON))
    return DriverCost(**found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["2048x1024-4096", "8192x1024-4096", "8192x16384-16384"])
    parser.add_argument("--model", type=Path, default=Path("configs/model/hf/qwen3-30b-a3b"))
    parser.add_argument("--ranks", type=int, default=16, help="data-parallel ranks")
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--limits", action="store_true", help="exit with 1 if a size exceeds a limit")
    options = parser.parse_args()
    apply_environment()
    os.environ.update(RAY_ENVIRONMENT)
    if len(options.sizes) == 1:
        costs = [measure(options.sizes[0], options)]
    else:
        costs = [_measured_elsewhere(size, options) for size in options.sizes]
    names = list(costs[0].stages)
    head = ["size", "10⁶ tokens", "CPU s/10⁶", "bytes/token", "sent bytes/token", "wall s", "load", *names]
    table = [
        [
            *(each.size, f"{each.million_tokens:.1f}", f"{each.cpu_s_per_million:.3f}", f"{each.bytes_per_token:.1f}"),
            *(f"{each.sent_bytes_per_token:.1f}", f"{each.wall_s:.1f}", f"{each.load:.1f}"),
            *(f"{each.stages[name]:.3f}" for name in names),
        ]
        for each in costs
    ]
    print("\n".join(align([head, *table])))
    print(_JSON + json.dumps([asdict(each) for each in costs]))
    too_much = exceeded(costs)
    print(f"limits: {MAX_CPU_S} CPU s per 10⁶ tokens and {MAX_BYTES:g} bytes per token; exceeded: {too_much or 'none'}")
    raise SystemExit(options.limits and bool(too_much))


if __name__ == "__main__":
    main()
