"""Write the results of the leak study: all numbers as JSON, those of the last step in Markdown, curves as a picture."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from matplotlib.figure import Figure

from megarl.report.style import INK, color_of, figure_style, save_png
from megarl_lab.comparison.statistics import Spread, spread_of
from megarl_lab.study.leak import Behavior, Policy

# Measures, and what they say in a panel's title.
PANELS = {
    "score": "Score without the hint",
    "hinted_score": "Score with the hint",
    "unworked": "Answers without the steps to them",
    "copied": "Right answers that do not follow",
    "answer_gain_right": "Gain on right final answers, nats",
    "answer_gain_wrong": "Gain on wrong final answers, nats",
}
NUM_COLUMNS, PANEL_INCHES = 2, (5.2, 2.9)
STYLES = ("-", "--", ":")


def write_results(out: Path, policies: Sequence[Policy]) -> list[Path]:
    """Write leak.json, leak.md and leak.png, and return their paths."""
    paths = [out / f"leak.{ending}" for ending in ("json", "md", "png")]
    paths[0].write_text(json.dumps([asdict(policy) for policy in policies], indent=1) + "\n", encoding="utf-8")
    paths[1].write_text("\n".join(_markdown(policies)) + "\n", encoding="utf-8")
    _draw(policies, paths[2])
    return paths


def _spreads(policies: Sequence[Policy], name: str, measure: str) -> dict[int, Spread]:
    """Return a measure's spread over seeds by step; steps at which it is undefined are left out."""
    found: dict[int, list[float]] = {}
    for policy in policies:
        value = getattr(policy.behavior, measure)
        if policy.name == name and value is not None:
            found.setdefault(policy.step, []).append(value)
    return {step: spread_of(values) for step, values in sorted(found.items())}


def _markdown(policies: Sequence[Policy]) -> Iterator[str]:
    """Write a row for the model that all began with, and one for the last step of each algorithm."""
    measures = [field.name for field in fields(Behavior)]
    names = list(dict.fromkeys(policy.name for policy in policies))
    first = [policy for policy in policies if policy.step == 0][:1]

    def row(title: str, step: int, rows: Sequence[Policy], name: str) -> list[str]:
        spreads = [_spreads(rows, name, measure).get(step) for measure in measures]
        return [title, str(step), str(sum((p.name, p.step) == (name, step) for p in rows)), *map(_text, spreads)]

    steps = {name: max(policy.step for policy in policies if policy.name == name) for name in names}
    begun = [row("before", 0, first, policy.name) for policy in first]
    ended = (row(name, steps[name], policies, name) for name in names)
    head = ["algorithm", "step", "seeds", *measures]
    for each in (head, ["---"] * len(head), *begun, *ended):
        yield f"| {' | '.join(each)} |"


def _text(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.mean:.3f}" if spread.std is None else f"{spread.mean:.3f} ± {spread.std:.3f}"


def _draw(policies: Sequence[Policy], path: Path) -> None:
    """Draw a panel per measure, with a line per algorithm, the mean over its seeds."""
    names = list(dict.fromkeys(policy.name for policy in policies))
    num_rows = -(-len(PANELS) // NUM_COLUMNS)
    with figure_style():
        figure = Figure(figsize=(NUM_COLUMNS * PANEL_INCHES[0], num_rows * PANEL_INCHES[1] + 0.6), layout="constrained")
        axes = figure.subplots(num_rows, NUM_COLUMNS, sharex=True, squeeze=False)
        for ax, (measure, title) in zip(axes.flat, PANELS.items(), strict=False):
            ax.set_title(title)
            if not title.endswith("nats"):
                # Shares: on a scale of their own, noise would look like news.
                ax.set_ylim(-0.02, 1.02)
            for i, name in enumerate(names):
                spreads = _spreads(policies, name, measure)
                ax.plot(
                    list(spreads),
                    [spread.mean for spread in spreads.values()],
                    color=color_of(i),
                    linestyle=STYLES[i // 4 % len(STYLES)],
                    label=name,
                )
        for ax in axes[-1]:
            ax.set_xlabel("step")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, labelcolor=INK)
        save_png(figure, path)
