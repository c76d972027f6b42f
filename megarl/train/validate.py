"""Validate the current policy on its answers to held-out prompts, sampled and greedy."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megarl.cluster import residency
from megarl.config.schema import Config
from megarl.data.prompts import PromptDataset
from megarl.rewards.manager import RewardManager
from megarl.rollout.source import RolloutSource, SamplingPlan
from megarl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The result of a validation: its metrics, the score for `checkpoint.keep_best`, and a one-line summary."""

    metrics: Mapping[str, float]
    score: float | None
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Validator:
    """A measurement of a policy on validation prompts.

    enter: called with the phase before each generation, so that the engines are on their devices.
    """

    config: Config
    data: PromptDataset
    source: RolloutSource
    rewards: RewardManager
    enter: Callable[[residency.Phase], None]

    def validate(self, step: int) -> Validation:
        """Compute the mean score per data source, over the answers that could be judged.

        Metrics: `val/test_score/{data_source}` (sampled), `val/test_score_greedy/…` and `val/num_prompts/…`.
        """
        settings = self.config.validation
        count = min(len(self.data), settings.max_prompts or len(self.data))
        prompts = [self.data[i] for i in range(count)]
        sampled = self._mean_scores(prompts, step, greedy=False)
        metrics = {f"val/test_score/{name}": score for name, score in sampled.items()}
        for name in sampled:
            metrics[f"val/num_prompts/{name}"] = sum(p.data_source == name for p in prompts)
        summary = ", ".join(f"{name} {score:.3f}" for name, score in sampled.items())
        if settings.greedy:
            greedy = self._mean_scores(prompts, step, greedy=True)
            metrics |= {f"val/test_score_greedy/{name}": score for name, score in greedy.items()}
            summary += f" (greedy {', '.join(f'{score:.3f}' for score in greedy.values())})"
        prefix = f"{self.config.checkpoint.best_metric}/"
        scores = [value for name, value in metrics.items() if name.startswith(prefix)]
        return Validation(
            metrics=metrics,
            score=sum(scores) / len(scores) if scores else None,
            summary=f"validation on {count} prompts: {summary}",
        )

    def _mean_scores(self, prompts: Sequence[Prompt], step: int, *, greedy: bool) -> dict[str, float]:
        settings, rollout = self.config.validation, self.config.rollout
        plan = SamplingPlan(
            step=step,
            num_samples=1 if greedy else settings.num_samples,
            temperature=0.0 if greedy else settings.temperature,
            top_p=1.0,
            top_k=-1,
            max_response_tokens=rollout.max_response_tokens,
            run_seed=self.config.run.seed,
        )
        self.enter(residency.GENERATE)
        judging = self.rewards.begin()
        self.source.submit(prompts, plan)
        batch = self.source.collect(len(prompts), timeout_s=rollout.timeout_s, on_sample=judging.add)
        scores: dict[str, list[float]] = defaultdict(list)
        for sample, reward in zip(batch.samples, judging.finish(batch.samples).rewards, strict=True):
            if not reward.dropped:
                scores[batch.prompts[sample.uid].data_source].append(reward.score)
        return {name: sum(values) / len(values) for name, values in sorted(scores.items())}
