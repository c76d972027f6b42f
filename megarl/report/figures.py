"""Draw the panels of a report: as one SVG each for the page, and all of them on one PNG; and when the trainer
and each engine worked.
"""

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from megarl.host.writing import replacing
from megarl.record.timeline import STEP_LANE, TRAINER_LANE, WAITING, Interval, lanes_of
from megarl.report.curves import MAX_SHOWN, MIN_PHASE_FRAC, draw_fits, draw_line, phase_order
from megarl.report.learning_curve import curve_of, to_text
from megarl.report.panels import PANELS, Panel
from megarl.report.run import Floats, Run
from megarl.report.style import INK, MUTED, color_of, figure_style, hover_strips, save_png, to_svg
from megarl.report.summary import GREEDY, SAMPLED, headline

WINDOW_STEPS = 3
# Lanes of more engines would be too thin to see.
MAX_ENGINES = 16
# The width of all, and the heights of a lane, of what surrounds the lanes of a window, and of the legend's two lines.
WIDTH_INCHES, LANE_INCHES, FRAME_INCHES, LEGEND_INCHES = 11.2, 0.26, 0.95, 0.5
LEGEND_COLUMNS = 7
WAITING_ALPHA = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindow:
    """Successive steps of a run, with everything that went on between the start of the first and the end of the last.

    steps: their intervals in the lane of steps. intervals: those of the trainer and the engines, cut at both ends.
    """

    steps: tuple[Interval, ...]
    intervals: tuple[Interval, ...]


def timeline_windows(timeline: Sequence[Interval]) -> list[StepWindow]:
    """Return the steps to draw: some around the middle of a run, and the last ones; all of a short run.

    A window does not span a pause of the run, as between a kill and a resume.
    """
    steps = [interval for interval in timeline if interval.lane == STEP_LANE]
    if len(steps) <= 2 * WINDOW_STEPS:
        chosen = [steps]
    else:
        first = (len(steps) - WINDOW_STEPS) // 2
        chosen = [steps[first : first + WINDOW_STEPS], steps[-WINDOW_STEPS:]]
    return [window_of(timeline, part) for part in chosen if part]


def window_of(timeline: Sequence[Interval], steps: Sequence[Interval]) -> StepWindow:
    """Return the window of the steps after the last gap that is longer than all of the steps together."""
    whole = sum(step.end_s - step.start_s for step in steps)
    gaps = [right.start_s - left.end_s for left, right in pairwise(steps)]
    steps = steps[max((index for index, gap in enumerate(gaps, start=1) if gap > whole), default=0) :]
    start, end = steps[0].start_s, steps[-1].end_s
    inside = [i for i in timeline if i.lane != STEP_LANE and i.end_s > start and i.start_s < end]
    cut = [
        Interval(lane=i.lane, name=i.name, start_s=max(start, i.start_s), end_s=min(end, i.end_s), step=i.step)
        for i in inside
    ]
    return StepWindow(steps=tuple(steps), intervals=tuple(cut))


def timeline_svg(windows: Sequence[StepWindow]) -> str:
    """Draw windows of a timeline, one below the other, as inline SVG."""
    with figure_style("timeline"):
        figure = Figure(figsize=(WIDTH_INCHES, timeline_inches(windows)), layout="constrained")
        draw_timeline(figure, windows)
        return to_svg(figure, "Timeline")


def timeline_inches(windows: Sequence[StepWindow]) -> float:
    """Return the height of the drawing of windows."""
    return LEGEND_INCHES + sum(map(_window_inches, windows))


def _window_inches(window: StepWindow) -> float:
    return LANE_INCHES * len(_shown_lanes(window)) + FRAME_INCHES


def draw_timeline(figure: Figure | SubFigure, windows: Sequence[StepWindow]) -> None:
    """Draw windows of a timeline into a figure, one below the other, on axes of their own."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for interval in (i for window in windows for i in window.intervals if i.lane == TRAINER_LANE):
        seconds[interval.name] += interval.end_s - interval.start_s
    # As in the panel of times per phase, what is too short to be seen has no colour of its own.
    least_s = MIN_PHASE_FRAC * sum(seconds.values())
    large = [name for name in phase_order(set(seconds) - WAITING) if seconds[name] >= least_s]
    colors = {name: color_of(index) for index, name in enumerate(large)}
    heights = list(map(_window_inches, windows))
    axes = figure.subplots(len(windows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, window in zip(axes, windows, strict=True):
        _draw_window(ax, window, colors)
    patches = [Patch(color=color, linewidth=0, label=name) for name, color in colors.items()]
    if other := phase_order(set(seconds) - WAITING - set(large)):
        patches.append(Patch(color=INK, linewidth=0, label=f"other: {', '.join(other)}"))
    if waiting := phase_order(set(seconds) & WAITING):
        patches.insert(0, Patch(color=MUTED, alpha=WAITING_ALPHA, linewidth=0, label=f"waits: {', '.join(waiting)}"))
    figure.legend(handles=patches, loc="outside upper left", ncols=min(len(patches), LEGEND_COLUMNS))


def _draw_window(ax: Axes, window: StepWindow, colors: dict[str, str]) -> None:
    """Draw a window, a lane below the other, over the seconds since its start."""
    start = window.steps[0].start_s
    lanes = _shown_lanes(window)
    for height, lane in enumerate(lanes):
        for name in phase_order({i.name for i in window.intervals if i.lane == lane}):
            bars = [
                (i.start_s - start, i.end_s - i.start_s) for i in window.intervals if (i.lane, i.name) == (lane, name)
            ]
            waits = lane == TRAINER_LANE and name in WAITING
            color = MUTED if waits or lane != TRAINER_LANE else colors.get(name, INK)
            ax.broken_barh(bars, (height - 0.36, 0.72), color=color, alpha=WAITING_ALPHA if waits else 1, linewidth=0)
    for step in window.steps:
        ax.axvline(step.start_s - start, color=INK, linewidth=0.8)
    first, last = window.steps[0].step, window.steps[-1].step
    ax.set_title(f"Step {first}" if first == last else f"Steps {first} to {last}")
    ax.set_xlabel("seconds")
    ax.set_xlim(0, window.steps[-1].end_s - start)
    ax.set_ylim(len(lanes) - 0.4, -0.6)
    ax.set_yticks(range(len(lanes)), lanes)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)


def _shown_lanes(window: StepWindow) -> list[str]:
    return lanes_of(window.intervals)[: MAX_ENGINES + 1]


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
