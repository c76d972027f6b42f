"""Write the results of the signal study: all areas as JSON, tables in Markdown, and a picture of the main ones."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure

from megarl.report.style import INK, figure_style, save_png
from megarl_lab.study.roc import Area
from megarl_lab.study.signal import SURPRISE, ModelResult, Signal
from megarl_lab.study.tables import markdown_table

# Columns of each model: shuffled baseline, answer left out.
VARIANTS = {"plain": (False, False), "shuffled": (True, False), "no answer": (False, True), "both": (True, True)}
SUMMARY_PLACE = "before_question"
MAIN_POSITIVE, MAIN_NEGATIVE = "step", "same rows"
CELL_INCHES = (0.62, 0.27)
# Areas within this distance of 0.5 have a pale colour, on which dark text stands out.
PALE = 0.28


def write_results(out: Path, results: Sequence[ModelResult]) -> list[Path]:
    """Write signal.json, signal.md and signal.png, and return their paths."""
    paths = [out / f"signal.{ending}" for ending in ("json", "md", "png")]
    paths[0].write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
    paths[1].write_text("\n".join(_markdown(results)) + "\n", encoding="utf-8")
    _draw(results, paths[2])
    return paths


def rows_of(results: Sequence[ModelResult]) -> dict[tuple[str, str], str]:
    """List the rows of a table, (place, estimator), with their titles; surprise, which needs no hint, is the last."""
    signals = [cell.signal for cell in results[0].cells]
    rows = {(s.place, s.estimator): f"{s.place}, {s.estimator}" for s in signals if s.place}
    return {**rows, ("", SURPRISE): "surprise, no hint"}


def areas_of(result: ModelResult, positive: str, negative: str) -> Mapping[Signal, Area | None]:
    """Return a model's areas by signal, against one kind of positive and negative tokens."""
    return {cell.signal: cell.area for cell in result.cells if (cell.positive, cell.negative) == (positive, negative)}


def _by_task(results: Sequence[ModelResult]) -> dict[str, list[ModelResult]]:
    return {task: [r for r in results if r.task == task] for task in dict.fromkeys(r.task for r in results)}


def _markdown(results: Sequence[ModelResult]) -> Iterator[str]:
    places = list(results[0].hinted_accuracy)
    head = ["task", "model", "steps", "right", "wrong", "mistake in the answer", "neither", "accuracy", *places]
    yield from markdown_table(
        head,
        (
            [
                *(r.task, r.model.name, str(r.model.steps), str(r.num_right), str(r.num_wrong)),
                *(str(r.num_in_answer), str(r.num_odd), f"{r.accuracy:.2f}"),
                *(f"{r.hinted_accuracy[place]:.2f}" for place in places),
            ]
            for r in results
        ),
    )
    yield f"\nHint before the question: {MAIN_POSITIVE} against {MAIN_NEGATIVE}, and plain against right rows\n"
    yield from markdown_table(["task", "model", "estimator", *VARIANTS, "right rows"], _summary(results))
    for task, models in _by_task(results).items():
        for positive, negative in dict.fromkeys((cell.positive, cell.negative) for cell in models[0].cells):
            yield f"\n{task}: {positive} against {negative}\n"
            areas = [areas_of(model, positive, negative) for model in models]
            columns = [(i, variant) for i in range(len(models)) for variant in VARIANTS]
            yield from markdown_table(
                ["place", "estimator", *(f"{models[i].model.name}, {variant}" for i, variant in columns)],
                (
                    [place or "none", estimator]
                    + [_text(_area(areas[i], (place, estimator), variant)) for i, variant in columns]
                    for place, estimator in rows_of(models)
                ),
            )


def _summary(results: Sequence[ModelResult]) -> Iterator[Sequence[str]]:
    for result in results:
        areas, others = (areas_of(result, MAIN_POSITIVE, negative) for negative in (MAIN_NEGATIVE, "right rows"))
        for row in rows_of([result]):
            if row[0] in (SUMMARY_PLACE, ""):
                texts = [_text(_area(areas, row, variant)) for variant in VARIANTS]
                yield [result.task, result.model.name, row[1], *texts, _text(_area(others, row, "plain"))]


def _area(areas: Mapping[Signal, Area | None], row: tuple[str, str], variant: str) -> Area | None:
    shuffled, excluded = VARIANTS[variant]
    return areas.get(Signal(place=row[0], estimator=row[1], shuffled=shuffled, excluded=excluded))


def _text(area: Area | None) -> str:
    if area is None:
        return ""
    return f"{area.value:.2f}" if area.std_error is None else f"{area.value:.2f} ± {area.std_error:.2f}"


def _draw(results: Sequence[ModelResult], path: Path) -> None:
    """Draw a heat map per task: a row per place and estimator, four columns per model."""
    tasks, rows = _by_task(results), list(rows_of(results).items())
    num_columns = max(map(len, tasks.values())) * len(VARIANTS)
    size = (num_columns * CELL_INCHES[0] + 2.6, len(tasks) * (len(rows) * CELL_INCHES[1] + 1.5) + 0.4)
    with figure_style():
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(
            "Area under the ROC curve of −signal: first mistake of wrong answers against what stands before it. "
            "0.5: no signal; below: reversed",
            x=0.012,
            ha="left",
            fontsize=11.5,
        )
        for ax, (task, models) in zip(figure.subplots(len(tasks), squeeze=False)[:, 0], tasks.items(), strict=True):
            areas = [areas_of(model, MAIN_POSITIVE, MAIN_NEGATIVE) for model in models]
            columns = [(i, variant) for i in range(len(models)) for variant in VARIANTS]
            cells = [[_area(areas[i], row, variant) for i, variant in columns] for row, _ in rows]
            values = [[float("nan") if cell is None else cell.value for cell in line] for line in cells]
            ax.imshow(values, cmap="RdBu", vmin=0, vmax=1, aspect="auto")
            for y, line in enumerate(values):
                for x, value in enumerate(line):
                    if value == value:
                        color = INK if abs(value - 0.5) < PALE else "white"
                        ax.text(x, y, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8)
            titles = [f"{m.model.name}, {m.model.steps} steps: {m.accuracy:.2f} right" for m in models]
            for i, title in enumerate(titles):
                ax.text((i + 0.5) * len(VARIANTS) - 0.5, -0.75, title, ha="center", va="bottom", color=INK)
            ax.set_title(task, pad=22)
            ax.set_xticks(range(len(columns)), [variant for _, variant in columns], rotation=30, ha="right")
            ax.set_yticks(range(len(rows)), [title for _, title in rows])
            ax.tick_params(length=0, labelcolor=INK)
            ax.grid(visible=False)
            for i in range(1, len(models)):
                ax.axvline(i * len(VARIANTS) - 0.5, color="white", linewidth=3)
        save_png(figure, path)
