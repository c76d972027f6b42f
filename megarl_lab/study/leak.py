"""Measure what policies over the steps of runs have taken from the hints that they were trained with, and write the
results: all numbers as JSON, those of the last step in Markdown, curves as a picture.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from megarl.convert.commands import mcore_to_hf
from megarl.convert.engine import ConvertSettings
from megarl.report.run import Run, load_runs
from megarl.report.style import INK, color_of, figure_style, save_png
from megarl_lab.comparison.statistics import Spread, spread_of
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import held_out_problems
from megarl_lab.study.hinted import HINTS, LocalModel

# Where the tiny model's demonstrations have their hints, and runs on built-in tasks too.
PLACE = "before_question"
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakStudy:
    """These are the held-out problems that policies answer, the same ones for all."""

    task: str
    num_prompts: int
    num_samples: int
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Behavior:
    """This is what a policy does with held-out problems; means over no answers are None.

    Attributes:
        score: share of right answers, of all that were sampled without a hint.
        unworked: share of complete answers whose steps do not lead to the target, as if it were known.
        copied: share of right answers that are unworked or have a wrong step: a right answer that does not follow.
        answer_gain_right, answer_gain_wrong: mean change of the log-prob by the hint on tokens of the final answer.
        step_gain_right, step_gain_wrong: the same on all other tokens.
        hinted_score: share of right answers, of those that were sampled with the hint.
        hinted_unworked: share of unworked answers with the hint.
    """

    score: float
    unworked: float | None
    copied: float | None
    answer_gain_right: float | None
    answer_gain_wrong: float | None
    step_gain_right: float | None
    step_gain_wrong: float | None
    hinted_score: float
    hinted_unworked: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """This is the policy of a run after a step."""

    name: str
    seed: int
    step: int
    behavior: Behavior


def measure(study: LeakStudy, run_dirs: Sequence[Path], models: Path) -> list[Policy]:
    """Measure every policy of the runs, with a line for each; converted checkpoints are kept under `models`."""
    policies: list[Policy] = []
    behaviors: dict[Path, Behavior] = {}
    for run, run_dir in zip(load_runs(run_dirs), run_dirs, strict=True):
        for step, path in _models(run, run_dir, models):
            # Runs have the model in common that they began with.
            if path not in behaviors:
                behaviors[path] = measure_behavior(study, LocalModel(path))
            found = behaviors[path]
            print(f"{run.label} step {step}: score {found.score:.3f}, hinted {found.hinted_score:.3f}", flush=True)
            name, seed = str(run.config["run"]["name"]).rpartition("-seed")[0], int(run.config["run"]["seed"])
            policies.append(Policy(name=name, seed=seed, step=step, behavior=found))
    return policies


def _models(run: Run, run_dir: Path, out: Path) -> Iterator[tuple[int, Path]]:
    """Yield steps and Hugging Face directories: the model that the run began with, then its checkpoints."""
    start = Path(run.config["model"]["path"])
    yield 0, start
    for checkpoint in sorted(run_dir.glob("checkpoints/step_*")):
        path = out / f"{run.label}-{checkpoint.name}"
        if not path.is_dir():
            mcore_to_hf(checkpoint / "actor", ConvertSettings(out=path, num_workers=1), model=start)
        yield int(checkpoint.name.removeprefix("step_")), path


def measure_behavior(study: LeakStudy, model: LocalModel) -> Behavior:
    """Sample answers without and with a hint, and score the former with it."""
    task, rng = TASKS.get(study.task), random.Random(f"leak/{study.task}/{study.seed}")
    problems = held_out_problems(task, rng, task.rl_mix, study.num_prompts)
    prompts = model.pose(problems)
    sampling = {"num_samples": study.num_samples, "max_tokens": MAX_TOKENS, "seed": study.seed}
    hinted = [prompt.token_ids.tolist() for prompt in model.hint(prompts, HINTS[PLACE]).values()]
    answers = model.sample(task, problems, [prompt.token_ids for prompt in prompts], **sampling)
    with_hint = model.sample(task, problems, hinted, **sampling)
    inputs = model.hint_inputs(answers, prompts, HINTS[PLACE], seed=study.seed)
    gains = (inputs.need("hint_logprobs") - inputs.need("old_logprobs")).numpy()
    num_sampled = study.num_prompts * study.num_samples

    def gain(*, correct: bool, in_answer: bool) -> float | None:
        return _mean(
            value
            for answer, row in zip(answers, gains, strict=True)
            if answer.correct == correct
            for value in row[: len(answer.token_ids)][answer.answer_span == in_answer]
        )

    return Behavior(
        score=sum(answer.correct for answer in answers) / num_sampled,
        unworked=_mean(not answer.read.worked for answer in answers),
        copied=_mean(not answer.read.worked or answer.read.mistake is not None for answer in answers if answer.correct),
        answer_gain_right=gain(correct=True, in_answer=True),
        answer_gain_wrong=gain(correct=False, in_answer=True),
        step_gain_right=gain(correct=True, in_answer=False),
        step_gain_wrong=gain(correct=False, in_answer=False),
        hinted_score=sum(answer.correct for answer in with_hint) / num_sampled,
        hinted_unworked=_mean(not answer.read.worked for answer in with_hint),
    )


def _mean(values: Iterable[float]) -> float | None:
    found = [float(value) for value in values]
    return float(np.mean(found)) if found else None


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
