"""Compare schedules by the time of a step, on long-tailed response lengths, with slow rewards and with slow tools:

    python -m megarl_lab.bench.async_rollouts --out DIR

Each contender is a run of the command line on two CPU cores: colocated and split synchronous, one step off, and
asynchronous with staleness 2. They take turns, `--turns` times; the time of a step is the mean over steps, without
the first ones, and the median turn counts. `slow rewards` judges with a function that sleeps for a log-normal time of
mean 1 s; `slow tools` has conversations with an environment that replies twice and sleeps as long each time. Prints a
table with the load of the machine and what each side was idle. Checks the limits, writes DIR/records.json, and exits
with 1 if a limit is exceeded. `megarl_lab.bench.async_plan` compares `megarl plan-async` with runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.record.metrics import read_metrics
from megarl.record.text_table import align
from megarl_lab.bench.kill_resume import RUN_FILES
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, generate
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model

# Mean, σ and largest of the response lengths.
LONG_TAIL = ("60", "1.0", "448")
COMMON = (
    "use.model=qwen3-tiny",
    "actor.layout.dp=1",
    "rollout.engine.num_engines=1",
    "data.max_prompt_tokens=32",
    "data.val=[]",
    "rollout.num_samples=8",
    "rollout.max_response_tokens=448",
    "rollout.engine.max_num_seqs=256",
    "rollout.engine.kv_cache_mib=256",
    "logging.tensorboard=false",
    "logging.num_rollouts=256",
    "actor.optimizer.warmup_steps=0",
)
CONTENDERS: Mapping[str, tuple[str, ...]] = {
    "colocated, synchronous": ("algo.correction.name=tis_upper",),
    "split, synchronous": ("algo.correction.name=tis_upper", "placement.mode=split"),
    "split, one step off": ("use.schedule=one_step_off",),
    "split, staleness 2": ("use.schedule=async",),
}
SCENARIOS: Mapping[str, tuple[str, ...]] = {
    "long tail": ("trainer.prompts_per_step=32",),
    "slow rewards": ("trainer.prompts_per_step=4", "rewards.custom.workers=32", "rewards.custom.name=compute_score"),
    "slow tools": ("trainer.prompts_per_step=4", "environment.max_turn_tokens=32", "rewards.manager=environment"),
}
# Scenario → contender that staleness 2 is compared with, and the largest ratio of step times.
LIMITS = {
    ("long tail", "split, synchronous"): 0.75,
    ("long tail", "colocated, synchronous"): 0.85,
    ("slow rewards", "split, synchronous"): 0.5,
    ("slow tools", "split, synchronous"): 0.5,
}
SLOW_REWARD = '''"""Judge slowly: the time is log-normal with mean 1 s, and depends on the response alone."""
import math
import random
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(random.Random(solution_str).lognormvariate(-0.5 * 0.5**2, 0.5))
    return float(len(solution_str) % 2)
'''
SLOW_TOOL = '''"""Reply slowly, twice: the time is log-normal with mean 1 s, and depends on the turn alone."""
import asyncio
import random

from megarl.environments import Environment, Reply
from megarl.types import Message


class SlowTool(Environment):
    async def reply(self, action):
        await asyncio.sleep(random.Random(action.text).lognormvariate(-0.5 * 0.5**2, 0.5))
        message = Message(role="tool", content=str(len(action.text)))
        return Reply(messages=(message,), done=action.turn == 2, reward=float(len(action.text) % 2))
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTimes:
    """One run: the median time of its steps and what both sides were idle, as shares; load: of the machine, before."""

    scenario: str
    contender: str
    turn: int
    step_s: float
    trainer_idle: float
    engine_idle: float
    load: float


def measure(inputs: Path, scenario: str, contender: str, turn: int, *, steps: int, skipped: int) -> RolloutTimes:
    """Run a contender and read its metrics."""
    name = f"{scenario}-{contender}-{turn}".replace(", ", "-").replace(" ", "-")
    settings = [*COMMON, *SCENARIOS[scenario], *CONTENDERS[contender], f"trainer.total_steps={steps}"]
    if scenario == "slow rewards":
        (inputs / "slow.py").write_text(SLOW_REWARD, encoding="utf-8")
        settings.append(f"rewards.custom.path={inputs / 'slow.py'}")
    command = ["megarl_lab.bench.async_run", *LONG_TAIL]
    if scenario == "slow tools":
        (inputs / "slow_tool.py").write_text(SLOW_TOOL, encoding="utf-8")
        settings.append(f"environment.default={inputs / 'slow_tool.py'}:SlowTool")
        # Its lengths are those of turns.
        command = ["megarl.cli"]
    arguments = [
        *(sys.executable, "-W", "ignore", "-m", *command, "train", str(RUN_FILES["train"])),
        *settings,
        f"run.dir={inputs / 'runs'}",
        f"run.name={name}",
        f"model.path={inputs / 'model'}",
        f"data.train=[{inputs / 'data' / 'train.parquet'}]",
    ]
    load = os.getloadavg()[0]
    (inputs / "runs").mkdir(exist_ok=True)
    with (inputs / "runs" / f"{name}.log").open("wb") as log:
        subprocess.run(arguments, stdout=log, stderr=subprocess.STDOUT, check=True, timeout=600)
    records = [r for r in read_metrics(inputs / "runs" / name / "metrics.jsonl") if r.step > skipped]

    def median(metric: str) -> float:
        return statistics.median(record.metrics[metric] for record in records)

    idle = median("perf/trainer_idle_frac"), median("perf/engine_idle_frac")
    return RolloutTimes(
        scenario=scenario,
        contender=contender,
        turn=turn,
        # From record to record, so that nothing between steps is left out.
        step_s=(records[-1].time_s - records[0].time_s) / (len(records) - 1),
        trainer_idle=idle[0],
        engine_idle=idle[1],
        load=load,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="an empty directory to work in")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--skipped", type=int, default=5, help="first steps that do not count")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    inputs = arguments.out
    generate(TASKS.get("sums"), inputs / "data", GenerateConfig(seed=0, num_sft=64, num_train=1024, num_val=4))
    make_tiny_model(inputs / "model", TinyModelConfig(), seed=0)
    measured: list[RolloutTimes] = []
    for turn in range(arguments.turns):
        for scenario in arguments.scenarios:
            for contender in arguments.contenders:
                steps, skipped = arguments.steps, arguments.skipped
                measured.append(measure(inputs, scenario, contender, turn, steps=steps, skipped=skipped))
                print(f"{measured[-1]}", flush=True)
    (arguments.out / "records.json").write_text(
        json.dumps([asdict(each) for each in measured], indent=1), encoding="utf-8"
    )
    failed = False
    rows: list[tuple[str, ...]] = [("scenario", "schedule", "s/step", "trainer idle", "engine idle", "load")]
    medians: dict[tuple[str, str], float] = {}
    for scenario in arguments.scenarios:
        for contender in arguments.contenders:
            mine = [m for m in measured if (m.scenario, m.contender) == (scenario, contender)]
            medians[scenario, contender] = statistics.median(m.step_s for m in mine)
            rows.append(
                (
                    *(scenario, contender, f"{medians[scenario, contender]:.3f}"),
                    f"{statistics.median(m.trainer_idle for m in mine):.0%}",
                    f"{statistics.median(m.engine_idle for m in mine):.0%}",
                    f"{statistics.median(m.load for m in mine):.1f}",
                )
            )
    print("\n".join(align(rows, left=(0, 1))))
    for (scenario, contender), limit in LIMITS.items():
        asynchronous, other = (medians.get((scenario, name)) for name in ("split, staleness 2", contender))
        if asynchronous is not None and other is not None:
            failed |= (ratio := asynchronous / other) > limit
            verdict = "holds" if ratio <= limit else "EXCEEDED"
            print(f"{verdict}  {scenario}: staleness 2 ÷ {contender}: {ratio:.2f}, limit {limit:.2f}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
