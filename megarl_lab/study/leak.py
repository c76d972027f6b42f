"""Measure what policies over the steps of runs have taken from the hints that they were trained with."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.convert.commands import mcore_to_hf
from megarl.convert.engine import ConvertSettings
from megarl.report.run import Run, load_runs
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
