"""Render the HTML page: put numbers, tables and examples into the template, also of samples that judges could not judge
or read.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from markupsafe import Markup

from megarl.record.metrics import summarize
from megarl.record.problems import ProblemRecord
from megarl.report.figures import available_panels, panel_svg, timeline_svg, timeline_windows
from megarl.report.html import render_html, visible_text
from megarl.report.rollouts import Verdicts
from megarl.report.run import Run
from megarl.report.step import StepExplanation, explain
from megarl.report.step_figure import step_svg
from megarl.report.style import PALETTE
from megarl.report.summary import (
    GREEDY,
    SAMPLED,
    Change,
    data_sources,
    format_duration,
    headline,
    validation_change,
)
from megarl.report.template import PAGE, STYLE

NUM_EXAMPLES = 2
# Metrics of shares → what their samples have in common.
_SHARES = {
    r"reward/parse_failed_frac": "no answer was found",
    r"reward/timeout_frac": "judging took too long",
    r"reward/crashed_frac": "the judge's process died",
    r"reward/failed_frac": "a function raised an exception",
    r"reward/(?P<judge>.+)/unread_frac": "no verdict was found in what {judge} said",
    r"reward/(?P<judge>.+)/unjudged_frac": "{judge} gave no verdict",
    r"reward/dropped_frac": "dropped, does not train",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRow:
    """A row of the table of shares: a metric, and its mean over the run and value at the last step, as percentages."""

    name: str
    metric: str
    mean: str
    last: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemExample:
    """A sample that was not judged or not read, in the form in which the page shows it."""

    record: ProblemRecord
    response: Markup
    output: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemGroup:
    """Examples of one kind of problem, under a title that counts what was recorded of this kind."""

    title: str
    examples: tuple[ProblemExample, ...]


def problem_shares(run: Run) -> list[ShareRow]:
    """Return a row for each share that was ever above 0."""
    rows = []
    for pattern, words in _SHARES.items():
        for metric, series in sorted(run.series.items()):
            found = re.fullmatch(pattern, metric)
            if found is not None and any(series.values):
                mean = sum(series.values) / len(series.values)
                rows.append(
                    ShareRow(
                        name=words.format(**found.groupdict()),
                        metric=metric,
                        mean=f"{mean:.2%}",
                        last=f"{series.values[-1]:.2%}",
                    )
                )
    return rows


def problem_groups(run: Run) -> Iterator[ProblemGroup]:
    """Yield the latest examples of each kind of problem, of different reasons as far as there are enough."""
    kinds: dict[tuple[str, str], list[ProblemRecord]] = defaultdict(list)
    for record in run.problems:
        kinds[record.judge, record.outcome].append(record)
    for (judge, outcome), records in sorted(kinds.items()):
        latest = list({record.reason: record for record in records}.values())[-NUM_EXAMPLES:]
        latest = latest if len(latest) == NUM_EXAMPLES else records[-NUM_EXAMPLES:]
        yield ProblemGroup(
            title=f"{judge}: {outcome.replace('_', ' ')}, {len(records)} recorded",
            examples=tuple(
                ProblemExample(record=each, response=visible_text(each.response), output=visible_text(each.output))
                for each in reversed(latest)
            ),
        )


# A reader asks first for these: configuration key → words. Keys a run does not have are left out.
KEY_SETTINGS = {
    "model.path": "model",
    "model.dtype": "precision",
    "algo.name": "algorithm",
    "algo.advantage.estimator": "advantage estimator",
    "algo.policy_loss.name": "policy loss",
    "algo.kl.where": "KL to the reference",
    "algo.aggregation": "loss aggregation",
    "actor.optimizer.lr": "learning rate",
    "actor.layout.tp": "tensor parallel size",
    "actor.layout.dp": "data parallel size",
    "actor.layout.sequence_parallel": "sequence parallel",
    "trainer.total_steps": "total steps",
    "trainer.prompts_per_step": "prompts per step",
    "trainer.mini_batch_prompts": "prompts per optimizer step",
    "rollout.num_samples": "samples per prompt",
    "rollout.temperature": "sampling temperature",
    "rollout.max_response_tokens": "response limit (tokens)",
    "data.train": "training prompts",
    "data.val": "validation prompts",
    "run.seed": "seed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFigure:
    """An inline figure of the page."""

    svg: Markup
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """A row of a validation table."""

    name: str
    decoding: str
    change: Change
    series: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """A row of the table of recorded samples: a phase and step, with a link to its samples in the rollout browser."""

    verdicts: Verdicts
    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """A row of the table of metrics: the first, last, mean and extreme values of a metric."""

    name: str
    values: tuple[str, ...]


def render_page(runs: Sequence[Run], verdicts: Sequence[Verdicts]) -> str:
    """Render the report of `runs[0]`, compared with the other runs, as HTML.

    verdicts: those on its samples that the rollout browser shows.
    """
    run = runs[0]
    settings = dict(flatten(run.config))
    windows = timeline_windows(run.timeline)
    explained = last_explained(run)
    return render_html(
        PAGE,
        title=f"{run.label} · megarl report",
        style=STYLE,
        num_colors=len(PALETTE),
        runs=runs,
        run=run,
        headline=headline(run),
        change=validation_change(run, SAMPLED),
        elapsed=format_duration(run.elapsed_s),
        comparison=comparison_rows(runs) if len(runs) > 1 else [],
        scores=score_rows(run),
        figures=[PageFigure(svg=Markup(panel_svg(p, runs)), caption=p.caption) for p in available_panels(runs)],
        timeline=Markup(timeline_svg(windows)) if windows else None,
        explained=explained,
        step_figure=None if explained is None else Markup(step_svg(explained)),
        rollouts=rollout_rows(verdicts),
        num_samples=sum(each.num_samples for each in verdicts),
        problem_shares=problem_shares(run),
        problems=list(problem_groups(run)),
        key_settings=[(label, settings[key]) for key, label in KEY_SETTINGS.items() if key in settings],
        settings=settings,
        versions=run.versions,
        metrics=metric_rows(run),
    )


def last_explained(run: Run) -> StepExplanation | None:
    """Explain the last training step of which samples were recorded; None without one."""
    records = run.last_rollouts or run.first_rollouts
    if not records or "timing_s/step" not in run.values_at(records[0].step):
        return None
    return explain(run, records[0].step, records)


def flatten(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested sections as dotted keys with text values; lists are joined by commas, null is "none"."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}", ", ".join(map(str, value)) or "none"
        else:
            yield f"{prefix}{key}", "none" if value is None or value == "" else str(value)


def score_rows(run: Run) -> list[ScoreRow]:
    """Return the validation scores before and after training, per data source and decoding."""
    rows = []
    for index, source in enumerate(data_sources(run)):
        for decoding, prefix in (("sampled", SAMPLED), ("greedy", GREEDY)):
            change = validation_change(run, prefix, source)
            if change is not None:
                rows.append(ScoreRow(name=source, decoding=decoding, change=change, series=index))
    return rows


def comparison_rows(runs: Sequence[Run]) -> list[ScoreRow]:
    """Return each run's scores before and after training, data sources pooled.

    A run that was validated fewer than two times is left out.
    """
    rows = []
    for index, run in enumerate(runs):
        change = validation_change(run, SAMPLED)
        if change is not None:
            rows.append(ScoreRow(name=run.label, decoding="sampled", change=change, series=index))
    return rows


def rollout_rows(verdicts: Sequence[Verdicts]) -> list[RolloutRow]:
    """Return a row for the first and the last step of each phase of which samples were recorded."""
    rows = []
    for phase in dict.fromkeys(each.phase for each in verdicts):
        steps = [each for each in verdicts if each.phase == phase]
        for each in dict.fromkeys((steps[0], steps[-1])):
            step = {"step_min": each.step, "step_max": each.step}
            rows.append(RolloutRow(verdicts=each, link=urlencode({"in_phase": phase, **step})))
    return rows


def metric_rows(run: Run) -> list[MetricRow]:
    """Return a table line for every metric, sorted by name."""
    rows = []
    for name, series in sorted(run.series.items()):
        summary = summarize(series.values)
        numbers = (series.values[0], series.values[-1], summary.mean, summary.min, summary.max)
        rows.append(MetricRow(name=name, values=tuple(f"{number:.4g}" for number in numbers)))
    return rows
