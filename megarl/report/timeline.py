"""Draw when the trainer and each engine worked, for a few steps of a run."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch

from megarl.record.timeline import STEP_LANE, TRAINER_LANE, WAITING, Interval, lanes_of
from megarl.report.curves import MIN_PHASE_FRAC, phase_order
from megarl.report.style import INK, MUTED, color_of, figure_style, to_svg

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
