"""What a run writes down and reads back: metrics (JSON lines, TensorBoard), phase times, sampled rollouts."""

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.errors import DataError


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Where everything of a run lies."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def versions(self) -> Path:
        """What the run ran on: package → version."""
        return self.root / "versions.json"

    @property
    def status(self) -> Path:
        """What the driver is doing; see `megarl.launch.status`."""
        return self.root / "status.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def wandb_id(self) -> Path:
        """The id of the Weights & Biases run, with which a resumed run continues it."""
        return self.root / "wandb_id.txt"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def report_html(self) -> Path:
        return self.root / "report.html"

    @property
    def report_png(self) -> Path:
        return self.root / "report.png"

    @property
    def export(self) -> Path:
        """The trained policy as a Hugging Face model directory."""
        return self.root / "export"

    @property
    def export_critic(self) -> Path:
        """The trained critic, if there is one, as another."""
        return self.root / "export_critic"

    @property
    def records(self) -> Path:
        """Rollouts kept bit for bit, for replay."""
        return self.root / "records"

    @property
    def profile(self) -> Path:
        """Traces of torch's profiler, one per rank."""
        return self.root / "profile"

    @property
    def checkpoints(self) -> Path:
        """What `--resume` continues from."""
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        """The workers' output, kept when a run fails."""
        return self.root / "logs"

    def rollouts(self, step: int) -> Path:
        return self.root / "rollouts" / f"step_{step:06d}.parquet"

    def recorded_rollouts(self) -> list[Path]:
        """Rollout files that exist, in the order of their steps."""
        paths = self.root.glob("rollouts/step_*.parquet")
        return sorted(paths, key=lambda path: int(path.stem.removeprefix("step_")))


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRecord:
    """Metrics of one step; `time_s` is Unix time. Several records may share a step. Every value is finite."""

    step: int
    time_s: float
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                raise DataError(
                    f"metric {name} at step {self.step}: got {value}, expected a finite number; "
                    "look at the loss, rewards and learning rate of this step"
                )


class MetricsSink(Protocol):
    """Somewhere records go."""

    def write(self, record: MetricsRecord) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Appends one JSON object per record, on the disk before the run goes on: nothing of a killed run is lost."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: MetricsRecord) -> None:
        self._file.write(json.dumps(asdict(record), allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Writes scalars as event files; from `purge_step` on, a resumed run hides what an earlier one wrote."""

    def __init__(self, log_dir: Path, *, purge_step: int | None = None) -> None:
        # Imported here: reading metrics and writing a report must not need torch.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(log_dir), purge_step=purge_step)

    def write(self, record: MetricsRecord) -> None:
        for name, value in record.metrics.items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time_s)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MetricsLogger:
    """Sends each record to every sink, and closes them on exit. Non-finite values raise `DataError`."""

    def __init__(self, sinks: Sequence[MetricsSink], *, clock: Callable[[], float] = time.time) -> None:
        self._sinks = tuple(sinks)
        self._clock = clock

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Checks first, writes then: a bad value reaches no sink."""
        values = {name: float(value) for name, value in metrics.items()}
        record = MetricsRecord(step=step, time_s=self._clock(), metrics=values)
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[MetricsRecord]:
    """All records in the order written; a last line cut off by a kill is left out, other bad lines raise."""
    if not path.is_file():
        raise DataError(f"no metrics at {path}: expected the metrics.jsonl that a run writes")
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        is_unterminated = number == len(lines)
        try:
            if line.strip():
                records.append(_parse_record(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if not is_unterminated:
                raise DataError(
                    f"{path} line {number}: got {line[:80]!r} ({error}), expected an object of step, time_s "
                    "and finite metrics; repair or remove this line"
                ) from error
    return records


def _parse_record(line: str) -> MetricsRecord:
    raw = json.loads(line)
    metrics = {str(name): float(value) for name, value in raw["metrics"].items()}
    return MetricsRecord(step=int(raw["step"]), time_s=float(raw["time_s"]), metrics=metrics)


def truncate_metrics(path: Path, last_step: int) -> None:
    """Keep the records up to `last_step` as they are; the file changes as a whole or not at all."""
    if not path.exists():
        return
    _drop_torn_line(path)
    lines = path.read_bytes().splitlines(keepends=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.writelines(line for line in lines if _parse_record(line.decode("utf-8")).step <= last_step)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _drop_torn_line(path: Path) -> None:
    """Cuts what follows the last newline, so that the next record does not continue a torn one."""
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Mean, maximum and minimum of a batch's values."""

    mean: float
    max: float
    min: float

    def as_metrics(self, prefix: str) -> dict[str, float]:
        """`{prefix}/mean`, `{prefix}/max`, `{prefix}/min`."""
        return {f"{prefix}/mean": self.mean, f"{prefix}/max": self.max, f"{prefix}/min": self.min}


def summarize(values: Sequence[float]) -> Summary:
    """Mean, max and min; an empty sequence raises `DataError`."""
    if not values:
        raise DataError("cannot summarise an empty batch: expected at least one value")
    return Summary(mean=math.fsum(values) / len(values), max=max(values), min=min(values))


class Timers:
    """Seconds per phase of the current step: `with timers("gen"): ...`. A phase entered twice adds up."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._elapsed_s: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start_s = self._clock()
        try:
            yield
        finally:
            self._elapsed_s[phase] += self._clock() - start_s

    def pop(self) -> dict[str, float]:
        """The phases finished since the last call, as `timing_s/{phase}`."""
        timings = {f"timing_s/{phase}": elapsed_s for phase, elapsed_s in self._elapsed_s.items()}
        self._elapsed_s.clear()
        return timings


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One sampled response as text, with its reward: a row of RUN/rollouts/step_*.parquet."""

    step: int
    uid: str
    sample_index: int
    data_source: str
    prompt: str
    response: str
    ground_truth: str
    reward: float
    finish_reason: str
    num_prompt_tokens: int
    num_response_tokens: int
    # Whether it counts as right, and what else its scorer said: JSON, numbers by name.
    correct: bool = False
    details: str = "{}"


_ARROW_TYPES = {int: pa.int64(), str: pa.string(), float: pa.float64(), bool: pa.bool_()}
ROLLOUT_SCHEMA = pa.schema([(name, _ARROW_TYPES[kind]) for name, kind in RolloutRecord.__annotations__.items()])


def write_rollouts(path: Path, rows: Sequence[RolloutRecord]) -> None:
    """Writes the rows as parquet; the file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema=ROLLOUT_SCHEMA), partial)
    partial.replace(path)


def read_rollouts(path: Path) -> list[RolloutRecord]:
    """The rows of one rollout file; another schema raises `DataError`."""
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a rollout file ({error}), expected parquet as megarl writes it") from error
    if not table.schema.equals(ROLLOUT_SCHEMA):
        raise DataError(
            f"{path}: got columns {table.column_names}, expected {ROLLOUT_SCHEMA.names} as megarl writes them"
        )
    return [RolloutRecord(**row) for row in table.to_pylist()]
