"""Style the figures: a colour-blind safe palette, and the same figure as PNG or as theme-following SVG."""

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from markupsafe import escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, NullFormatter

# Okabe and Ito, "Color Universal Design" (2008), without black and yellow, which vanish on a dark or light
# page; then wine and olive of Tol, "Colour Schemes" (2021).
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933")
INK, MUTED, GRID = "#24292f", "#6b7280", "#e3e6ea"

# Colour of a saved SVG → style-sheet variable of the page, so that figures follow light and dark.
_CSS_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid"} | {
    color: f"--series-{index}" for index, color in enumerate(PALETTE)
}

_RC_PARAMS = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    # Names of data and of runs may have dollars.
    "text.parse_math": False,
}

# Least distance between direct labels, as a share of the axes' height.
LABEL_GAP_FRAC = 0.085
# Strips of a figure that show values under the pointer: about as many as one can point at.
MAX_STRIPS = 200


class EndLabel(NamedTuple):
    """A text beside the right end of a line, at data height `y`."""

    y: float
    text: str
    color: str


def figure_style(svg_salt: str = "") -> AbstractContextManager[None]:
    """Apply the style while figures are made and saved.

    svg_salt: makes the ids in an SVG differ from those of other figures.
    """
    params: Any = {**_RC_PARAMS, "svg.hashsalt": svg_salt}
    return matplotlib.rc_context(params)


def color_of(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def use_log_scale(ax: Axes, nonpositive: Literal["mask", "clip"]) -> None:
    """Make the y axis logarithmic. Its usual labels are formulas, which the style shows as they are written."""
    ax.set_yscale("log", nonpositive=nonpositive)
    ax.yaxis.set_major_formatter(LogFormatter())
    ax.yaxis.set_minor_formatter(NullFormatter())


def label_ends(ax: Axes, labels: Sequence[EndLabel]) -> None:
    """Write the labels right of the axes in their lines' colours, moved apart where they would touch."""
    if not labels:
        return
    to_axes = ax.transScale + ax.transLimits
    right = ax.get_xlim()[1]
    ordered = sorted(labels, key=lambda label: label.y)
    heights = spread([float(to_axes.transform((right, label.y))[1]) for label in ordered], LABEL_GAP_FRAC)
    for label, height in zip(ordered, heights, strict=True):
        ax.annotate(
            label.text,
            xy=(1.0, height),
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=label.color,
            annotation_clip=False,
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move ascending heights of labels (0 to 1, the height of the axes) until neighbours are `gap` apart.

    If the top label would then stand above 1, it moves down to 1, and those below it only as far as the gap needs.
    """
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else max(height, 0.0))
    ceiling = 1.0
    for index in range(len(placed) - 1, -1, -1):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def hover_strips(ax: Axes, over: str) -> str:
    """Return SVG elements that show the values of an axes' lines under the pointer, for the figure's last SVG.

    One strip stands over each of the x values, or over `MAX_STRIPS` of them; browsers show its title. Call it after the
    figure was saved, when the axes have their final place.
    """
    names = {text.get_color(): text.get_text() for text in ax.texts}
    points: dict[float, dict[str, float]] = {}
    for line in ax.get_lines():
        label = str(line.get_label()).strip("_ ")
        if line.get_transform() == ax.transData:
            name = names.get(line.get_color(), "") if label in ("", "nolegend") or label.startswith("child") else label
            for x, y in zip(np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float), strict=True):
                # A line is drawn before its moving mean.
                points.setdefault(float(x), {}).setdefault(name, float(y))
    every = sorted(points)
    if len(every) > 10 * MAX_STRIPS:
        # Long lines have some places in common, and others of their own.
        most = max(map(len, points.values()))
        every = [x for x in every if len(points[x]) == most]
    kept = every[:: -(-len(every) // MAX_STRIPS) or 1]
    if not kept:
        return ""
    figure, box = ax.get_figure(), ax.get_window_extent()
    assert figure is not None
    scale = 72 / figure.dpi
    places = [float(ax.transData.transform((x, ax.get_ylim()[0]))[0]) for x in kept]
    bounds = [box.x0, *((a + b) / 2 for a, b in itertools.pairwise(places)), box.x1]
    top, height = (figure.bbox.height - box.y1) * scale, box.height * scale
    return "".join(
        f'<rect class="step" x="{left * scale:.1f}" y="{top:.1f}" width="{(right - left) * scale:.1f}" '
        f'height="{height:.1f}"><title>{escape(_words(over, x, points[x]))}</title></rect>'
        for x, (left, right) in zip(kept, itertools.pairwise(bounds), strict=True)
    )


def _words(over: str, x: float, values: Mapping[str, float]) -> str:
    return "\n".join([f"{over} {x:g}", *(f"{name}: {y:.4g}" if name else f"{y:.4g}" for name, y in values.items())])


def save_png(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="png", dpi=150)


def to_svg(figure: Figure, label: str) -> str:
    """Return a figure as inline `<svg>` whose colours are the page's variables, with `label` for screen readers."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    # The page's style sheet has the one rule of the figure's.
    svg = re.sub(r"<style.*?</style>", "", svg[svg.index("<svg") :], count=1, flags=re.DOTALL)
    svg = re.sub("|".join(_CSS_VARIABLES), lambda match: f"var({_CSS_VARIABLES[match[0]]})", svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
