"""Follow a run in the terminal: `megarl status RUN --watch` refreshes its status and draws its curves."""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megarl.host.unicode import visible
from megarl.launch.status import SHOWN_METRICS, describe_status, read_status
from megarl.record.growth import MEASURED, growth_table
from megarl.record.metrics import RunPaths, read_metrics

REFRESH_S = 2.0
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60


def watch_status(root: Path, console: Console | None = None) -> None:
    """Show a run's status and curves until the run ends. Raises DataError if the directory holds no run."""
    with Live(_picture(root), console=console, auto_refresh=False) as live:
        while read_status(root).state == "running":
            time.sleep(REFRESH_S)
            live.update(_picture(root), refresh=True)
        live.update(_picture(root), refresh=True)


def _picture(root: Path) -> Group:
    status = Table(show_header=False, box=None, pad_edge=False)
    for name, value in describe_status(root, now=time.time()).items():
        # As texts, because rich would take [brackets] of a plain string for markup.
        status.add_row(Text(visible(name)), Text(visible(str(value))), style="bold red" if name == "error" else None)
    curves = Table(box=None, pad_edge=False)
    for heading in ("", "over steps", "first", "last", "lowest", "highest"):
        curves.add_column(heading, justify="left" if heading in ("", "over steps") else "right")
    path = RunPaths(root).metrics
    records = read_metrics(path) if path.exists() else []
    metrics = [record.metrics for record in records]
    for name, key in {**SHOWN_METRICS, "validation": "val/test_score"}.items():
        if values := [m[key] for m in metrics if key in m]:
            numbers: list[object] = [values[0], values[-1], min(values), max(values)]
            curves.add_row(name, sparkline(values, _WIDTH), *(f"{number:.4g}" for number in numbers))
    processes = Table(box=None, pad_edge=False)
    named: dict[str, tuple[list[int], list[float]]] = {}
    for record in records:
        for name in (each for each in record.metrics if each.startswith(MEASURED)):
            steps, values = named.setdefault(name, ([], []))
            steps.append(record.step)
            values.append(record.metrics[name])
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
