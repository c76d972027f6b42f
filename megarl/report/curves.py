"""Draw the curves of a report. Each function draws one run, or several for comparison, into axes that the caller
gives.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from megarl.record.episodes import FAILURES
from megarl.report.learning_curve import LearningCurve, curve_of, samples_per_step
from megarl.report.run import Run, Series
from megarl.report.style import MUTED, EndLabel, color_of, label_ends, use_log_scale
from megarl.report.summary import GREEDY, SAMPLED, MeanScore, data_sources, validation_curve

# The moving mean spans this share of the run, within these bounds: a fast change must stay visible.
SMOOTHING_FRAC = 0.1
MIN_SMOOTHING_STEPS, MAX_SMOOTHING_STEPS = 3, 25
# More areas or dots than these cannot be told apart, and take seconds and megabytes.
MAX_SHOWN = 1000
# Longer names of data sources are cut on the plot: they would narrow it.
MAX_LABEL_CHARS = 18
# Phases in the order of a step; others follow by name. Phases below the share are summed as "other".
PHASES = ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "sync", "testing")
MIN_PHASE_FRAC = 0.02
# Shown in the panel of mismatches; all are non-negative, so a log axis can hold them.
MISMATCH_NAMES = {"mismatch/abs_max": "max |Δ|", "mismatch/abs_mean": "mean |Δ|", "mismatch/k3": "k3"}
MISMATCH_NAMES |= {"canary/max_abs_diff": "canary"}


def smooth(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Compute the centred moving mean of values; at both ends the window is cut off."""
    share = round(SMOOTHING_FRAC * len(values))
    half = min(max(share, MIN_SMOOTHING_STEPS), MAX_SMOOTHING_STEPS) // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first, end = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (total[end] - total[first]) / (end - first)


def _plot_smoothed(ax: Axes, series: Series, color: str, label: str = "_nolegend_") -> None:
    """Plot every step faintly and the moving mean on top; a lone step becomes a dot."""
    ax.plot(series.steps, series.values, color=color, alpha=0.35, linewidth=0.9, label=f"_{label.lstrip('_')}")
    marker = "o" if len(series.steps) == 1 else ""
    ax.plot(series.steps, smooth(series.values), color=color, marker=marker, label=label)


def draw_reward(ax: Axes, runs: Sequence[Run]) -> None:
    for index, run in enumerate(runs):
        series = run.get("critic/score/mean")
        if series:
            _plot_smoothed(ax, series, color_of(index), run.label)
    if len(runs) > 1:
        ax.legend(loc="best")


def draw_by_layer(ax: Axes, runs: Sequence[Run], prefix: str) -> None:
    """Draw a line for each layer's metric, and name those whose last values are least and largest."""
    labels = []
    for index, run in enumerate(runs):
        found = [(each.values[-1], name, each) for name, each in run.series.items() if name.startswith(prefix)]
        for _, _, series in found:
            marker = "o" if len(series.steps) == 1 else ""
            ax.plot(series.steps, series.values, color=color_of(index), alpha=0.35, linewidth=0.9, marker=marker)
        ends = {name: value for value, name, _ in (min(found), max(found))} if found else {}
        labels += [EndLabel(value, name.removeprefix(prefix), color_of(index)) for name, value in ends.items()]
    # Where no step had a gradient, all are zero.
    if any(value > 0 for line in ax.lines for value in np.asarray(line.get_ydata())):
        use_log_scale(ax, "mask")
    label_ends(ax, labels)


def draw_validation(ax: Axes, runs: Sequence[Run]) -> None:
    """Draw validation scores: one run in a colour per data source, several in a colour per run, sources pooled."""
    if len(runs) > 1:
        for index, run in enumerate(runs):
            _draw_score(ax, run, None, color_of(index), run.label)
        ax.legend(loc="best")
        return
    sources = data_sources(runs[0])
    if len(sources) == 1:
        label_ends(ax, _draw_score(ax, runs[0], sources[0], color_of(0), ""))
        return
    labels = []
    for index, source in enumerate(sources):
        first, *_ = _draw_score(ax, runs[0], source, color_of(index), source)
        text = source if len(source) <= MAX_LABEL_CHARS else source[: MAX_LABEL_CHARS - 1] + "…"
        labels.append(first._replace(text=text))
    label_ends(ax, labels)


def _draw_score(ax: Axes, run: Run, source: str | None, color: str, label: str) -> list[EndLabel]:
    """Draw the scores of sampled and of greedy answers; return a label for each line drawn, the sampled one first."""
    labels = []
    sampled, greedy = validation_curve(run, SAMPLED, source), validation_curve(run, GREEDY, source)
    if sampled:
        _plot_estimates(ax, sampled, color, "-", label or "_sampled")
        labels.append(EndLabel(sampled[-1].score, "sampled", color))
        if all(point.std_error is not None for point in sampled):
            scores = np.array([point.score for point in sampled])
            errors = np.array([point.std_error for point in sampled])
            steps = [point.step for point in sampled]
            ax.fill_between(steps, scores - errors, scores + errors, color=color, alpha=0.18, linewidth=0)
    if greedy:
        _plot_estimates(ax, greedy, color, "--", f"_{label} greedy" if sampled else label or "_greedy")
        labels.append(EndLabel(greedy[-1].score, "greedy", color))
    return labels


def _plot_estimates(ax: Axes, points: Sequence[MeanScore], color: str, style: str, label: str) -> None:
    steps, scores = [point.step for point in points], [point.score for point in points]
    ax.plot(steps, scores, style, color=color, marker="o", markersize=3.5, label=label)


def draw_learning_curves(ax: Axes, runs: Sequence[Run]) -> None:
    """Draw the curves fitted to all validations with sampled answers."""
    draw_fits(ax, runs, [curve_of(run) for run in runs], SAMPLED)


def draw_fits(ax: Axes, runs: Sequence[Run], curves: Sequence[LearningCurve | None], prefix: str) -> None:
    """Draw fitted curves up to twice the samples of each run, with their 90 % bands and the validations as dots.

    Validations under `prefix` that were not fitted, as they came later, are hollow.
    """
    for index, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        if curve is None:
            continue
        color = color_of(index)
        ax.plot(curve.at, curve.median, color=color, label=f"{run.label}: {curve.advice}")
        ax.fill_between(curve.at, curve.low, curve.high, color=color, alpha=0.18, linewidth=0)
        ax.plot(curve.samples, curve.scores, "o", color=color, markersize=3.5, label="_validation")
        later = validation_curve(run, prefix)[len(curve.samples) :]
        places = [point.step * (samples_per_step(run) or 0) for point in later]
        ax.plot(places, [p.score for p in later], "o", color=color, mfc="none", markersize=3.5, label="_not fitted")
    ax.legend(loc="best")


def draw_spread(ax: Axes, runs: Sequence[Run], *, prefix: str) -> None:
    """Draw the mean of a quantity of the first run, and a band from its least to its most."""
    run, color = runs[0], color_of(0)
    mean, low, high = (run.get(f"{prefix}/{name}") for name in ("mean", "min", "max"))
    _plot_smoothed(ax, mean, color)
    labels = [EndLabel(mean.values[-1], "mean", color)]
    if low and high and low.steps == high.steps:
        # The least and the most of each part of a long run look the same as all values.
        starts = list(range(0, len(low.steps), -(-len(low.steps) // MAX_SHOWN)))
        bottom, top = np.minimum.reduceat(low.values, starts), np.maximum.reduceat(high.values, starts)
        ax.fill_between([low.steps[i] for i in starts], bottom, top, color=color, alpha=0.15, linewidth=0)
        labels += [EndLabel(low.values[-1], "min", MUTED), EndLabel(high.values[-1], "max", MUTED)]
    ax.set_ylim(bottom=0)
    label_ends(ax, labels)


def draw_mismatch(ax: Axes, runs: Sequence[Run]) -> None:
    labels = []
    for index, (name, text) in enumerate(MISMATCH_NAMES.items()):
        series = runs[0].get(name)
        positive = [value for value in series.values if value > 0]
        if positive:
            # Dots, because a step between two exact zeros has no line on a log axis.
            every = -(-len(series.steps) // MAX_SHOWN)
            ax.plot(
                series.steps,
                series.values,
                color=color_of(index),
                marker=".",
                markevery=every,
                markersize=3,
                linewidth=1.2,
            )
            labels.append(EndLabel(positive[-1], text, color_of(index)))
    if labels:
        use_log_scale(ax, "mask")
        label_ends(ax, labels)
    else:
        ax.set_axis_off()
        ax.text(0.5, 0.5, "zero at every step", transform=ax.transAxes, ha="center", color=MUTED)


def draw_line(ax: Axes, runs: Sequence[Run], *, metric: str) -> None:
    """Draw one metric of the first run."""
    _plot_smoothed(ax, runs[0].get(metric), color_of(0))


def draw_good_and_bad(ax: Axes, runs: Sequence[Run], *, prefix: str, good: str = "right", bad: str = "wrong") -> None:
    """Draw two metrics of the first run: a prefix followed by the name of the good rows, and by that of the bad."""
    labels = []
    for rows, color in ((good, color_of(2)), (bad, color_of(1))):
        if series := runs[0].get(f"{prefix}_{rows}"):
            _plot_smoothed(ax, series, color)
            labels.append(EndLabel(series.values[-1], rows, color))
    ax.axhline(0, color=MUTED, linewidth=0.8)
    label_ends(ax, labels)


def draw_advantage_changes(ax: Axes, runs: Sequence[Run]) -> None:
    """Draw a histogram of how advantages of the recorded tokens were changed, for the first and the last recorded
    step.
    """
    for index, rows in enumerate(rows for rows in (runs[0].first_rollouts, runs[0].last_rollouts) if rows):
        pairs = (zip(row.base_advantage, row.advantage, strict=True) for row in rows)
        changes = [after - before for pair in pairs for before, after in pair]
        if changes:
            ax.hist(changes, bins=40, density=True, alpha=0.55, color=color_of(index), label=f"step {rows[0].step}")
    use_log_scale(ax, "clip")
    if ax.patches:
        ax.legend(loc="best")


def draw_with_held_out(ax: Axes, runs: Sequence[Run], *, metric: str, top: float | None = None) -> None:
    """Draw a training metric of the first run, and the same on held-out data as dots."""
    _plot_smoothed(ax, runs[0].get(metric), color_of(0))
    if held_out := runs[0].get(f"val/{metric}"):
        ax.plot(held_out.steps, held_out.values, "o", color=color_of(1), markersize=3.5, label="_held out")
        label_ends(ax, [EndLabel(held_out.values[-1], "held out", color_of(1))])
    if top is not None:
        ax.set_ylim(0, top)


def draw_time(ax: Axes, runs: Sequence[Run]) -> None:
    steps, phases = time_per_phase(runs[0])
    colors = [MUTED if name == "other" else color_of(index) for index, name in enumerate(phases)]
    _stack(ax, steps, {f"{name}  {np.mean(values):.2g} s": values for name, values in phases.items()}, colors)


def draw_lags(ax: Axes, runs: Sequence[Run]) -> None:
    """Draw the shares of tokens by lag, the freshest tokens at the bottom."""
    shares = runs[0].under("staleness/frac_lag_")
    steps, columns = _columns({lag: shares[lag] for lag in sorted(shares, key=int)})
    labelled = {f"lag {int(lag)}  {np.mean(values):.0%}": values for lag, values in columns.items()}
    _stack(ax, steps, labelled, [color_of(index) for index in range(len(columns))])


def _stack(
    ax: Axes,
    steps: Sequence[int],
    columns: Mapping[str, npt.NDArray[np.float64]],
    colors: Sequence[str],
    title: str = "mean per step",
) -> None:
    """Draw columns, one value per step each, as areas on top of one another, with their names on the right.

    The areas of more than `MAX_SHOWN` steps are means over as many equal parts.
    """
    end = steps[-1] + 0.5
    if (width := -(-len(steps) // MAX_SHOWN)) > 1:
        starts = list(range(0, len(steps), width))
        counts = np.diff([*starts, len(steps)])
        columns = {name: np.add.reduceat(values, starts) / counts for name, values in columns.items()}
        steps = [steps[start] for start in starts]
    # A step fills the interval around its number; the last value is repeated as the right edge.
    edges = [step - 0.5 for step in steps] + [end]
    heights = [np.append(values, values[-1]) for values in columns.values()]
    for name, values in columns.items():
        # Not seen, but told under the pointer.
        ax.plot(steps, values, linestyle="none", label=f"_{name.partition('  ')[0]}")
    ax.stackplot(edges, *heights, colors=colors, labels=list(columns), step="post", linewidth=0, alpha=0.9)
    ax.set_ylim(bottom=0)
    handles, texts = ax.get_legend_handles_labels()
    legend = ax.legend(handles[::-1], texts[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), alignment="left")
    legend.set_title(title)


def time_per_phase(run: Run) -> tuple[list[int], dict[str, npt.NDArray[np.float64]]]:
    """Return the steps with recorded times, and the seconds that each phase took in each of these steps.

    Small phases, and the part of a step's time that belongs to no phase, are summed as "other".
    """
    timings = {"step": Series(), **run.under("timing_s/")}
    steps, columns = _columns({name: timings[name] for name in phase_order(timings)})
    whole = columns.pop("step")
    claimed = np.sum(list(columns.values()), axis=0) if columns else np.zeros(len(steps))
    total = np.maximum(whole, claimed)
    shown = {name: column for name, column in columns.items() if column.sum() >= MIN_PHASE_FRAC * total.sum()}
    other = total - sum(shown.values(), start=np.zeros(len(steps)))
    if other.sum() >= MIN_PHASE_FRAC * total.sum():
        shown["other"] = other
    return steps, shown


def phase_order(names: Iterable[str]) -> list[str]:
    """Sort names of phases by the order in which a step runs them; others follow by name."""
    return sorted(names, key=lambda name: (PHASES.index(name) if name in PHASES else len(PHASES), name))


def draw_failures(ax: Axes, runs: Sequence[Run]) -> None:
    """Draw the numbers of conversations that failed, by the kind of failure, on top of one another."""
    kinds = {kind: runs[0].get(f"environment/{kind}") for kind in FAILURES}
    steps, columns = _columns({f"{kind}  {sum(series.values):.0f}": series for kind, series in kinds.items()})
    _stack(ax, steps, columns, [color_of(index) for index in range(len(columns))], title="in all steps")


def draw_idle(ax: Axes, runs: Sequence[Run]) -> None:
    labels = []
    for index, side in enumerate(("trainer", "engine")):
        if series := runs[0].get(f"perf/{side}_idle_frac"):
            _plot_smoothed(ax, series, color_of(index))
            labels.append(EndLabel(series.values[-1], side, color_of(index)))
    ax.set_ylim(0, 1.02)
    label_ends(ax, labels)


def _columns(series: Mapping[str, Series]) -> tuple[list[int], dict[str, npt.NDArray[np.float64]]]:
    """Return the steps of all series, and the values of each at these steps, 0 where it has none."""
    steps = sorted({step for each in series.values() for step in each.steps})
    found = {name: dict(zip(each.steps, each.values, strict=True)) for name, each in series.items()}
    return steps, {name: np.array([values.get(step, 0.0) for step in steps]) for name, values in found.items()}
