"""Write the report of a run: one self-contained HTML page and one picture, from the run directory alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.record.metrics import RunPaths
from megarl.report.figures import write_png
from megarl.report.page import render_page
from megarl.report.run import load_runs

__all__ = ["ReportPaths", "write_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPaths:
    """The files of a written report."""

    html: Path
    png: Path


def write_report(run_dir: Path, others: Sequence[Path] = ()) -> ReportPaths:
    """Write RUN/report.html and RUN/report.png.

    others: runs to compare with (seeds, algorithms).

    A running or killed run is reported up to its last complete metrics line. A directory that is not a run,
    or has no metrics yet, raises `DataError`.
    """
    runs = load_runs([run_dir, *others])
    paths = RunPaths(run_dir)
    paths.report_html.write_text(render_page(runs), encoding="utf-8")
    write_png(runs, paths.report_png)
    return ReportPaths(html=paths.report_html, png=paths.report_png)
