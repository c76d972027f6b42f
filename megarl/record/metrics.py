"""Name the files of a run; write and read back its metrics (JSON lines); time its phases."""

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from megarl.config.load import read_saved
from megarl.config.schema import RunConfig
from megarl.config.setting import check_values
from megarl.errors import ConfigError, DataError
from megarl.host.activity import doing
from megarl.host.directory_lock import PLACE
from megarl.host.exit_codes import RunOutcome, outcome_of
from megarl.host.streams import warnings
from megarl.host.unicode import readable
from megarl.host.writing import dispensable
from megarl.record.json_lines import append_lines, iterate_lines, open_lines

# The file that makes a checkpoint complete.
MARKER = "COMPLETE"
# The file of a checkpoint that has the driver's state.
STATE_FILE = "state.json"
# How much of the end of a file of metrics is read first, where its last records are enough.
TAIL_BYTES = 1 << 20


class RunPaths:
    """The files and directories of one run, all below its root directory RUN."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # Who writes the run; see `megarl.host.directory_lock`.
        self.lock = root / PLACE
        self.config = root / "config.yaml"
        # The packages of the run: package → version.
        self.versions = root / "versions.json"
        # Samples that could not be judged or read; see `megarl.record.problems`.
        self.problems = root / "reward_problems.jsonl"
        # The present activity of the driver; see `megarl.launch.status`.
        self.status = root / "status.json"
        self.metrics = root / "metrics.jsonl"
        # The warnings that the driver printed.
        self.warnings = root / "warnings.jsonl"
        # Differences and digests of a round of the canary that failed; see `megarl.train.canary`.
        self.canary = root / "canary.json"
        # When which side of the run worked at what; see `megarl.record.timeline`.
        self.timeline = root / "timeline.jsonl"
        # The same for ui.perfetto.dev, written by `megarl trace`.
        self.trace = root / "trace.json"
        self.tensorboard = root / "tensorboard"
        self.report_html = root / "report.html"
        # The rollout browser, which the report refers to.
        self.report_files = root / "report"
        self.report_png = root / "report.png"
        # The trained policy, and the critic if there is one, as Hugging Face model directories.
        self.export = root / "export"
        self.export_critic = root / "export_critic"
        self.export_adapter = root / "export_adapter"
        # Rollouts kept bit for bit, for replay.
        self.records = root / "records"
        # Traces of torch's profiler, one per rank.
        self.profile = root / "profile"
        # `--resume` continues from these.
        self.checkpoints = root / "checkpoints"
        # An attempt that ended before its first checkpoint leaves what it wrote here when `--resume` begins anew.
        self.earlier = root / "earlier"
        # The workers' output, kept when a run fails.
        self.logs = root / "logs"

    def saved_tree(self) -> dict[str, Any]:
        """Read the configuration that the run wrote; DataError if it is damaged."""
        return read_saved(self.config)

    @classmethod
    def of(cls, run: RunConfig) -> Self:
        """Return the paths of the run with these settings; raise ConfigError if its name cannot name a directory."""
        check_values(run, (), "run")
        return cls(Path(run.dir) / run.name)

    def hold_a_run(self) -> bool:
        return self.metrics.exists() or any(self.checkpoints.glob("*"))

    def require_unused(self) -> None:
        """Raise ConfigError if a run has written metrics or checkpoints here."""
        if self.hold_a_run():
            raise ConfigError(
                f"{self.root} already holds a run; choose another run.name, or pass --resume or --overwrite"
            )

    def rollouts(self, step: int) -> Path:
        return self.root / "rollouts" / f"step_{step:06d}.parquet"

    def validation(self, step: int) -> Path:
        return self.root / "validation" / f"step_{step:06d}.parquet"

    def recorded_rollouts(self) -> list[Path]:
        """Return the rollout files that exist, in the order of their steps."""
        return sorted(self.root.glob("rollouts/step_*.parquet"), key=step_of)

    def recorded_validations(self) -> list[Path]:
        """Return the files of validations that exist, in the order of their steps."""
        return sorted(self.root.glob("validation/step_*.parquet"), key=step_of)


def step_of(path: Path) -> int:
    """Return the step of a file of rollouts or of a validation."""
    return int(path.stem.removeprefix("step_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRecord:
    """Metrics logged at one step, all finite; `time_s` is Unix time. Several records may share a step."""

    step: int
    time_s: float
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        if math.isfinite(sum(self.metrics.values())):
            return
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                raise DataError(
                    f"metric {name} at step {self.step}: got {value}, expected a finite number; "
                    "look at the loss, rewards and learning rate of this step"
                )


class MetricsSink(Protocol):
    """A destination of metrics records, such as a file."""

    def write(self, record: MetricsRecord) -> None: ...

    def close(self, outcome: RunOutcome) -> None: ...


class JsonlSink:
    """A file with one JSON object per record, flushed to disk after each, so that a killed run loses nothing."""

    def __init__(self, path: Path) -> None:
        self._file = open_lines(path)

    def write(self, record: MetricsRecord) -> None:
        append_lines(self._file, [asdict(record)])

    def close(self, _outcome: RunOutcome | None = None) -> None:
        # Every line of it is on the disk.
        with dispensable(self._file.name, done="closed"):
            self._file.close()


class WarningsSink:
    """A file with the warnings that this process has printed, one JSON object each, under the step of a record."""

    def __init__(self, path: Path) -> None:
        self._path, self._num_written = path, 0
        with dispensable(str(path)):
            open_lines(path).close()

    def write(self, record: MetricsRecord) -> None:
        if new := warnings[self._num_written :]:
            with dispensable(str(self._path)), open_lines(self._path) as file:
                append_lines(file, [{"step": record.step, "text": text} for text in new])
                self._num_written += len(new)

    def close(self, _outcome: RunOutcome | None = None) -> None:
        """Do nothing: each write closes the file."""


class MetricsLogger(AbstractContextManager["MetricsLogger"]):
    """A logger that sends each record to every sink and closes the sinks on exit. Non-finite values raise
    `DataError`.

    before: called before each record is written; what it raises keeps the record from being written.
    """

    def __init__(
        self,
        sinks: Sequence[MetricsSink],
        *,
        clock: Callable[[], float] = time.time,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._sinks, self._clock, self._before = tuple(sinks), clock, before

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one record to every sink; a non-finite value is rejected before any sink sees it."""
        # Users' functions and environments name some.
        values = {readable(name): float(value) for name, value in metrics.items()}
        record = MetricsRecord(step=step, time_s=self._clock(), metrics=values)
        self._before()
        for sink in self._sinks:
            sink.write(record)

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        # At once: services that do not answer are waited for together.
        with doing("closing metrics and trackers"), ThreadPoolExecutor(max(1, len(self._sinks))) as threads:
            list(threads.map(lambda sink: sink.close(outcome_of(error)), self._sinks))


def read_metrics(path: Path) -> list[MetricsRecord]:
    """Read all records in the order written. An incomplete last line, left by a kill, is skipped; other bad lines
    raise.
    """
    return list(iterate_metrics(path))


def iterate_metrics(path: Path, *, start: int = 0) -> Iterator[MetricsRecord]:
    """Read records one after the other, as `read_metrics` does, from the line after byte `start` − 1 on."""
    if not os.path.lexists(path):
        raise DataError(f"no metrics at {path}: expected the metrics.jsonl that a run writes")
    expected = "an object of step, time_s and finite metrics"
    return iterate_lines(path, _parse_record, expected=expected, start=start, kind=MetricsRecord)


def last_metrics(path: Path, name: str, count: int) -> list[MetricsRecord]:
    """Read the last `count` records that have a metric, or as many as there are, from the end of a long file."""
    size, length = path.stat().st_size, TAIL_BYTES
    while True:
        found = [each for each in iterate_metrics(path, start=max(0, size - length)) if name in each.metrics]
        if len(found) >= count or length >= size:
            return found[-count:]
        length *= 4


def _parse_record(raw: Any) -> MetricsRecord:
    metrics = {str(name): float(value) for name, value in raw["metrics"].items()}
    return MetricsRecord(step=int(raw["step"]), time_s=float(raw["time_s"]), metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The mean, the maximum and the minimum of a batch's values."""

    mean: float
    max: float
    min: float

    def as_metrics(self, prefix: str) -> dict[str, float]:
        """Return the metrics `{prefix}/mean`, `{prefix}/max` and `{prefix}/min`."""
        return {f"{prefix}/mean": self.mean, f"{prefix}/max": self.max, f"{prefix}/min": self.min}


def summarize(values: Sequence[float]) -> Summary:
    """Compute mean, maximum and minimum; an empty sequence raises `DataError`."""
    if not values:
        raise DataError("cannot summarise an empty batch: expected at least one value")
    return Summary(mean=math.fsum(values) / len(values), max=max(values), min=min(values))


class Stage(NamedTuple):
    """A stretch of time with a name; start and end are Unix seconds."""

    name: str
    start_s: float
    end_s: float


class Timers:
    """Times of the phases of the current step: `with timers("gen"): ...`. Phases may lie within one another.

    clock: measures durations, in seconds from any start. unix_time: dates them.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, unix_time: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._unix_time = clock, unix_time
        # By `clock`, in the order in which they ended.
        self._ended: list[Stage] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start_s = self._clock()
        try:
            yield
        finally:
            self._ended.append(Stage(phase, start_s, self._clock()))

    def stages(self) -> list[Stage]:
        """Return the phases finished since the last `pop`, each time that they ran, in the order in which they ended.

        All are dated by one reading of both clocks: a correction of the system's time cannot make them overlap.
        """
        offset_s = self._unix_time() - self._clock()
        return [Stage(name, start_s + offset_s, end_s + offset_s) for name, start_s, end_s in self._ended]

    def pop(self) -> dict[str, float]:
        """Return and reset the times of the phases finished since the last call, as `timing_s/{phase}`.

        Times of a repeated phase add up.
        """
        timings: defaultdict[str, float] = defaultdict(float)
        for name, start_s, end_s in self._ended:
            timings[f"timing_s/{name}"] += end_s - start_s
        self._ended.clear()
        return dict(timings)
