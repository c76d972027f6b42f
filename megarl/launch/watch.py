"""Follow a run in the terminal: `megarl status RUN --watch` refreshes its status and draws its curves."""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megarl.host.unicode import visible
from megarl.launch.status import SHOWN_METRICS, describe_status, read_status
from megarl.record.growth import MEASURED, Readings, growth_table
from megarl.record.metrics import MetricsRecord, RunPaths, read_metrics

REFRESH_S = 2.0
# How much of a file of metrics is read at a time.
CHUNK_BYTES = 1 << 24
_SCORE = "val/test_score"
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60


@dataclass(slots=True)
class _Curve(Readings):
    """Readings of a metric, of which also the first, least and largest value are kept."""

    first: float = 0.0
    least: float = float("inf")
    largest: float = float("-inf")
    last: float = 0.0

    def take(self, step: float, value: float) -> None:
        self.first = self.first if self.num_seen else value
        self.last, self.least, self.largest = value, min(self.least, value), max(self.largest, value)
        self.add(step, value)


@dataclass(slots=True)
class FollowedMetrics:
    """The metrics that `--watch` shows; each `read` goes on where the last one stopped, unless the file is another."""

    path: Path
    curves: dict[str, _Curve] = field(default_factory=dict)
    _inode: int = 0
    _end: int = 0

    def read(self) -> None:
        """Read what was written since the last call."""
        shown = {*SHOWN_METRICS.values(), _SCORE}
        for record in self._written():
            for name, value in record.metrics.items():
                if name in shown or name.startswith(MEASURED):
                    self.curves.setdefault(name, _Curve()).take(record.step, value)

    def _written(self) -> Iterator[MetricsRecord]:
        from msgspec import DecodeError
        from msgspec.json import Decoder

        if not self.path.exists():
            return
        decoder = Decoder(MetricsRecord)
        with self.path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._end:
                # A resumed run repeats steps.
                self._inode, self._end, self.curves = found.st_ino, 0, {}
            file.seek(self._end)
            rest = b""
            while chunk := file.read(CHUNK_BYTES):
                lines, newline, rest = (rest + chunk).rpartition(b"\n")
                self._end += len(lines) + len(newline)
                try:
                    records = decoder.decode_lines(lines)
                except (DecodeError, UnicodeDecodeError):
                    # It says which line is damaged, and reads all of them if none is.
                    self.curves, self._end = {}, found.st_size
                    return (yield from read_metrics(self.path))
                yield from records


def watch_status(root: Path, console: Console | None = None) -> None:
    """Show a run's status and curves until the run ends. Raises DataError if the directory holds no run."""
    metrics = FollowedMetrics(RunPaths(root).metrics)
    with Live(_picture(root, metrics), console=console, auto_refresh=False) as live:
        while read_status(root).state == "running":
            time.sleep(REFRESH_S)
            live.update(_picture(root, metrics), refresh=True)
        live.update(_picture(root, metrics), refresh=True)


def _picture(root: Path, metrics: FollowedMetrics) -> Group:
    status = Table(show_header=False, box=None, pad_edge=False)
    for name, value in describe_status(root, now=time.time()).items():
        # As texts, because rich would take [brackets] of a plain string for markup.
        status.add_row(Text(visible(name)), Text(visible(str(value))), style="bold red" if name == "error" else None)
    curves = Table(box=None, pad_edge=False)
    for heading in ("", "over steps", "first", "last", "lowest", "highest"):
        curves.add_column(heading, justify="left" if heading in ("", "over steps") else "right")
    metrics.read()
    for name, key in {**SHOWN_METRICS, "validation": _SCORE}.items():
        if (curve := metrics.curves.get(key)) is not None:
            numbers = (curve.first, curve.last, curve.least, curve.largest)
            curves.add_row(name, sparkline(curve.values, _WIDTH), *(f"{number:.4g}" for number in numbers))
    processes = Table(box=None, pad_edge=False)
    named = {name: (each.steps, each.values) for name, each in metrics.curves.items() if name.startswith(MEASURED)}
    for i, row in enumerate(growth_table(named)):
        if i == 0:
            for column, heading in enumerate(row):
                processes.add_column(heading, justify="right" if column else "left")
        else:
            processes.add_row(*map(Text, row))
    return Group(status, "", curves, "", processes)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve as a line of bars, each the mean of an equal share of the values, between their extremes.

    >>> sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8)
    '▁▂▃▄▅▆▇█'
    >>> sparkline([1.0, 3.0, 5.0, 7.0], 2)
    '▁█'
    """
    count = min(width, len(values))
    ends = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(ends)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1)) if span else 0] for mean in means)
