"""Compare what `megarl plan-async` simulates with runs that have taken place:

    python -m megarl_lab.bench.async_plan --out DIR

Four schedules of one small model on two CPU cores, with long-tailed response lengths. Costs and lengths are those of
the first run, which is synchronous, as a user's would be; from them all four are simulated. The runs keep a pace
(`megarl_lab.bench.paced`), as trainer and engines that share cores would slow each other, as devices do not.
Prints the measured and the simulated time of a step with the load of the machine, writes DIR/plan.json, and exits with
1 if a simulation is off by more than `LIMIT`. Runs that DIR has already are not repeated.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megarl.record.metrics import RunPaths, read_metrics
from megarl.record.text_table import align
from megarl_lab.bench.kill_resume import RUN_FILES
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, generate
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model
from megarl_lab.schedules.async_fit import measure
from megarl_lab.schedules.simulate import simulate

# How far a simulated step may be off, as a share.
LIMIT = 0.15
# Mean, σ and largest of the response lengths.
LENGTHS = ("24", "1.0", "100")
SETTINGS = (
    "use.model=qwen3-tiny",
    "placement.mode=split",
    "actor.layout.dp=1",
    "rollout.engine.num_engines=1",
    "data.max_prompt_tokens=32",
    "data.val=[]",
    "trainer.prompts_per_step=8",
    "rollout.num_samples=4",
    "rollout.max_response_tokens=100",
    "rollout.engine.max_num_seqs=128",
    "logging.tensorboard=false",
    "logging.num_rollouts=32",
)
CONTENDERS: Mapping[str, tuple[str, ...]] = {
    "synchronous": ("algo.correction.name=tis_upper",),
    "one step off": ("use.schedule=one_step_off",),
    "staleness 2": ("use.schedule=async",),
    "staleness 4, half as many prompts": (
        *("use.schedule=async", "rollout.schedule.staleness=4", "trainer.prompts_per_step=4"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A run beside its simulation: seconds per step, and the share of them that each side was idle."""

    contender: str
    measured_s: float
    simulated_s: float
    trainer_idle: tuple[float, float]
    engine_idle: tuple[float, float]

    @property
    def ratio(self) -> float:
        return self.simulated_s / self.measured_s


def compare(runs: Mapping[str, Path], *, skipped: int) -> list[Compared]:
    """Simulate all runs from the costs and lengths of the first one. skipped: first steps that do not count."""
    basis = measure(next(iter(runs.values())))
    found = []
    for contender, run in runs.items():
        own = measure(run)
        workload = replace(basis.workload, prompts_per_step=own.workload.prompts_per_step)
        outcome = simulate(workload, basis.costs, own.setting, num_steps=64)
        records = [record for record in read_metrics(RunPaths(run).metrics) if record.step >= skipped]
        # In the last steps of a run, nothing is left to admit: engines have less to do.
        records = records[: len(records) - own.setting.staleness]
        idle = {
            side: sum(record.metrics[f"perf/{side}_idle_frac"] for record in records[1:]) / len(records[1:])
            for side in ("trainer", "engine")
        }
        found.append(
            Compared(
                contender=contender,
                # From record to record, so that nothing between steps is left out.
                measured_s=(records[-1].time_s - records[0].time_s) / (len(records) - 1),
                simulated_s=outcome.step_s,
                trainer_idle=(idle["trainer"], outcome.trainer_idle),
                engine_idle=(idle["engine"], outcome.engine_idle),
            )
        )
    return found


def run(inputs: Path, contender: str, root: Path, *, steps: int) -> float:
    """Run a contender, unless it has taken place; return the load of the machine in the middle of it."""
    metrics, load = RunPaths(root).metrics, root.with_suffix(".load")
    if load.exists() and read_metrics(metrics)[-1].step == steps:
        return float(load.read_text(encoding="utf-8"))
    arguments = [
        *(sys.executable, "-W", "ignore", "-m", "megarl_lab.bench.async_run", "--paced", *LENGTHS),
        *("train", str(RUN_FILES["train"]), "--overwrite", *SETTINGS, *CONTENDERS[contender]),
        f"trainer.total_steps={steps}",
        f"run.dir={root.parent}",
        f"run.name={root.name}",
        f"model.path={inputs / 'model'}",
        f"data.train=[{inputs / 'data' / 'train.parquet'}]",
    ]
    with root.with_suffix(".log").open("wb") as log:
        # Ray's workers, too, import `tools`.
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        subprocess.run(arguments, stdout=log, stderr=subprocess.STDOUT, check=True, timeout=300, env=environment)
    load.write_text(f"{os.getloadavg()[0]:.1f}", encoding="utf-8")
    return float(load.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a directory to work in")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--skipped", type=int, default=5, help="first steps that do not count")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    inputs = arguments.out
    if not (inputs / "runs").exists():
        generate(TASKS.get("sums"), inputs / "data", GenerateConfig(seed=0, num_sft=64, num_train=256, num_val=4))
        sizes = TinyModelConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=96)
        make_tiny_model(inputs / "model", sizes, seed=0)
        (inputs / "runs").mkdir()
    runs = {name: inputs / "runs" / name.replace(",", "").replace(" ", "-") for name in CONTENDERS}
    loads = {name: run(inputs, name, root, steps=arguments.steps) for name, root in runs.items()}
    found = compare(runs, skipped=arguments.skipped)
    titles = ("schedule", "measured s/step", "simulated", "ratio", "trainer idle", "engine idle", "load")
    rows: list[tuple[str, ...]] = [titles]
    for each in found:
        idle = ["{:.0%} / {:.0%}".format(*side) for side in (each.trainer_idle, each.engine_idle)]
        times = f"{each.measured_s:.3f}", f"{each.simulated_s:.3f}", f"{each.ratio:.2f}"
        rows.append((each.contender, *times, *idle, f"{loads[each.contender]:.1f}"))
    print("\n".join(align(rows)))
    records = [asdict(each) | {"ratio": each.ratio, "load": loads[each.contender]} for each in found]
    (inputs / "plan.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    exceeded = [each.contender for each in found if abs(each.ratio - 1) > LIMIT]
    print(f"EXCEEDED by {', '.join(exceeded)}" if exceeded else f"holds: all within {LIMIT:.0%}")
    raise SystemExit(bool(exceeded))


if __name__ == "__main__":
    main()
