"""Render the HTML page: put numbers, tables and examples into the template."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from megarl.record.answers import Answer
from megarl.record.metrics import RolloutRecord, summarize
from megarl.report.examples import (
    FULL_GAIN,
    FULL_SURPRISE,
    Response,
    gain_text,
    is_right,
    pick_examples,
    surprise_text,
    visible_text,
)
from megarl.report.figures import available_panels, panel_svg
from megarl.report.problems import problem_group, problem_kinds, problem_shares
from megarl.report.run import Run
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
from megarl.report.timeline import timeline_svg, timeline_windows
from megarl.types import SegmentSource

# What a reader asks first of a run: configuration key → words. Keys a run does not have are left out.
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
class Figure:
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
class Part:
    """A part of a response with one author; `is_read`: the policy only read it."""

    label: str
    text: Markup
    is_read: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A response, in the form in which the page shows it."""

    row: RolloutRecord | Answer
    is_right: bool
    prompt: Markup
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleGroup:
    """Examples of the responses of a step or a validation, under a title that counts the right ones."""

    title: str
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """A row of the table of metrics: the first, last, mean and extreme values of a metric."""

    name: str
    values: tuple[str, ...]


def render_page(runs: Sequence[Run]) -> str:
    """Render the report of `runs[0]`, compared with the other runs, as HTML."""
    run = runs[0]
    settings = dict(flatten(run.config))
    windows = timeline_windows(run.timeline)
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(PAGE)
    return template.render(
        style=Markup(STYLE),
        num_colors=len(PALETTE),
        runs=runs,
        run=run,
        headline=headline(run),
        change=validation_change(run, SAMPLED),
        elapsed=format_duration(run.elapsed_s),
        comparison=comparison_rows(runs) if len(runs) > 1 else [],
        scores=score_rows(run),
        figures=[Figure(svg=Markup(panel_svg(p, runs)), caption=p.caption) for p in available_panels(runs)],
        timeline=Markup(timeline_svg(windows)) if windows else None,
        examples=[
            *(example_group(f"Step {rows[0].step}", rows) for rows in (run.first_rollouts, run.last_rollouts) if rows),
            *([example_group("Last validation", run.answers)] if run.answers else []),
        ],
        problem_shares=problem_shares(run),
        problems=[problem_group(*kind) for kind in problem_kinds(run)],
        full_gain=FULL_GAIN,
        full_surprise=FULL_SURPRISE,
        has_gains=any(row.tokens for row in (*run.first_rollouts, *run.last_rollouts)),
        has_turns=any(bool(row.turns) for rows in (run.first_rollouts, run.last_rollouts, run.answers) for row in rows),
        key_settings=[(label, settings[key]) for key, label in KEY_SETTINGS.items() if key in settings],
        settings=settings,
        versions=run.versions,
        metrics=metric_rows(run),
    )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
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


def example_group(name: str, rows: Sequence[Response]) -> ExampleGroup:
    """Pick right and wrong responses, and count the right ones among all recorded rows."""
    examples = tuple(
        Example(
            row=row,
            is_right=is_right(row),
            prompt=visible_text(row.prompt),
            parts=tuple(_conversation(row)) if row.turns else (Part(label="response", text=_response(row)),),
        )
        for row in pick_examples(rows)
    )
    num_right = sum(is_right(row) for row in rows)
    return ExampleGroup(title=f"{name}: {num_right} of {len(rows)} recorded responses right", examples=examples)


def _response(row: RolloutRecord | Answer, start: int = 0, end: int | None = None) -> Markup:
    """Return a response, or these tokens of it, coloured by the gain of the tokens if the run recorded a hint's."""
    if isinstance(row, Answer) or not row.tokens:
        return visible_text(row.response)
    part = slice(start, end)
    pairs = zip(row.base_advantage[part], row.advantage[part], strict=True)
    notes = [f"advantage {before:+.3f} → {after:+.3f}" for before, after in pairs]
    return gain_text(row.tokens[part], row.hint_gain[part], notes)


def _conversation(row: RolloutRecord | Answer) -> Iterator[Part]:
    """Yield the parts of a conversation. What trains is coloured by a hint's gain or else by log-prob, if the run
    recorded either.
    """
    number, end = 0, 0
    for turn in row.turns:
        start, end = end, end + len(turn.tokens)
        if turn.is_read:
            text = visible_text(turn.text.strip("\n"))
            yield Part(label="environment: read, not trained on", text=text, is_read=True)
            continue
        number += turn.author == SegmentSource.POLICY
        label = f"policy, turn {number}" if turn.author == SegmentSource.POLICY else turn.author
        text = surprise_text(turn.tokens, turn.logprobs) if turn.tokens else visible_text(turn.text)
        if isinstance(row, RolloutRecord) and row.tokens:
            text = _response(row, start, end)
        yield Part(label=f"{label}, reward {turn.reward:+.3g}" if turn.reward else label, text=text)


def metric_rows(run: Run) -> list[MetricRow]:
    """Return a table line for every metric, sorted by name."""
    rows = []
    for name, series in sorted(run.series.items()):
        summary = summarize(series.values)
        numbers = (series.values[0], series.values[-1], summary.mean, summary.min, summary.max)
        rows.append(MetricRow(name=name, values=tuple(f"{number:.4g}" for number in numbers)))
    return rows
