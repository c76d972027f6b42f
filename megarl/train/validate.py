"""Validate the current policy on its answers to held-out prompts, sampled and greedy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cluster import offloading
from megarl.config.generation import Sampling
from megarl.config.schema import RolloutConfig, ValidationConfig
from megarl.data.prompts import PromptDataset
from megarl.record.metrics import iterate_metrics
from megarl.record.rollouts import JudgedAnswer, SourceResult, results_by_source, write_answers
from megarl.rewards.manager import RewardManager
from megarl.rollout.source import Group, RolloutSource, SamplingPlan, Wait, begin, collect
from megarl.train.outcome import FAILURES, all_failed_error
from megarl.types import Prompt, Sample
from megarl.types.judged import Trouble

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def score_of(metrics: Mapping[str, float], metric: str) -> float | None:
    """Return the mean of a metric over data sources; None if there is none."""
    scores = [value for name, value in metrics.items() if name.startswith(f"{metric}/")]
    return sum(scores) / len(scores) if scores else None


def has_collapsed(path: Path, metric: str, count: int | None) -> bool:
    """Return whether the last `count` validations in a file of metrics score 0, and one before scores more."""
    if count is None:
        return False
    found = (score_of(record.metrics, metric) for record in iterate_metrics(path))
    scores = [score for score in found if score is not None]
    return any(scores[:-count]) and not any(scores[-count:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The result of a validation: its metrics, the score for `checkpoint.keep_best`, a one-line summary, and the
    answers that judges could not judge or read.
    """

    metrics: Mapping[str, float]
    score: float | None
    summary: str
    troubles: Sequence[Trouble] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Validator:
    """Validates the policy on held-out prompts, with the same estimates as `megarl eval`.

    total_steps: after the last one, a validation ends whatever a signal asks for. stop_token_ids: what ends an answer.
    answers: returns the file that takes the answers of a step. enter: called with the phase before each generation, so
    that the engines are on their devices. compare: returns metrics of samples beside the teacher's distribution; None:
    the run has no teacher.
    """

    settings: ValidationConfig
    rollout: RolloutConfig
    best_metric: str
    run_seed: int
    total_steps: int
    data: PromptDataset
    tokenizer: "PreTrainedTokenizerBase"
    stop_token_ids: tuple[int, ...]
    source: RolloutSource
    wait: Wait
    rewards: RewardManager
    answers: Callable[[int], Path]
    enter: Callable[[offloading.Phase], None]
    compare: Callable[..., Mapping[str, float]] | None = None

    def validate(self, step: int) -> Validation:
        """Answer the prompts and estimate accuracy, over the answers that could be judged.

        Metrics by data source are those of `validation_metrics`. All answers are written to the step's file. Raises
        SamplingStopped if a signal asks for a stop before the last step.
        """
        settings = self.settings
        count = min(len(self.data), settings.max_prompts or len(self.data))
        prompts = [self.data[i] for i in range(count)]
        samples, answers, troubles = self._answers(prompts, step, greedy=False)
        if settings.greedy:
            _, greedy_answers, more = self._answers(prompts, step, greedy=True)
            answers, troubles = [*answers, *greedy_answers], [*troubles, *more]
        write_answers(self.answers(step), answers)
        total = count * (settings.num_samples + settings.greedy)
        if step == 0 and not answers:
            raise all_failed_error(
                "validation at step 0", total, [each for each in troubles if each.outcome in FAILURES]
            )
        results = results_by_source(answers, settings.pass_at)
        metrics = {name: value for result in results for name, value in validation_metrics(result).items()}
        if self.compare is not None:
            metrics |= self.compare(samples, {prompt.uid: prompt for prompt in prompts}, step=step)
        summary = ", ".join(f"{result.data_source} {result.avg:.3f}" for result in results)
        if settings.greedy:
            greedy = (result.greedy for result in results if result.greedy is not None)
            summary += f" (greedy {', '.join(f'{score:.3f}' for score in greedy)})"
        unjudged = (
            f", but {total - len(answers)} of {total} answers could not be judged" if len(answers) < total else ""
        )
        return Validation(
            metrics=metrics,
            score=score_of(metrics, self.best_metric),
            summary=f"validation on {count} prompts: {summary}{unjudged}",
            troubles=troubles,
        )

    def _answers(
        self, prompts: Sequence[Prompt], step: int, *, greedy: bool
    ) -> tuple[Sequence[Sample], list[JudgedAnswer], Sequence[Trouble]]:
        """Sample and judge answers, and return them, as samples too, with the troubles of their judges."""
        settings, rollout = self.settings, self.rollout
        sampling = Sampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop=rollout.stop,
            stop_token_ids=self.stop_token_ids,
        )
        plan = SamplingPlan(
            step=step,
            num_samples=1 if greedy else settings.num_samples,
            sampling=sampling.greedy() if greedy else sampling,
            max_response_tokens=settings.max_response_tokens or rollout.max_response_tokens,
            run_seed=self.run_seed,
        )
        self.enter(offloading.GENERATE)
        judging = self.rewards.begin()
        groups = [Group(prompt=prompt, plan=plan, judging=judging) for prompt in prompts]
        begin(self.source, groups)
        may_stop = 0 < step < self.total_steps
        batch = collect(self.wait, groups, timeout_s=rollout.timeout_s, may_stop=may_stop)
        judged = self.rewards.finish([judging], batch.samples)
        answers = [
            JudgedAnswer.of(batch.prompts[sample.uid], sample, reward, greedy=greedy, tokenizer=self.tokenizer)
            for sample, reward in zip(batch.samples, judged.rewards, strict=True)
            if not reward.dropped
        ]
        return batch.samples, answers, judged.troubles


def validation_metrics(result: SourceResult) -> dict[str, float]:
    """Return the metrics `val/…/{data source}` of one data source.

    test_score: share of correct answers (avg@n), with test_score_std_error over prompts; test_score_greedy: the same of
    greedy answers; pass@k, maj@n; reward, response_length and truncated_frac: means over sampled answers; of
    conversations turns and tool_calls, too; num_prompts.
    """
    values = {
        "val/test_score": result.avg,
        "val/test_score_std_error": result.avg_std_error,
        "val/test_score_greedy": result.greedy,
        **{f"val/pass@{k}": value for k, value in result.pass_at.items()},
        f"val/maj@{result.num_samples}": result.maj,
        "val/reward": result.reward,
        "val/response_length": result.response_tokens,
        "val/truncated_frac": result.truncated_frac,
        "val/turns": result.turns,
        "val/tool_calls": result.tool_calls,
        "val/num_prompts": float(result.num_prompts),
    }
    return {f"{name}/{result.data_source}": value for name, value in values.items() if value is not None}
