"""Draw the panels of a report: as one SVG each for the page, and all of them on one PNG."""

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megarl.host.writing import replacing
from megarl.report.curves import MAX_SHOWN, draw_fits, draw_line
from megarl.report.learning_curve import curve_of, to_text
from megarl.report.panels import PANELS, Panel
from megarl.report.run import Floats, Run
from megarl.report.style import figure_style, hover_strips, save_png, to_svg
from megarl.report.summary import GREEDY, SAMPLED, headline
from megarl.report.timeline import draw_timeline, timeline_inches, timeline_windows

PANEL_SIZE_INCHES = (5.6, 2.9)
NUM_COLUMNS = 2
TITLE_LINE_INCHES = 0.23
TITLE_WIDTH_CHARS = 120


def available_panels(runs: Sequence[Run]) -> list[Panel]:
    """List the panels that the first run has metrics for."""
    run = runs[0]
    has = [panel for panel in PANELS if any(name.startswith(panel.needs) for name in run.series)]
    return [panel for panel in has if panel.enough is None or panel.enough(run)]


def panel_svg(panel: Panel, runs: Sequence[Run]) -> str:
    """Draw a panel as inline SVG, with ids of its own because several figures share a page."""
    with figure_style(panel.name):
        figure = Figure(figsize=PANEL_SIZE_INCHES, layout="constrained")
        ax = figure.add_subplot()
        _draw(panel, ax, runs)
        svg = to_svg(figure, panel.title)
        return svg.replace("</svg>", f"{hover_strips(ax, panel.over)}</svg>")


def write_png(runs: Sequence[Run], path: Path) -> None:
    """Draw all panels, and the first run's timeline if it has one, under the headlines of the runs, as a PNG file."""
    panels = available_panels(runs)
    num_rows = -(-len(panels) // NUM_COLUMNS)
    windows = timeline_windows(runs[0].timeline)
    sentences = [f"{run.label}: {headline(run).sentence}" for run in runs]
    title = "\n".join(textwrap.fill(sentence, TITLE_WIDTH_CHARS) for sentence in sentences)
    title_inches = TITLE_LINE_INCHES * (title.count("\n") + 2)
    heights = [title_inches] + [PANEL_SIZE_INCHES[1]] * num_rows + ([timeline_inches(windows)] if windows else [])
    with figure_style():
        figure = Figure(figsize=(NUM_COLUMNS * PANEL_SIZE_INCHES[0], sum(heights)), layout="constrained")
        heading, *rows = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        heading.text(0.012, 0.5, title, va="center", fontsize=11.5)
        if windows:
            draw_timeline(rows.pop(), windows)
        # A cell of its own for each panel: a wide legend narrows its panel only.
        cells = [cell for row in rows for cell in row.subfigures(1, NUM_COLUMNS)]
        for panel, cell in zip(panels, cells, strict=False):
            _draw(panel, cell.add_subplot(), runs)
        save_png(figure, path)


def write_learning_curves(
    runs: Sequence[Run], path: Path, *, greedy: bool, until: int | None, min_gain: float
) -> list[str]:
    """Draw the fitted curves of runs on one PNG file, and return what each shows in words."""
    panel = next(panel for panel in PANELS if panel.name == "learning_curve")
    prefix = GREEDY if greedy else SAMPLED
    curves = [curve_of(run, prefix=prefix, until=until, min_gain=min_gain) for run in runs]
    with figure_style():
        figure = Figure(figsize=(2 * PANEL_SIZE_INCHES[0], 2 * PANEL_SIZE_INCHES[1]), layout="constrained")
        draw = partial(draw_fits, curves=curves, prefix=prefix)
        _draw(replace(panel, draw=draw), figure.add_subplot(), runs)
        with replacing(path) as file:
            save_png(figure, file)
    return [f"{run.label}: {to_text(curve)}" for run, curve in zip(runs, curves, strict=True)]


def _draw(panel: Panel, ax: Axes, runs: Sequence[Run]) -> None:
    ax.set_title(panel.title)
    ax.set_xlabel(panel.over)
    ax.set_ylabel(panel.unit)
    if panel.over == "step":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.margins(x=0.02)
    (panel.draw or partial(draw_line, metric=panel.needs))(ax, runs)
    for line in ax.get_lines():
        x, y = (np.asarray(data, float) for data in line.get_data())
        if (width := -(-len(x) // MAX_SHOWN)) > 3:
            line.set_data(*(data[_shown(y, width)] for data in (x, y)))
    left, right = ax.get_xlim()
    if panel.over == "step" and right - left < 1.0:  # a single step: ticks at whole numbers need room
        ax.set_xlim(left - 0.5, right + 0.5)


def _shown(values: Floats, width: int) -> npt.NDArray[np.intp]:
    """Return the places of the first, least and largest of each `width` values: a line through these looks the same."""
    starts = np.arange(0, len(values) - width + 1, width)
    parts = values[: len(starts) * width].reshape(-1, width)
    last = np.arange(len(starts) * width, len(values))
    return np.unique(np.concatenate([starts, starts + parts.argmin(1), starts + parts.argmax(1), last]))
