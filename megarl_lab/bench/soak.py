"""Measure what grows in long runs of short steps of the tiny model: synchronous, asynchronous and with an agent.

    python -m megarl_lab.bench.soak --out DIR [--steps 2000] [--runs agent …] [--set KEY=VALUE …] [--read]

One `megarl train` runs after the other. The memory of its processes, their descriptors and threads are metrics of every
run; this adds the files of the run's directory and of its temporary one. A slope is the median of the slopes of all
pairs of the later half's values. Its noise is twice the standard error of a least-squares slope, by resampling
stretches of what the slope leaves of the values. Prints tables, and writes DIR/soak.json and DIR/soak.png. `--read`
starts nothing and measures what is there, also of runs under way.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megarl.record.growth import MAX_VALUES, slope_of
from megarl.record.metrics import RunPaths, last_metrics, read_metrics
from megarl.record.text_table import align
from megarl.report.style import color_of, figure_style, save_png
from megarl.types import Prompt
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, generate
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model

REPOSITORY = Path(__file__).parents[2]
SETTINGS = (
    *("data.val=[]", "data.max_prompt_tokens=64", "actor.layout={tp: 1, dp: 1}", "actor.optimizer.lr=1e-6"),
    *("rollout.engine.num_engines=1", "rollout.engine.max_num_seqs=16", "rollout.num_samples=2"),
    *("trainer.prompts_per_step=2", "rollout.max_response_tokens=8", "checkpoint.every_steps=500"),
)
SCORED = f"rewards.custom={{path: {Path(__file__).resolve()}, name: lengths}}"
RUNS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "synchronous": (SCORED,),
        "asynchronous": (SCORED, "use.schedule=async", "rollout.max_response_tokens=24"),
        "agent": (
            f"environment.entries={{asks: {{type: agent, arguments: {{agent: '{Path(__file__).resolve()}:ask'}}}}}}",
            *("environment.default=asks", "environment.max_tokens=256", "rollout.max_response_tokens=64"),
            "rewards.manager=environment",
            "environment.reply_timeout_s=600",
        ),
    }
)
Points: TypeAlias = dict[tuple[str, str], list[tuple[float, float]]]
FILES_EVERY_S = 10.0
NUM_RESAMPLES, NUM_BLOCKS, MIN_POINTS = 400, 8, 8
MIB, KIB = 1 << 20, 1 << 10


class Scale(NamedTuple):
    """How a table writes a measure: its unit and that of its slope per step, in words and in size."""

    unit: str
    size: float
    slope_unit: str
    slope_size: float


SCALES = {
    "private": Scale(", MiB", MIB, "KiB/step", KIB),
    "shared": Scale(", MiB", MIB, "KiB/step", KIB),
    "size": Scale(", MiB", MIB, "KiB/step", KIB),
    **dict.fromkeys(("descriptors", "threads", "files"), Scale("", 1, "per 1,000 steps", 1e-3)),
}
PROCESS, FILES = ("private", "shared", "descriptors", "threads"), ("size", "files")


def lengths(solution_str: str) -> float:
    """Reward a response of a model that knows nothing, so that rewards differ within groups."""
    return float(len(solution_str) % 3)


async def ask(prompt: Prompt, base_url: str, api_key: str) -> dict[str, float]:
    """Ask for two turns as an agent that owns its loop."""
    from openai import AsyncOpenAI

    messages: list[Any] = [message.as_dict() for message in prompt.messages]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            done = await client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
            answer = done.choices[0].message
            messages += [answer, {"role": "user", "content": "And?"}]
    return {"reward": lengths(answer.content or "")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How something grew: its slope per step over the later half of its values, and twice the slope's standard error.

    of: a process or files. what: "private", "shared", "size" (bytes), "descriptors", "threads" or "files".
    """

    run: str
    of: str
    what: str
    num_steps: int
    last: float
    slope: float
    noise: float


def noise_of(steps: Sequence[float], values: Sequence[float], slope: float) -> float:
    """Return twice the standard error of a slope by a moving-block bootstrap: successive values are alike, so that they
    are drawn together.
    """
    x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    x -= x.mean()
    rest, length, rng = y - y.mean() - slope * x, max(1, len(x) // NUM_BLOCKS), np.random.default_rng(0)
    starts = rng.integers(0, len(x) - length + 1, (NUM_RESAMPLES, -(-len(x) // length)))
    drawn = rest[(starts[:, :, None] + np.arange(length)).reshape(NUM_RESAMPLES, -1)[:, : len(x)]]
    return float(2 * np.std(drawn @ x / (x @ x)))


def growth(run: str, of: str, what: str, points: Sequence[tuple[float, float]]) -> Growth:
    """Measure the later half of points; the slope of fewer than `MIN_POINTS` is 0, with infinite noise."""
    later = points[len(points) // 2 :]
    steps, values = zip(*later[:: -(-len(later) // MAX_VALUES)], strict=True)
    slope = slope_of(steps, values) if len(steps) >= MIN_POINTS else 0.0
    noise = noise_of(steps, values, slope) if len(steps) >= MIN_POINTS else math.inf
    return Growth(run=run, of=of, what=what, num_steps=int(steps[-1]), last=values[-1], slope=slope, noise=noise)


def count_files(places: Mapping[str, Path]) -> dict[str, tuple[int, int]]:
    """Return number and bytes of the files below each place, by what lies in it if NAME ends with a slash."""
    found: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, root in places.items():
        for directory, _, files in os.walk(root):
            for file in files:
                path = Path(directory, file)
                entry = found[name + path.relative_to(root).parts[0] if name.endswith("/") else name]
                entry[0] += 1
                with contextlib.suppress(FileNotFoundError):  # It may be gone meanwhile.
                    entry[1] += path.lstat().st_size
    return {entry: (count, size) for entry, (count, size) in sorted(found.items())}


def run_steps(out: Path, name: str, num_steps: int, settings: Sequence[str]) -> int:
    """Do one run to its end, and note its files every few seconds in DIR/NAME-files.jsonl; return its exit code."""
    paths = RunPaths(out / "runs" / name)
    overrides = [
        *(f"run.dir={paths.root.parent}", f"run.name={name}", f"model.path={out / 'model'}"),
        *(f"data.train=[{out / 'data' / 'train.parquet'}]", f"trainer.total_steps={num_steps}"),
        *(*SETTINGS, *RUNS[name], *settings),
    ]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "megarl.cli",
        "train",
        str(REPOSITORY / "configs/run/sums-rl.yaml"),
    ]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary,
        (out / f"{name}.log").open("w", encoding="utf-8") as log,
        (out / f"{name}-files.jsonl").open("w", encoding="utf-8", buffering=1) as notes,
    ):
        command += [*overrides, "--overwrite"]
        noted, environment = 0, os.environ | {"TMPDIR": temporary}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        while True:
            try:
                return process.wait(FILES_EVERY_S)
            except subprocess.TimeoutExpired:
                done = last_metrics(paths.metrics, "timing_s/step", 1) if paths.metrics.exists() else []
                if done and done[0].step > noted:
                    noted = done[0].step
                    files = count_files({"RUN/": paths.root, "temporary files": Path(temporary)})
                    notes.write(json.dumps({"step": noted, "files": files}) + "\n")


def points_of(out: Path, name: str) -> Points:
    """Read how what a run had of everything developed."""
    points: Points = defaultdict(list)
    for record in read_metrics(RunPaths(out / "runs" / name).metrics):
        for metric, value in record.metrics.items():
            area, _, process = metric.partition("/")[2].partition("/")
            if metric.startswith("memory/private_gib/"):
                points[process, "private"].append((record.step, value * 2**30))
                if (whole := record.metrics.get(f"memory/rss_gib/{process}")) is not None:
                    points[process, "shared"].append((record.step, (whole - value) * 2**30))
            elif metric.startswith("process/"):
                points[process, area].append((record.step, value))
    for line in (out / f"{name}-files.jsonl").read_text(encoding="utf-8").splitlines():
        noted = json.loads(line)
        for entry, (count, size) in noted["files"].items():
            points[entry, "files"].append((noted["step"], count))
            points[entry, "size"].append((noted["step"], size))
    return points


def tables(found: Sequence[Growth]) -> list[str]:
    """Lay out a table of processes and one of files: last values, and slopes with a star if they exceed their noise."""
    lines: list[str] = []
    for columns in (PROCESS, FILES):
        by: defaultdict[tuple[str, str], dict[str, Growth]] = defaultdict(dict)
        for each in found:
            if each.what in columns:
                by[each.run, each.of][each.what] = each
        heads = [head for what in columns for head in (f"{what}{SCALES[what].unit}", SCALES[what].slope_unit)]
        rows = [["run", "of", "steps", *heads]]
        for (run, of), by_what in by.items():
            steps = max(each.num_steps for each in by_what.values())
            rows.append([run, of, str(steps), *(cell for what in columns for cell in _cells(by_what.get(what)))])
        lines += ["", *align(rows, left=(0, 1))]
    return lines[1:]


def _cells(found: Growth | None) -> tuple[str, str]:
    if found is None:
        return "", ""
    scale, star = SCALES[found.what], "*" if abs(found.slope) > found.noise else " "
    last, slope, noise = found.last / scale.size, found.slope / scale.slope_size, found.noise / scale.slope_size
    return f"{last:.4g}", f"{slope:.2f} ± {noise:.2f}{star}" if math.isfinite(noise) else ""


def draw(path: Path, points: Mapping[str, Points]) -> None:
    """Draw the private memory of every process over steps, less that of the middle step, a panel per run."""
    with figure_style():
        figure = Figure(figsize=(4.2 * len(points), 3.4), layout="constrained")
        for ax, (run, by) in zip(figure.subplots(1, len(points), squeeze=False)[0], points.items(), strict=True):
            ax.set_title(run)
            shown = [(of, each) for (of, what), each in by.items() if what == "private"]
            for i, (of, each) in enumerate(shown):
                steps, values = zip(*each, strict=True)
                middle = values[len(values) // 2]
                ax.plot(steps, [(value - middle) / MIB for value in values], color=color_of(i), linewidth=1.0, label=of)
            ax.set_xlabel("step")
            ax.set_ylabel("private memory, MiB over that at the middle")
            ax.set_ylim(-40, 20)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
            ax.legend(fontsize=7)
        save_png(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--steps", type=int, default=2000, help="of each run")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="which runs, in this order")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of the runs")
    parser.add_argument("--read", action="store_true", help="start nothing, measure what is there")
    options = parser.parse_args()
    out = options.out.resolve()
    if not options.read:
        out.mkdir(parents=True, exist_ok=True)
        generate(TASKS.get("sums"), out / "data", GenerateConfig(num_sft=1, num_train=64, num_val=1))
        make_tiny_model(out / "model", TinyModelConfig(), seed=0)
        for name in options.runs:
            if code := run_steps(out, name, options.steps, options.set):
                print(f"{name}: ended with {code}; see {out / name}.log")
    points = {name: points_of(out, name) for name in options.runs if (out / f"{name}-files.jsonl").exists()}
    found = [growth(name, of, what, each) for name in points for (of, what), each in points[name].items()]
    print("\n".join(tables(found)))
    draw(out / "soak.png", points)
    (out / "soak.json").write_text(json.dumps([asdict(each) for each in found], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
