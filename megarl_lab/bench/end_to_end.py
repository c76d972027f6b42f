"""Whole steps of GRPO: megarl, another commit of it and TRL's GRPOTrainer, each as a run of its own, by turns.

    python -m megarl_lab.bench.end_to_end --out DIR [--commit CHECKOUT] [--peers PYTHON] [--set KEY=VALUE …]

CHECKOUT has another commit, which this interpreter runs; PYTHON has trl 1.16 and datasets. All train the same model in
float32 on all cores. Every step has the same prompts, as many samples of each, at temperature 1 and with the same limit
of tokens, the same reward function (the share of digits), and one optimizer step over all samples. The learning rate is
so low that responses keep their lengths. megarl runs as configs/run/sums-rl.yaml says, which `--set` changes. TRL
generates with transformers, in one process, with a thread per core and without gradient checkpointing. Times are from
the end of one step to the end of the next, medians without the first steps; the time to the first step begins before
the process. Memory is the peak of the proportional set size (PSS) of all processes until the last step's end: megarl
then writes a checkpoint, which TRL is told not to do. Without `--model`, the tiny model of `tools/make_tiny_model.py`
is made, with random weights. Prints a table and writes DIR/end_to_end.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import pyarrow.parquet as pq

from megarl.record.metrics import read_metrics
from megarl.record.text_table import align
from megarl_lab.recipes.public_files import write_parquet
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, generate
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model

REPOSITORY = Path(__file__).parents[2]
PEER = Path(__file__).with_name("end_to_end_trl.py")
# Adding up the pages of many processes is work too.
SAMPLING_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """Work of all. Each step takes the next prompts of `data`; `rows_per_pass` is TRL's, megarl packs by tokens."""

    model: str
    data: str
    log: str
    prompts_per_step: int
    num_samples: int
    max_response_tokens: int
    rows_per_pass: int
    num_steps: int
    num_cores: int
    lr: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """A run: when it began and its steps ended, in Unix seconds, and its memory as pairs of Unix seconds and bytes."""

    began_s: float
    steps: Sequence[float]
    memory: Sequence[tuple[float, int]]

    @property
    def peak_bytes(self) -> int:
        return max((size for at_s, size in self.memory if at_s <= self.steps[-1]), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderResult:
    """A contender over all of its runs."""

    contender: str
    samples_per_s: float
    first_step_s: float
    peak_gib: float


def result(contender: str, runs: Sequence[TimedRun], num_rows: int, *, skip: int) -> ContenderResult:
    """Medians of one contender's runs, without the first `skip` steps of each."""
    step_s = statistics.median(end - begin for run in runs for begin, end in pairwise(run.steps[skip - 1 :]))
    return ContenderResult(
        contender=contender,
        samples_per_s=num_rows / step_s,
        first_step_s=statistics.median(run.steps[0] - run.began_s for run in runs),
        peak_gib=max(run.peak_bytes for run in runs) / 2**30,
    )


def table(results: Sequence[ContenderResult]) -> list[str]:
    """A line per contender; the last column compares samples/s with the last contender's."""
    lines = [["", "samples/s", "first step s", "peak GiB", "ratio"]]
    for each in results:
        figures = (each.samples_per_s, each.first_step_s, each.peak_gib, each.samples_per_s / results[-1].samples_per_s)
        lines.append([each.contender, *(f"{figure:.2f}" for figure in figures)])
    return align(lines)


def pss_bytes(root: int) -> int:
    """The proportional set size of a process and all that it started; shared pages count once."""
    total = 0
    try:
        processes = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


def run_process(
    command: Sequence[str], log: Path, environment: Mapping[str, str], cwd: Path = REPOSITORY
) -> tuple[float, list[tuple[float, int]]]:
    """Run a command to its end; return when it began and its memory over time.

    Raises:
        SystemExit: it failed.
    """
    memory, ended = list[tuple[float, int]](), threading.Event()
    with log.open("w", encoding="utf-8") as output:
        began = time.time()
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=cwd)

        def watch() -> None:
            while not ended.wait(SAMPLING_S):
                memory.append((time.time(), pss_bytes(process.pid)))

        watching = threading.Thread(target=watch)
        watching.start()
        code = process.wait()
        ended.set()
        watching.join()
    if code:
        raise SystemExit(f"{' '.join(command[:4])} … ended with {code}; see {log}")
    return began, memory


def run_megarl(job: TrainingJob, out: Path, settings: Sequence[str], checkout: Path) -> TimedRun:
    """A run of a checkout of megarl, as `megarl train` with its run file of the built-in sums."""
    overrides = [
        *(f"run.dir={out.parent}", f"run.name={out.name}", f"model.path={job.model}", "model.dtype=float32"),
        *(f"data.train=[{job.data}]", "data.val=[]", "data.max_prompt_tokens=128", "logging.tensorboard=false"),
        *(f"rollout.num_samples={job.num_samples}", f"rollout.max_response_tokens={job.max_response_tokens}"),
        *(f"trainer.total_steps={job.num_steps}", f"trainer.prompts_per_step={job.prompts_per_step}"),
        *(f"actor.optimizer.lr={job.lr}", "actor.optimizer.warmup_steps=0"),
        f"rewards.custom={{path: {PEER}, name: share_of_digits}}",
        *settings,
    ]
    file = str(checkout / "configs/run/sums-rl.yaml")
    command = [sys.executable, "-m", "megarl.cli", "train", file, *overrides, "--overwrite"]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    began, memory = run_process(command, out.with_suffix(".log"), environment, checkout)
    steps = [record.time_s for record in read_metrics(out / "metrics.jsonl")]
    return TimedRun(began_s=began, steps=steps, memory=memory)


def run_trl(job: TrainingJob, out: Path, interpreter: str) -> TimedRun:
    """TRL's run in its own environment."""
    # Threads are TRL's own choice: one per core.
    hidden = ("OMP_NUM_THREADS", "PYTHONPATH")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    began, memory = run_process([interpreter, str(PEER), json.dumps(asdict(job))], out.with_suffix(".log"), environment)
    steps = [float(line) for line in Path(job.log).read_text(encoding="utf-8").splitlines()]
    return TimedRun(began_s=began, steps=steps, memory=memory)


def make_prompts(directory: Path, count: int) -> Path:
    """A file with that many questions of the built-in sums, which no scorer of megarl's knows."""
    files = generate(TASKS.get("sums"), directory, GenerateConfig(num_sft=1, num_train=count, num_val=1))
    path = directory / "prompts.parquet"
    write_parquet(path, [{**row, "data_source": "bench"} for row in pq.read_table(files.train).to_pylist()])
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--commit", type=Path, metavar="CHECKOUT", help="a checkout of another commit")
    parser.add_argument("--peers", help="interpreter with trl and datasets")
    parser.add_argument("--model", type=Path, help="Hugging Face directory; the tiny model is made without it")
    parser.add_argument("--prompts", type=int, default=32, help="per step")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--response-tokens", type=int, default=64, help="at most")
    parser.add_argument("--rows-per-pass", type=int, help="TRL's forward pass; all of a step's without it")
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--skip", type=int, default=3, help="first steps that are left out")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each contender, by turns")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of megarl's runs")
    options = parser.parse_args()
    if not 0 < options.skip < options.steps:
        parser.error("--skip: at least the first step, and fewer than --steps")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    model, num_rows = options.model, options.prompts * options.samples
    if model is None:
        model = out / "tiny"
        make_tiny_model(model, TinyModelConfig(), seed=0)
    job = TrainingJob(
        model=str(model.resolve()),
        # Runs that are a step ahead have twice the prompts of a step under way.
        data=str(make_prompts(out / "data", 4 * options.prompts)),
        log=str(out / "trl.times"),
        prompts_per_step=options.prompts,
        num_samples=options.samples,
        max_response_tokens=options.response_tokens,
        rows_per_pass=options.rows_per_pass or num_rows,
        num_steps=options.steps,
        num_cores=len(os.sched_getaffinity(0)),
    )
    checkouts = {"megarl": REPOSITORY} | ({"commit": options.commit.resolve()} if options.commit else {})
    runs: dict[str, list[TimedRun]] = {name: [] for name in [*checkouts, *(["TRL"] if options.peers else [])]}
    for i in range(options.rounds):
        for name, checkout in checkouts.items():
            runs[name].append(run_megarl(job, out / f"{name}-{i}", options.set, checkout))
        if options.peers:
            runs["TRL"].append(run_trl(job, out / f"trl-{i}", options.peers))
    results = [result(name, each, num_rows, skip=options.skip) for name, each in runs.items()]
    print("\n".join(table(results)))
    record = {
        "job": asdict(job),
        "settings": options.set,
        "results": [asdict(each) for each in results],
        "runs": {name: [asdict(run) for run in each] for name, each in runs.items()},
    }
    (out / "end_to_end.json").write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
