"""Memory against rows as a picture: a panel per vocabulary, a line per contender."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from megarl.report.style import INK, EndLabel, color_of, figure_style, label_ends, save_png
from megarl_lab.bench.logprobs.records import MIB, Report

PANEL_SIZE_INCHES = (5.2, 3.4)
TITLE_INCHES = 0.6


def write_memory_png(report: Report, path: Path) -> None:
    """Peak memory over inputs; hollow marks on dashes are predictions that did not fit, per rank."""
    vocabs = sorted({m.size.vocab for m in report.measurements})
    width, height = PANEL_SIZE_INCHES
    with figure_style():
        figure = Figure(figsize=(len(vocabs) * width, height + TITLE_INCHES), layout="constrained")
        setup = f"{report.device}, {report.dtype}, TP{report.world_size}"
        figure.suptitle(
            f"Peak memory of a rank over its inputs ({setup})\nHollow: predicted, did not fit",
            x=0.012,
            ha="left",
            fontsize=11.5,
        )
        for ax, vocab in zip(figure.subplots(1, len(vocabs), squeeze=False)[0], vocabs, strict=True):
            ax.set_title(f"V = {vocab:,}")
            _draw(ax, report, vocab)
        save_png(figure, path)


def _draw(ax: Axes, report: Report, vocab: int) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ends = []
    measured = [m for m in report.measurements if m.memory_bytes is not None or m.predicted_bytes is not None]
    for index, name in enumerate(dict.fromkeys(m.contender for m in measured)):
        mine = sorted((m for m in measured if m.contender == name and m.size.vocab == vocab), key=lambda m: m.size)
        points = [
            (m.size.rows, (m.memory_bytes or (m.predicted_bytes or 0) / report.world_size) / MIB, m.memory_bytes)
            for m in mine
        ]
        if not points:
            continue
        color = color_of(index)
        solid = [(rows, mib) for rows, mib, bytes_ in points if bytes_ is not None]
        ax.plot(*_columns([(rows, mib) for rows, mib, _ in points]), color=color, linestyle=(0, (4, 2)), linewidth=1.2)
        ax.plot(*_columns(solid), color=color, marker="o", markersize=4)
        hollow = [(rows, mib) for rows, mib, bytes_ in points if bytes_ is None]
        ax.plot(*_columns(hollow), "o", color=color, markersize=6, markerfacecolor="white")
        ends.append(EndLabel(y=points[-1][1], text=name, color=color))
    ax.set_xlabel("rows N")
    ax.set_ylabel("MiB")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(base=2))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.set_minor_formatter(NullFormatter())
    ax.tick_params(labelcolor=INK)
    label_ends(ax, ends)


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
