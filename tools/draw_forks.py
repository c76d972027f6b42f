"""Draws docs/images/forks.svg: a sample that forks as a tree, as a list of tokens, and as the trainer computes it.

Usage: python tools/draw_forks.py [OUTPUT.svg]
"""

import sys
from itertools import accumulate, pairwise
from typing import Any

import matplotlib as mpl
import matplotlib.patches
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megarl.types.forks import Fork, path_before, path_to
from tools import draw_architecture
from tools.draw_architecture import ENGINE, INK, MUTED, STYLE

OUTPUT = draw_architecture.OUTPUT.with_name("forks.svg")
GIVEN, OWN = "#e4e7eb", ENGINE
OWN_EDGE = "#c77700"
# Parts of a sample whose template drops thoughts, with a helper that has a prompt of its own: name, tokens, whose.
PARTS = (
    ("prompt", 4, GIVEN),
    ("thought", 2, OWN),
    ("call", 2, OWN),
    ("call", 2, GIVEN),
    ("result", 2, GIVEN),
    ("answer", 2, OWN),
    ("prompt", 3, GIVEN),
    ("answer", 2, OWN),
)
FORKS = (Fork(8, 3), Fork(14, -1))
# A second sample of the same prompt, which the packer puts beside the first: it shares the first four tokens.
OTHER, SHARED = (("answer", 3, OWN),), 4
NUM_OF_SAMPLE = sum(count for _, count, _ in PARTS)
# All that is computed, as a tree whose last branch is the second sample.
ALL_PARTS, ALL_FORKS = PARTS + OTHER, (*FORKS, Fork(NUM_OF_SAMPLE, SHARED - 1))
CELL = 2.6
# The line of each branch, from the top.
LINES = (0, 1, 3, 2)


def token(axes: Axes, x: float, y: float, number: int, color: str, size: float = CELL) -> None:
    """Draw a token, by its number, as a box with the lower left corner (x, y)."""
    edge = OWN_EDGE if color == OWN else MUTED
    axes.add_patch(mpl.patches.Rectangle((x, y), size, size, facecolor=color, edgecolor=edge, linewidth=0.8))
    axes.text(x + size / 2, y + size / 2 - 0.08, str(number), ha="center", va="center", size=6, color=INK)


def colors() -> list[str]:
    """Return the colour of each token that is computed."""
    return [color for _, count, color in ALL_PARTS for _ in range(count)]


def draw_tree(axes: Axes, left: float, top: float) -> None:
    """Draw each branch on a line of its own, its tokens where they stand on their path."""
    starts = [0, *(fork.start for fork in ALL_FORKS)]
    lines = [LINES[sum(start <= i for start in starts) - 1] for i in range(len(colors()))]
    places = [len(path_before(i, ALL_FORKS)) for i in range(len(lines))]
    heights = [top - 6.6 * line for line in lines]
    for i, color in enumerate(colors()):
        token(axes, left + CELL * places[i], heights[i], i, color)
    for start, after in ALL_FORKS:
        if after >= 0:
            x, y = left + CELL * (places[after] + 1), heights[start] + CELL / 2
            axes.plot([x, x], [heights[after], y], color=INK, linewidth=1.0)
    ends = list(accumulate((count for _, count, _ in ALL_PARTS), initial=0))
    for (name, count, _), (first, _) in zip(ALL_PARTS, pairwise(ends), strict=True):
        x = left + CELL * (places[first] + count / 2)
        axes.text(x, heights[first] + CELL + 0.9, name, ha="center", va="center", size=7, color=INK)
    notes = (
        "turn 1: the policy thinks and calls a tool",
        "turn 2: the template leaves the thought out",
        "another sample of the same prompt, in the same micro-batch",
        "turn 3: a helper is asked, with a prompt of its own",
    )
    for line, note in enumerate(notes):
        last = max(i for i in range(len(lines)) if lines[i] == line)
        x = left + CELL * (places[last] + 1) + 1
        axes.text(x, heights[last] + CELL / 2, note, va="center", size=7, color=MUTED)


def draw_mask(axes: Axes, left: float, top: float, size: float) -> None:
    """Draw which tokens each token reads, itself included: those of its path."""
    found, cell = colors(), size / len(colors())
    for query, color in enumerate(found):
        y = top - cell * (query + 1)
        for key in path_to(query + 1, ALL_FORKS):
            fill = "#e8a33d" if color == OWN else "#b3bcc6"
            box = mpl.patches.Rectangle((left + cell * key, y), cell, cell, facecolor=fill, edgecolor="white")
            box.set_linewidth(0.5)
            axes.add_patch(box)
        for x, place, turn in ((left - 0.5, y + cell / 2, 0), (left + cell * (query + 0.5), top + 0.6, 1)):
            align: Any = {"ha": "center", "va": "bottom"} if turn else {"ha": "right", "va": "center"}
            axes.text(x, place, str(query), size=4.6, color=MUTED, **align)
    axes.add_patch(mpl.patches.Rectangle((left, top - size), size, size, facecolor="none", edgecolor=MUTED))
    for start, _ in ALL_FORKS:
        at = cell * start
        axes.plot([left, left + size], [top - at, top - at], color=MUTED, linewidth=0.6, linestyle=":")


def draw() -> Figure:
    """Draw the whole picture, in units of a hundredth of its width."""
    figure = Figure(figsize=(8.6, 4.6))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 100), ylim=(0, 53.5))
    axes.set_axis_off()
    total = len(colors())
    num_path_tokens = sum(len(path_to(end, ALL_FORKS)) for end in (*(fork.start for fork in ALL_FORKS), total))

    def write(x: float, y: float, *lines: str, size: float = 7.5, **properties: Any) -> None:
        for line, text in enumerate(lines):
            axes.text(x, y - 2.3 * line, text, size=size, va="center", **{"color": MUTED} | properties)

    write(2, 51, "A conversation that forks", size=10, weight="bold", color=INK)
    draw_tree(axes, 2, 43.6)
    for x, color, words in ((2, OWN, "written by the policy: trains once"), (32, GIVEN, "given: does not train")):
        axes.add_patch(mpl.patches.Rectangle((x, 19), 1.9, 1.9, facecolor=color, edgecolor=MUTED, linewidth=0.8))
        write(x + 2.8, 19.9, words, color=INK)

    write(2, 15.2, "One sample: its tokens, and where branches begin", size=10, weight="bold", color=INK)
    for i in range(NUM_OF_SAMPLE):
        token(axes, 2 + CELL * i, 9.4, i, colors()[i])
    for start, after in FORKS:
        place = 2 + CELL * start
        axes.plot([place, place], [8.6, 12.8], color=INK, linewidth=1.4)
        write(place, 7.4, f"{start} follows {after}" if after >= 0 else f"{start} follows none", ha="center", color=INK)
    write(2, 4.2, "Each token is there once, in the order in which it came, with its own loss", size=7)
    write(2, 1.9, "mask, log-prob and advantage. A conversation without forks is such a list, too.", size=7)

    write(66, 51, "What each token reads", size=10, weight="bold", color=INK)
    draw_mask(axes, 68.5, 46.4, 29)
    write(
        66,
        14.4,
        "A token (row) reads those of its path (columns),",
        "as if its branch stood alone; so does its position.",
        f"The four paths have {num_path_tokens} tokens. {total} pass through the",
        f"layers: perf/shared_tokens_frac is {1 - total / num_path_tokens:.2f}.",
        size=7,
    )
    return figure


def main(argv: list[str]) -> None:
    """Write the drawing to the given file, or to its place in docs/."""
    with mpl.rc_context(STYLE):
        draw().savefig(argv[0] if argv else OUTPUT, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1:])
