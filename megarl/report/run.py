"""Read a run back from its directory: metric series, configuration, recorded rollouts."""

import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megarl.errors import DataError
from megarl.host.masking import masked
from megarl.host.reading import RESTORE, read_object
from megarl.host.unicode import visible
from megarl.record.columns import MetricsTable, read_tables
from megarl.record.json_lines import read_lines
from megarl.record.metrics import RunPaths
from megarl.record.problems import ProblemRecord, read_problems
from megarl.record.rollouts import RolloutRecord, read_rollouts
from megarl.record.timeline import Interval, read_timeline

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric over ascending steps. It is falsy if the metric was never logged."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The contents of a run directory, read back for a report.

    elapsed_s: seconds from the first to the last metrics line, pauses included. timeline: when trainer and engines
    worked; empty for runs that do not record it. problems: samples that could not be judged or read. warnings: what the
    run warned of, each once.
    """

    label: str
    series: Mapping[str, Series]
    last_step: int
    elapsed_s: float
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    first_rollouts: tuple[RolloutRecord, ...]
    last_rollouts: tuple[RolloutRecord, ...]
    timeline: tuple[Interval, ...] = ()
    problems: tuple[ProblemRecord, ...] = ()
    warnings: tuple[str, ...] = ()

    def get(self, name: str) -> Series:
        return self.series.get(name, Series())

    def values_at(self, step: int) -> dict[str, float]:
        """Return the metrics that were logged at a step, by name."""
        found = {name: (bisect_left(each.steps, step), each) for name, each in self.series.items()}
        return {name: each.values[i] for name, (i, each) in found.items() if each.steps[i : i + 1] == (step,)}

    def under(self, prefix: str) -> dict[str, Series]:
        """Return the series whose names start with `prefix`, keyed by the rest of the name."""
        return {name[len(prefix) :]: s for name, s in self.series.items() if name.startswith(prefix)}


def load_runs(run_dirs: Sequence[Path]) -> list[Run]:
    """Read runs from their directories, labelled by the shortest path endings that tell them apart."""
    return [_load_run(path, label) for path, label in zip(run_dirs, run_labels(run_dirs), strict=True)]


def run_labels(run_dirs: Sequence[Path]) -> list[str]:
    """Return labels that tell runs apart. Raises DataError if the same run is given twice."""
    if len({os.path.abspath(path) for path in run_dirs}) < len(run_dirs):
        raise DataError(f"got the same run twice in {[str(p) for p in run_dirs]}, expected different runs to compare")
    return path_labels(run_dirs)


def path_labels(paths: Sequence[Path]) -> list[str]:
    """Return the shortest endings that tell paths apart.

    `["a/run", "b/run"]` keep the parent's name, `["x/a", "x/b"]` do not.
    """
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(parts):
        depth += 1
    return [visible("/".join(part[-depth:])) for part in parts]


def _load_run(run_dir: Path, label: str) -> Run:
    paths = RunPaths(run_dir)
    if not paths.config.is_file():
        raise DataError(f"{paths.root} is not a run directory: expected a config.yaml and a metrics.jsonl")
    tables = read_tables(paths.metrics)
    if not tables:
        raise DataError(f"{paths.metrics} holds no metrics yet, expected at least one line; wait for the first step")
    rollouts = paths.recorded_rollouts()
    told = read_lines(
        paths.warnings, lambda row: str(row["text"]), expected="an object of step and text", missing_ok=True
    )
    return Run(
        label=label,
        series=build_series(tables),
        last_step=int(max(table.steps.max() for table in tables)),
        elapsed_s=float(tables[-1].times[-1] - tables[0].times[0]),
        # Earlier versions wrote secrets there.
        config=masked(paths.saved_tree()),
        versions=read_object(paths.versions, remedy=RESTORE) if paths.versions.is_file() else {},
        first_rollouts=tuple(read_rollouts(rollouts[0])) if rollouts else (),
        last_rollouts=tuple(read_rollouts(rollouts[-1])) if len(rollouts) > 1 else (),
        timeline=tuple(read_timeline(paths.timeline)) if paths.timeline.is_file() else (),
        problems=tuple(read_problems(paths.problems)),
        warnings=tuple(dict.fromkeys(told)),
    )


def build_series(tables: Sequence[MetricsTable]) -> dict[str, Series]:
    """Collect the values of each metric over steps. Where a resumed run repeated steps, the later values count."""
    steps: Floats = np.concatenate([table.steps for table in tables])
    columns: defaultdict[str, Floats] = defaultdict(lambda: np.full(len(steps), np.nan))
    start = 0
    for table in tables:
        end = start + len(table.steps)
        for i, name in enumerate(table.names):
            # Figures show it, too.
            column, values = columns[visible(name)][start:end], table.values[:, i]
            np.copyto(column, values, where=~np.isnan(values))
        start = end
    # Most metrics are of the same steps. Values of steps that later ones repeat, or come before, go.
    known: dict[bytes, tuple[npt.NDArray[np.intp], tuple[int, ...]]] = {}
    series = {}
    for name, column in columns.items():
        logged = np.flatnonzero(~np.isnan(column))
        if (key := logged.tobytes()) not in known:
            step = steps[logged]
            kept = np.append(step[:-1] < np.minimum.accumulate(step[::-1])[::-1][1:], True)
            known[key] = logged[kept], tuple(step[kept].tolist())
        places, left = known[key]
        series[name] = Series(steps=left, values=tuple(column[places].tolist()))
    return series
