"""Draws docs/images/architecture.svg: the stages of one step, and the processes of a run.

Usage: python tools/draw_architecture.py [OUTPUT.svg]
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.patches
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OUTPUT = Path(__file__).parent.parent / "docs" / "images" / "architecture.svg"
# A fixed salt and no date: the same drawing is the same file.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "megarl", "font.family": "sans-serif", "font.size": 9}
INK, MUTED = "#1f2933", "#52606d"
DRIVER, TRAINER, ENGINE, JUDGE, OUTSIDE = "#e8eef7", "#dcefe3", "#fdf0d5", "#f3e3f3", "#eeeeee"

# Each stage of a step: name, what it leaves behind, and the processes that do the work.
STAGES = (
    ("sample", "RolloutBatch", ENGINE),
    ("judge", "Reward", JUDGE),
    ("filter, refill", "groups to keep", DRIVER),
    ("rows", "TrainingRows", DRIVER),
    ("forward", "log-probs, values", TRAINER),
    ("advantage", "Advantages", DRIVER),
    ("update", "new weights", TRAINER),
    ("sync", "engines updated", TRAINER),
    ("record", "metrics, report", DRIVER),
)


def box(
    axes: Axes,
    x: float,
    y: float,
    size: tuple[float, float],
    color: str,
    title: str,
    *lines: str,
    title_size: float = 9,
) -> None:
    """Draw a box whose lower left corner is (x, y), with a bold title above lines of text."""
    width, height = size
    axes.add_patch(
        mpl.patches.FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.6",
            facecolor=color,
            edgecolor=MUTED,
            linewidth=0.9,
        )
    )
    middle, top = x + width / 2, y + height / 2 + 1.25 * len(lines)
    axes.text(middle, top, title, ha="center", va="center", size=title_size, weight="bold", color=INK)
    for number, line in enumerate(lines, start=1):
        axes.text(middle, top - 2.6 * number, line, ha="center", va="center", size=7.5, color=MUTED)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], *, style: str = "-|>", **line: Any) -> None:
    """Draw an arrow between two points; `line` holds further properties of the arrow."""
    properties: dict[str, Any] = {"color": INK, "linewidth": 1.1} | line
    axes.add_patch(
        mpl.patches.FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=9, shrinkA=0, shrinkB=0, **properties)
    )


def draw() -> Figure:
    """Draw the whole picture, in units of a hundredth of its width."""
    figure = Figure(figsize=(8.6, 5.9))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 100), ylim=(0, 68.6))
    axes.set_axis_off()

    axes.text(2, 66.2, "One step", size=11, weight="bold", va="center", color=INK)
    width, gap = 9.2, 1.65
    for number, (name, result, color) in enumerate(STAGES):
        x = 2 + number * (width + gap)
        box(axes, x, 53.5, (width, 6), color, name, title_size=7.5)
        axes.text(x + width / 2, 51.8, result, ha="center", va="center", size=7, color=MUTED)
        if number:
            arrow(axes, (x - gap, 56.5), (x, 56.5))
    first, third = 2 + width / 2, 2 + 2 * (width + gap) + width / 2
    arrow(axes, (third, 59.5), (first, 59.5), connectionstyle="arc,angleA=90,angleB=90,armA=14,armB=14,rad=4")
    axes.text((first + third) / 2, 63.2, "other prompts for removed groups", ha="center", size=7.5, color=MUTED)
    last = 2 + 8 * (width + gap) + width / 2
    arrow(
        axes,
        (last, 50.6),
        (first, 50.6),
        linestyle="--",
        color=MUTED,
        connectionstyle="arc,angleA=-90,angleB=-90,armA=14,armB=14,rad=4",
    )
    axes.text(50, 46.6, "next step", ha="center", size=7.5, color=MUTED)

    axes.text(2, 44.2, "Processes", size=11, weight="bold", va="center", color=INK)
    box(
        axes, 37, 33, (26, 9), DRIVER, "driver", "runs the loop and the algorithm,", "imports neither Megatron nor vLLM"
    )
    box(axes, 2, 33, (24, 9), OUTSIDE, "janitor", "ends what is left of a run", "when the driver is gone")
    box(axes, 74, 33, (24, 9), JUDGE, "verifier fork server", "starts the workers")
    box(axes, 74, 5, (24, 15), JUDGE, "verifier workers", "judge texts, run programs", "in sandboxes")
    axes.add_patch(
        mpl.patches.FancyBboxPatch(
            (2, 1.5),
            66,
            22.5,
            boxstyle="round,pad=0,rounding_size=0.6",
            facecolor="none",
            edgecolor=MUTED,
            linestyle=":",
        )
    )
    axes.text(35, 3.1, "Ray actors, on one or several hosts", size=7.5, ha="center", va="center", color=MUTED)
    box(
        axes,
        4,
        5,
        (24, 15),
        TRAINER,
        "trainer ranks",
        "Megatron: actor, critic,",
        "reference, reward model;",
        "a group per layout",
    )
    box(
        axes,
        42,
        5,
        (24, 15),
        ENGINE,
        "engines",
        "vLLM: the whole policy,",
        "a worker process",
        "per tensor-parallel rank",
    )
    arrow(axes, (26, 37.5), (37, 37.5), style="<|-", linestyle="--", color=MUTED)
    axes.text(31.5, 38.4, "pipe closes", ha="center", size=7.5, color=MUTED)
    arrow(axes, (63, 39.5), (74, 39.5))
    axes.text(68.5, 40.4, "asks for", ha="center", size=7.5, color=MUTED)
    axes.text(68.5, 37.2, "workers", ha="center", size=7.5, color=MUTED)
    arrow(axes, (62, 33), (74, 17), style="<|-|>")
    axes.text(70, 24.5, "samples, rewards", size=7.5, va="center", color=MUTED)
    arrow(axes, (86, 33), (86, 20))
    axes.text(87, 28.5, "forks", size=7.5, va="center", color=MUTED)
    arrow(axes, (43, 33), (17, 20), style="<|-|>")
    axes.text(28, 28, "rows, log-probs", size=7.5, ha="right", va="center", color=MUTED)
    arrow(axes, (54, 33), (54, 20), style="<|-|>")
    axes.text(53, 28, "prompts, samples", size=7.5, ha="right", va="center", color=MUTED)
    arrow(axes, (28, 12.5), (42, 12.5), linewidth=2.6)
    axes.text(35, 14.4, "weights", ha="center", size=7.5, color=INK)
    axes.text(35, 9.8, "after each update", ha="center", size=7.5, color=MUTED)
    return figure


def main(argv: list[str]) -> None:
    """Write the drawing to the given file, or to its place in docs/."""
    with mpl.rc_context(STYLE):
        draw().savefig(argv[0] if argv else OUTPUT, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1:])
