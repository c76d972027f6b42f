"""Measure the signal of hints: the area under the ROC curve of each against the first mistakes of wrong answers."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megarl.algos.cpo import CpoInputs
from megarl.algos.cpo.information import MI_ESTIMATORS
from megarl.config import from_dict
from megarl.config.load import read_yaml
from megarl.errors import ConfigError
from megarl.run.evaluation.hint_signal import mutual_information
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import held_out_problems
from megarl_lab.study.hinted import HINTS, LocalModel, SampledAnswer
from megarl_lab.study.roc import Area, Floats, area_under_roc
from megarl_lab.study.warm_starts import WarmStart, warm_model

# A signal that needs no hint: how unlikely the policy itself found the token.
SURPRISE = "surprise"
# Where a token of an answer stands.
RIGHT_ROW, EARLIER, FIRST, STEP, LATER = range(5)
POSITIVE = {"step": (FIRST, STEP), "first token": (FIRST,)}
NEGATIVE = {"same rows": (EARLIER,), "right rows": (RIGHT_ROW,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStudy:
    """This is a task of a study and the models that are tried on it."""

    task: str
    warm_starts: tuple[WarmStart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalStudy:
    """This is the content of a study file. num_draws: bootstrap samples behind each standard error."""

    dir: str
    tasks: tuple[TaskStudy, ...]
    seed: int = 0
    num_prompts: int = 256
    num_samples: int = 4
    max_tokens: int = 64
    num_draws: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """This is one way to measure what a hint tells: an estimator, the hint's place, a baseline, and tokens left out.

    place: empty for `SURPRISE`, which has no hint.
    """

    place: str
    estimator: str
    shuffled: bool
    excluded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalArea:
    """This is the area of one signal against one kind of positive and negative tokens; None if a kind is missing."""

    signal: Signal
    positive: str
    negative: str
    area: Area | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """This is what a study found of one model.

    Attributes:
        num_odd: right answers with wrong steps, and wrong ones without; neither kind is counted further.
        num_in_answer: wrong answers whose first mistake is in the final answer.
        hinted_accuracy: by place of the hint; it says whether the model makes use of a hint there.
    """

    task: str
    model: WarmStart
    num_answers: int
    num_right: int
    num_wrong: int
    num_odd: int
    num_in_answer: int
    accuracy: float
    hinted_accuracy: dict[str, float]
    cells: tuple[SignalArea, ...]


def load_signal_study(path: Path) -> SignalStudy:
    """Read a study file. An unknown key, task or type raises a ConfigError that names the file."""
    try:
        study = from_dict(SignalStudy, read_yaml(path))
        for task in study.tasks:
            TASKS.get(task.task)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return study


def measure(study: SignalStudy) -> list[ModelResult]:
    """Measure every model of the study, and print a line for each."""
    results = []
    for task_study in study.tasks:
        for start in task_study.warm_starts:
            path = warm_model(Path(study.dir) / task_study.task, task_study.task, start, seed=study.seed)
            result = measure_model(study, task_study.task, start, LocalModel(path))
            hinted = ", ".join(f"{place} {value:.2f}" for place, value in result.hinted_accuracy.items())
            print(f"{result.task} {start.name}: accuracy {result.accuracy:.2f}, with hint {hinted}", flush=True)
            results.append(result)
    return results


def measure_model(study: SignalStudy, task_name: str, start: WarmStart, model: LocalModel) -> ModelResult:
    """Sample a model's answers to held-out problems without a hint, and measure every signal on them."""
    task, rng = TASKS.get(task_name), random.Random(f"signal/{task_name}/{study.seed}")
    problems = held_out_problems(task, rng, task.rl_mix, study.num_prompts)
    prompts = model.pose(problems)
    sampling = {"max_tokens": study.max_tokens, "seed": study.seed}
    plain = [prompt.token_ids for prompt in prompts]
    sampled = model.sample(task, problems, plain, num_samples=study.num_samples, **sampling)
    answers = [answer for answer in sampled if answer.correct == (answer.mistake is None)]
    hinted_accuracy: dict[str, float] = {}
    cells: list[SignalArea] = []
    for place, cfg in HINTS.items():
        hinted = model.hint(prompts, cfg).values()
        with_hint = model.sample(task, problems, [h.token_ids.tolist() for h in hinted], num_samples=1, **sampling)
        hinted_accuracy[place] = sum(answer.correct for answer in with_hint) / study.num_prompts
        inputs = model.hint_inputs(answers, prompts, cfg, seed=study.seed)
        if not cells:
            surprise = Signal(place="", estimator=SURPRISE, shuffled=False, excluded=False)
            cells += cells_of(study, answers, [(surprise, -inputs.need("old_logprobs"))])
        cells += cells_of(study, answers, signals_of(place, inputs))
    right = [answer for answer in answers if answer.correct]
    wrong = [answer for answer in answers if not answer.correct]
    return ModelResult(
        task=task_name,
        model=start,
        num_answers=len(sampled),
        num_right=len(right),
        num_wrong=len(wrong),
        num_odd=len(sampled) - len(answers),
        num_in_answer=sum(bool(answer.answer_span[answer.mistake].any()) for answer in wrong),
        accuracy=sum(answer.correct for answer in sampled) / (study.num_prompts * study.num_samples),
        hinted_accuracy=hinted_accuracy,
        cells=tuple(cells),
    )


def signals_of(place: str, inputs: CpoInputs) -> Iterator[tuple[Signal, Tensor]]:
    """Yield −MI [B, T] by every estimator, as CPO computes it, against both baselines."""
    for estimator in MI_ESTIMATORS:
        for shuffled in (False, True):
            if shuffled and MI_ESTIMATORS.get(estimator).uses_hint_kl:
                continue  # which is not a difference of log-probs
            signal = Signal(place=place, estimator=estimator, shuffled=shuffled, excluded=False)
            yield signal, -mutual_information(inputs, estimator, shuffled_baseline=shuffled)


def cells_of(
    study: SignalStudy, answers: Sequence[SampledAnswer], signals: Iterable[tuple[Signal, Tensor]]
) -> Iterator[SignalArea]:
    """Compute the areas of signals [B, T] on all tokens, and on those outside of final answers."""
    kinds = np.concatenate([token_kinds(answer) for answer in answers])
    groups = np.concatenate([np.full(len(answer.token_ids), answer.group) for answer in answers])
    outside = ~np.concatenate([answer.answer_span for answer in answers])
    for signal, values in signals:
        rows = [row[: len(answer.token_ids)] for row, answer in zip(values, answers, strict=True)]
        scores: Floats = torch.cat(rows).double().numpy()
        for excluded in (False, True):
            for positive, wanted in POSITIVE.items():
                for negative, others in NEGATIVE.items():
                    kept = np.isin(kinds, (*wanted, *others)) & (outside | (not excluded))
                    yield SignalArea(
                        signal=replace(signal, excluded=excluded),
                        positive=positive,
                        negative=negative,
                        area=area_under_roc(
                            scores[kept],
                            np.isin(kinds, wanted)[kept],
                            groups[kept],
                            num_draws=study.num_draws,
                            seed=study.seed,
                        ),
                    )


def token_kinds(answer: SampledAnswer) -> np.ndarray:
    """Tell where each token stands: in a right row, or before, in and after the first mistake of a wrong one."""
    if answer.mistake is None:
        return np.full(len(answer.token_ids), RIGHT_ROW)
    kinds = np.full(len(answer.token_ids), LATER)
    kinds[: answer.mistake.start] = EARLIER
    kinds[answer.mistake] = STEP
    if answer.answer_span[answer.mistake.start]:
        # The end of a wrong answer, such as its tag, is not wrong.
        kinds[answer.mistake] = np.where(answer.answer_span[answer.mistake], STEP, LATER)
    kinds[answer.mistake.start] = FIRST
    return kinds
