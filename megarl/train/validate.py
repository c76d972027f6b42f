"""Validation: the current policy's answers to held-out prompts, sampled and greedy."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megarl.config.schema import Config
from megarl.data.prompts import PromptDataset
from megarl.rewards.manager import RewardManager
from megarl.rollout.source import RolloutSource, SamplingPlan
from megarl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """`val/test_score/{data_source}` (sampled), `val/test_score_greedy/…`, `val/num_prompts/…`; and one line of it."""

    metrics: dict[str, float]
    summary: str


def validate(
    config: Config,
    data: PromptDataset,
    source: RolloutSource,
    rewards: RewardManager,
    *,
    step: int,
    before: Callable[[], None] = lambda: None,
) -> ValidationResult:
    """Mean score by data source over the validation prompts, of the answers that could be judged.

    `before` is called before each generation.
    """
    ask = partial(_mean_scores, config, source=source, rewards=rewards, step=step, before=before)
    count = min(len(data), config.validation.max_prompts or len(data))
    prompts = [data[i] for i in range(count)]
    sampled = ask(prompts, greedy=False)
    metrics = {f"val/test_score/{name}": score for name, score in sampled.items()}
    for name in sampled:
        metrics[f"val/num_prompts/{name}"] = sum(p.data_source == name for p in prompts)
    summary = ", ".join(f"{name} {score:.3f}" for name, score in sampled.items())
    if config.validation.greedy:
        greedy = ask(prompts, greedy=True)
        metrics |= {f"val/test_score_greedy/{name}": score for name, score in greedy.items()}
        summary += f" (greedy {', '.join(f'{score:.3f}' for score in greedy.values())})"
    return ValidationResult(metrics=metrics, summary=f"validation on {count} prompts: {summary}")


def _mean_scores(
    config: Config,
    prompts: Sequence[Prompt],
    *,
    source: RolloutSource,
    rewards: RewardManager,
    step: int,
    before: Callable[[], None],
    greedy: bool,
) -> dict[str, float]:
    plan = SamplingPlan(
        step=step,
        num_samples=1 if greedy else config.validation.num_samples,
        temperature=0.0 if greedy else config.validation.temperature,
        top_p=1.0,
        top_k=-1,
        max_response_tokens=config.rollout.max_response_tokens,
        run_seed=config.run.seed,
    )
    before()
    judging = rewards.begin()
    source.submit(prompts, plan)
    batch = source.collect(len(prompts), timeout_s=config.rollout.timeout_s, on_sample=judging.add)
    scores: dict[str, list[float]] = defaultdict(list)
    for sample, reward in zip(batch.samples, judging.finish(batch.samples).rewards, strict=True):
        if not reward.dropped:
            scores[batch.prompts[sample.uid].data_source].append(reward.score)
    return {name: sum(values) / len(values) for name, values in sorted(scores.items())}
