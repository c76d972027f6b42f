"""Format a comparison as text."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megarl.host.unicode import visible
from megarl.record.text_table import align
from megarl.report.run import Run
from megarl.report.style import INK, MUTED, color_of, figure_style, save_png
from megarl.report.summary import REWARD_EDGE_STEPS, SAMPLED, validation_curve
from megarl_lab.comparison.groups import Comparison, GroupResult
from megarl_lab.comparison.statistics import CLEAR_P_VALUE

MAX_COLUMNS = 3
PANEL_SIZE_INCHES = (2.9, 2.0)
SCORES_WIDTH_INCHES = 3.6
# The least height of the scores beside a single row of panels, and of one line among them.
MIN_HEIGHT_INCHES, SCORE_LINE_INCHES = 3.0, 0.36
TITLE_INCHES = 0.55
CURVES, BASELINE = color_of(0), MUTED

Points = Mapping[int, float]


def mean_curve(curves: Sequence[Points]) -> dict[int, float]:
    """Return the mean score by step, at the steps that every run has."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {step: math.fsum(curve[step] for curve in curves) / len(curves) for step in steps}


def write_comparison_png(comparison: Comparison, groups: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Draw the validation scores of all groups over steps, and every seed's final score beside them.

    Thin lines: seeds; thick: their mean; dashed grey: the baseline's mean.
    """
    curves = {
        name: [{point.step: point.score for point in validation_curve(run, SAMPLED)} for run in runs]
        for name, runs in groups.items()
    }
    num_columns = min(MAX_COLUMNS, len(curves))
    num_rows = -(-len(curves) // num_columns)
    panels = (num_columns * PANEL_SIZE_INCHES[0], num_rows * PANEL_SIZE_INCHES[1])
    height = max(panels[1], MIN_HEIGHT_INCHES, SCORE_LINE_INCHES * (len(curves) + 2))
    with figure_style():
        figure = Figure(figsize=(panels[0] + SCORES_WIDTH_INCHES, height + TITLE_INCHES), layout="constrained")
        figure.suptitle(
            f"Validation score by step. Thin: seeds, thick: their mean, dashed grey: mean of {comparison.baseline}",
            x=0.012,
            ha="left",
            fontsize=11.5,
        )
        left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(panels[0], SCORES_WIDTH_INCHES))[0]
        grid = left.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
        axes = list(grid.flat)
        for ax, group in zip(axes, comparison.groups, strict=False):
            _draw_curves(ax, group, curves[group.name], mean_curve(curves[comparison.baseline]))
        for column in range(num_columns):
            lowest = axes[column : len(curves) : num_columns][-1]
            lowest.set_xlabel("step")
            lowest.tick_params(labelbottom=True)
        for ax in axes[len(curves) :]:
            ax.remove()
        _draw_scores(right.add_subplot(), comparison)
        save_png(figure, path)


def _draw_curves(ax: Axes, group: GroupResult, curves: Sequence[Points], baseline: Points) -> None:
    ax.set_title(group.name)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    color = CURVES if group.difference else INK
    if group.difference:
        ax.plot(list(baseline), list(baseline.values()), color=BASELINE, linestyle=(0, (4, 2)), linewidth=1.4)
    for curve in curves:
        ax.plot(list(curve), list(curve.values()), color=color, alpha=0.45, linewidth=0.8)
    mean = mean_curve(curves)
    ax.plot(list(mean), list(mean.values()), color=color, linewidth=2.0)


def _draw_scores(ax: Axes, comparison: Comparison) -> None:
    """Draw the final scores: a dot per seed, a stroke at their mean, and whether the mean differs clearly."""
    ax.set_title("Final score")
    baseline = next(group for group in comparison.groups if group.difference is None)
    ax.axvline(baseline.after.mean, color=BASELINE, linestyle=(0, (4, 2)), linewidth=1.4, zorder=1)
    for row, group in enumerate(comparison.groups):
        color = CURVES if group.difference else INK
        ax.plot([run.after.score for run in group.runs], [row] * len(group.runs), "o", color=color, alpha=0.6, ms=5)
        ax.plot([group.after.mean], [row], "|", color=color, markersize=15, markeredgewidth=2.2)
    labels = [f"{group.name}\n{group.after.mean:.3f}, {group.verdict}" for group in comparison.groups]
    ax.set_yticks(range(len(labels)), labels)
    ax.tick_params(axis="y", length=0, labelcolor=INK)
    ax.set_ylim(len(comparison.groups) - 0.5, -0.5)
    ax.grid(visible=False, axis="y")
    ax.margins(x=0.08)


_NONE = "-"


def comparison_text(comparison: Comparison) -> str:
    """Return a table with a row per group, what its columns mean, and the notes of the comparison."""
    header = (
        "algorithm",
        "seeds",
        "before",
        "after",
        "sd",
        "min-max",
        "binomial",
        "reward",
        "mean |Δ|",
        "s/step",
        f"difference from {comparison.baseline}",
    )
    rows = [header, *(_row(group) for group in comparison.groups)]
    lines = [
        *align(rows, left=(0, len(header) - 1)),
        "",
        *_legend(comparison),
        *(visible(f"note: {note}") for note in comparison.notes),
    ]
    return "\n".join(lines)


def _row(group: GroupResult) -> tuple[str, ...]:
    return (
        group.name,
        str(len(group.runs)),
        _number(None if group.before is None else group.before.mean),
        _number(group.after.mean),
        _number(group.after.std),
        f"{group.after.min:.3f}-{group.after.max:.3f}" if group.after.count > 1 else _NONE,
        _number(group.binomial_std_error),
        _number(group.reward),
        _number(group.mismatch_nats, ".1e"),
        _number(group.step_s, ".2f"),
        _difference(group),
    )


def _number(value: float | None, form: str = ".3f") -> str:
    return _NONE if value is None else format(value, form)


def _difference(group: GroupResult) -> str:
    found = group.difference
    if found is None:
        return group.verdict
    error = "" if found.std_error is None else f" ± {found.std_error:.3f}"
    p_value = "" if group.adjusted_p is None else f", p {group.adjusted_p:.2g}"
    least = "" if found.least is None else f", clear from {found.least:.3f}"
    return f"{found.mean:+.3f}{error}{p_value}: {group.verdict}{least}"


def _legend(comparison: Comparison) -> list[str]:
    num_tests = sum(group.adjusted_p is not None for group in comparison.groups)
    lines = [
        "before, after: mean validation score over seeds; sd, min-max: of `after`, over seeds",
        "binomial: standard error of one run's score from the number of validation answers alone, √(p(1−p)/n)",
        f"reward: mean training reward of the last {REWARD_EDGE_STEPS} steps; mean |Δ|: engine against trainer, nats",
    ]
    over, test = ("pairs of one seed", "paired t-test") if comparison.paired else ("seeds", "Welch's t-test")
    if num_tests:
        lines += [
            f"difference: of `after`, ± its standard error over {over}; p: {test}, Holm-corrected for "
            f"{num_tests} comparison(s), clear below {CLEAR_P_VALUE:g}",
            "a difference within noise may still exist: few seeds show large differences only",
            "clear from: the smallest difference that this spread would have shown, in a single comparison",
        ]
    return lines
