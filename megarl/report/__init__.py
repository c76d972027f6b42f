"""Write the report of a run, from the run directory alone: a page, a picture, and a browser of recorded samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.host.sharing import shared_as
from megarl.host.writing import replacing
from megarl.record.metrics import RunPaths
from megarl.report.run import load_runs

__all__ = ["ReportPaths", "write_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPaths:
    """The files of a written report."""

    html: Path
    png: Path


def write_report(run_dir: Path, others: Sequence[Path] = ()) -> ReportPaths:
    """Write RUN/report.html, RUN/report.png and, if samples were recorded, the rollout browser in RUN/report.

    others: runs to compare with (seeds, algorithms).

    A running or killed run is reported up to its last complete metrics line. A directory that is not a run,
    or has no metrics yet, raises `DataError`. Each file is replaced in one operation, so that several processes may
    write the report at once, and others read it meanwhile.
    """
    # They load matplotlib, for which no command should wait when it starts.
    from megarl.report.figures import write_png
    from megarl.report.page import render_page
    from megarl.report.rollouts import write_browser

    runs = load_runs([run_dir, *others])
    paths = RunPaths(run_dir)
    labelled = [(run.label, RunPaths(path)) for run, path in zip(runs, (run_dir, *others), strict=True)]
    with shared_as(run_dir):
        verdicts = write_browser(labelled, paths.report_files)
        page = render_page(runs, verdicts)
        with replacing(paths.report_html) as html:
            html.write_text(page, encoding="utf-8")
        with replacing(paths.report_png) as png:
            write_png(runs, png)
    return ReportPaths(html=paths.report_html, png=paths.report_png)
