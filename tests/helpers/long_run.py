"""What commands take on the record of a long run: status, report, explain-step, and reading its metrics.

    python -m tests.helpers.long_run RUN --out DIR [--steps 100000]

The record is made of that of a short run, RUN, whose steps repeat with other values and later times; DIR must not exist
or have one of before, which is used again. Each command is a process of its own, and what it takes are the seconds that
processors worked for it. Prints a table, and exits with 1 beyond `LIMITS`.
"""

import argparse
import itertools
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.record.json_lines import append_lines, iterate_lines, open_lines
from megarl.record.metrics import RunPaths, read_metrics, step_of
from megarl.record.text_table import align

# Processor seconds.
LIMITS = MappingProxyType({"load metrics": 3.0, "report": 20.0})
IMPORT = "from pathlib import Path; from megarl.report.run import build_series, read_tables"


def lengthen(source: RunPaths, out: RunPaths, num_steps: int) -> None:
    """Write the record of a run of many steps, which are those of a short one again and again."""
    (out.root / "rollouts").mkdir(parents=True)
    for path in (source.config, source.versions, source.status):
        shutil.copy(path, out.root / path.name)
    first, *_, last = read_metrics(source.metrics)
    rng, length, took_s = random.Random(0), last.step, last.time_s - first.time_s + 1
    files = {
        path: list(iterate_lines(path, dict, expected="objects"))
        for path in (source.metrics, source.timeline, source.problems)
    }
    for i, (path, rows) in itertools.product(range(-(-num_steps // length)), files.items()):
        with open_lines(out.root / path.name, rotates=path != source.metrics) as file:
            later = [_later(row, i * length, i * took_s, rng) for row in rows]
            append_lines(file, (row for row in later if row["step"] <= num_steps))
    for i, path in itertools.product(range(-(-num_steps // length)), source.recorded_rollouts()):
        if (step := step_of(path) + i * length) <= num_steps:
            os.link(path, out.rollouts(step))


def _later(row: Mapping[str, Any], steps: int, seconds: float, rng: random.Random) -> dict[str, Any]:
    moved = {key: row[key] + seconds for key in ("time_s", "start_s", "end_s") if key in row}
    values = {name: value * rng.uniform(0.9, 1.1) for name, value in row.get("metrics", {}).items()}
    return {**row, **moved, "step": row["step"] + steps, **({"metrics": values} if values else {})}


def processor_seconds(command: Sequence[str], log: Path) -> float:
    """Run a command to its end; return what it took of processors."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("ab") as output:
        subprocess.run(command, check=True, stdout=output, stderr=output)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a short run")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; one that is there is measured")
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    out = RunPaths(options.out)
    if not out.root.exists():
        lengthen(RunPaths(options.run), out, options.steps)
    sizes = {path.name: path.stat().st_size / 2**20 for path in sorted(out.root.glob("*.jsonl"))}
    print(", ".join(f"{name} {size:.0f} MiB" for name, size in sizes.items()))
    python, megarl, root = [sys.executable, "-c"], [sys.executable, "-m", "megarl.cli"], str(out.root)
    recorded = step_of(out.recorded_rollouts()[-1])
    commands = {
        "import": [*python, IMPORT],
        "load metrics": [*python, f"{IMPORT}; build_series(read_tables(Path({str(out.metrics)!r})))"],
        "status": [*megarl, "status", root],
        "explain-step": [*megarl, "explain-step", root, str(recorded)],
        "report": [*megarl, "report", root],
    }
    took = {name: processor_seconds(command, out.root / "commands.log") for name, command in commands.items()}
    took["load metrics"] -= took["import"]
    print(*align([[name, f"{seconds:.1f} s"] for name, seconds in took.items()]), sep="\n")
    if late := [name for name, limit in LIMITS.items() if took[name] > limit]:
        raise SystemExit(f"beyond the limit: {', '.join(f'{name} {LIMITS[name]:g} s' for name in late)}")


if __name__ == "__main__":
    main()
