"""Draw what `megarl.report.step` found about a step: groups, tokens, what was taken away, layers, and time."""

from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from megarl.host.unicode import visible
from megarl.host.writing import replacing
from megarl.report.figures import draw_timeline, timeline_inches
from megarl.report.step import StepExplanation
from megarl.report.style import INK, MUTED, color_of, figure_style, save_png, to_svg

WIDTH_INCHES, ROW_INCHES = 11.2, 3.2
# More rows and columns than these would be too small to see; longer rows have several tokens to a column.
MAX_ROWS, MAX_COLUMNS, NUM_SHADES = 64, 160, 8
MAX_GROUPS, MAX_LAYERS, NAME_CHARS = 16, 40, 26
UP, DOWN = color_of(0), color_of(1)


def write_step_png(explained: StepExplanation, path: Path) -> None:
    """Draw a step as a PNG file, which is replaced in one operation."""
    with figure_style(), replacing(path) as file:
        save_png(_figure(explained), file)


def step_svg(explained: StepExplanation) -> str:
    """Draw a step as inline SVG of the report's page."""
    with figure_style("step"):
        return to_svg(_figure(explained), f"Step {explained.step}")


def _figure(explained: StepExplanation) -> Figure:
    rows = [[_draw_groups, _draw_tokens]] if explained.groups else []
    last = ([_draw_fates] if explained.groups else []) + ([_draw_layers] if explained.moved else [])
    rows += [last] if last else []
    windows = [] if explained.window is None else [explained.window]
    heights = [ROW_INCHES] * len(rows) + [timeline_inches(windows)] * len(windows) or [1.0]
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, drawn in zip(parts, rows, strict=False):
        for draw, ax in zip(drawn, part.subplots(1, len(drawn), squeeze=False)[0], strict=True):
            draw(ax, explained)
    if windows:
        draw_timeline(parts[-1], windows)
    return figure


def _bars(ax: Axes, names: list[str], values: list[float], color: str, texts: list[str]) -> None:
    """Draw horizontal bars, the first on top, with a text at the end of each."""
    places = range(len(names))
    ax.barh(places, values, color=color, height=0.7)
    ax.set_yticks(places, [name if len(name) <= NAME_CHARS else f"…{name[1 - NAME_CHARS :]}" for name in names])
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.margins(x=0.25)
    for place, value, text in zip(places, values, texts, strict=True):
        ax.annotate(text, (value, place), xytext=(4, 0), textcoords="offset points", va="center", color=MUTED)


def _draw_groups(ax: Axes, explained: StepExplanation) -> None:
    largest = explained.groups[:MAX_GROUPS]
    names, shares = [visible(group.uid) for group in largest], [100 * group.share for group in largest]
    _bars(ax, names, shares, UP, [f"{group.num_right} of {group.num_samples} right" for group in largest])
    more = f", the {len(largest)} largest of {len(explained.groups)}" if len(explained.groups) > len(largest) else ""
    ax.set_title(f"Which groups taught{more}")
    ax.set_xlabel("% of the signal of the recorded samples")


def _draw_tokens(ax: Axes, explained: StepExplanation) -> None:
    """Draw a row per sample, its tokens coloured by sign and size of their signal; light rules part groups."""
    signals = explained.signals[:MAX_ROWS]
    length = max(map(len, signals))
    per_column = -(-length // MAX_COLUMNS)
    top = max(float(np.abs(row).max(initial=0.0)) for row in signals) or 1.0
    patches, colors = [], []
    for place, row in enumerate(signals):
        padded = np.pad(row, (0, -len(row) % per_column)).reshape(-1, per_column)
        # The largest of the tokens of a column, with its sign.
        values = padded[np.arange(len(padded)), np.abs(padded).argmax(1)]
        shades = np.sign(values) * np.ceil(NUM_SHADES * np.abs(values) / top)
        start = 0
        for shade, cells in groupby(shades.tolist()):
            width = min(sum(1 for _ in cells) * per_column, len(row) - start)
            strength = abs(shade) / NUM_SHADES
            patches.append(Rectangle((start, place - 0.45), width, 0.9))
            colors.append(
                to_rgba(UP if shade > 0 else DOWN if shade < 0 else MUTED, 0.15 + 0.85 * strength if shade else 0.12)
            )
            start += width
    ax.add_collection(PatchCollection(patches, facecolors=colors, edgecolors="none", linewidths=0))
    owners = [label.rpartition("/")[0] for label in explained.rows[:MAX_ROWS]]
    for place in (i for i in range(1, len(owners)) if owners[i] != owners[i - 1]):
        ax.axhline(place - 0.5, color=INK, linewidth=0.4)
    ax.set_xlim(0, length)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(len(signals) - 0.5, -0.5)
    ax.set_yticks([])
    ax.grid(visible=False)
    more = f", {MAX_ROWS} of {len(explained.signals)} samples" if len(explained.signals) > MAX_ROWS else ""
    ax.set_title(f"Which tokens carried the gradient{more}")
    ax.set_xlabel("token of the response; groups lie between the lines")
    handles = [
        Patch(color=UP, label="likelier"),
        Patch(color=DOWN, label="less likely"),
        Patch(color=MUTED, alpha=0.3, label="no signal"),
    ]
    ax.legend(handles=handles, loc="lower right", frameon=True, fontsize=8)


def _draw_fates(ax: Axes, explained: StepExplanation) -> None:
    shares = [100 * share for share in explained.fates.values()]
    _bars(ax, list(explained.fates), shares, color_of(2), [f"{share:.1f} %" for share in shares])
    ax.set_title("What became of the tokens")
    ax.set_xlabel("% of the tokens of the recorded responses")


def _draw_layers(ax: Axes, explained: StepExplanation) -> None:
    moved = dict(list(explained.moved.items())[:MAX_LAYERS])
    ax.bar(range(len(moved)), list(moved.values()), color=color_of(3))
    ax.set_xticks(range(len(moved)), list(moved), rotation=90 if len(moved) > 8 else 0)
    ax.set_title("What moved")
    ax.set_ylabel("change / norm of the weights")
