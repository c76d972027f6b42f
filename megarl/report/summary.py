"""Compute the numbers a report leads with: validation before and after, their standard errors, and the headline."""

import math
from dataclasses import dataclass

from megarl.report.run import Run, Series

SAMPLED = "val/test_score/"
GREEDY = "val/test_score_greedy/"
NUM_PROMPTS = "val/num_prompts/"
# Scores of supervised runs, best first, and how the headline of their report begins.
SUPERVISED = {
    "val/reward_model/accuracy": "Share of held-out pairs that the reward model puts in order",
    "val/preference/accuracy": "Share of held-out pairs whose chosen response the policy prefers",
    "val/sft/nll": "Cross-entropy of held-out rows in nats per token",
    "reward_model/accuracy": "Share of pairs of training batches that the reward model puts in order",
    "preference/accuracy": "Share of pairs of training batches whose chosen response the policy prefers",
    "sft/nll": "Cross-entropy of training batches in nats per token",
}

# Below this many standard errors a change of the validation score is called no clear change.
CLEAR_CHANGE_STD_ERRORS = 2.0
# A report says so if this share of all responses was cut.
MANY_CUT = 0.95
# Steps at either end whose mean reward is quoted when a run has no validation.
REWARD_EDGE_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanScore:
    """A mean score over `num_prompts` prompts (None: not logged)."""

    step: int
    score: float
    num_prompts: int | None

    @property
    def std_error(self) -> float | None:
        """Return sqrt(p (1 - p) / n); None if n is unknown or the score is outside [0, 1].

        For scores of 0 and 1, p is Laplace's estimate (n · score + 1) / (n + 2), since few prompts prove neither.
        """
        if not self.num_prompts or not 0.0 <= self.score <= 1.0:
            return None
        n, share = self.num_prompts, self.score
        if share in (0.0, 1.0):
            share = (n * share + 1) / (n + 2)
        return math.sqrt(share * (1.0 - share) / n)

    def __str__(self) -> str:
        return f"{self.score:.3f}" if self.std_error is None else f"{self.score:.3f} ± {self.std_error:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Validation scores before and after training; `before` is that of step 0, or else the first that was measured."""

    before: MeanScore
    after: MeanScore

    @property
    def gain(self) -> float:
        return self.after.score - self.before.score

    @property
    def gain_std_error(self) -> float | None:
        """Return the standard error of after − before, as if both had been measured on independent prompts."""
        before, after = self.before.std_error, self.after.std_error
        return None if before is None or after is None else math.hypot(before, after)

    @property
    def gain_text(self) -> str:
        error = self.gain_std_error
        return f"{self.gain:+.3f}" if error is None else f"{self.gain:+.3f} ± {error:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A run's result in one sentence, and the details that do not fit into it."""

    sentence: str
    details: tuple[str, ...]


def data_sources(run: Run) -> list[str]:
    return sorted({*run.under(SAMPLED), *run.under(GREEDY)})


def validation_curve(run: Run, prefix: str, data_source: str | None = None) -> list[MeanScore]:
    """Return the validation scores over steps, of one data source or of all pooled.

    Scores are pooled by numbers of prompts, or equally if these are unknown.

    Pooled points exist only at steps that measured every source.
    """
    scores = run.under(prefix)
    chosen = sorted(scores) if data_source is None else [name for name in (data_source,) if name in scores]
    if not chosen:
        return []
    by_source = [_by_step(scores[name]) for name in chosen]
    counts = [_by_step(run.get(NUM_PROMPTS + name)) for name in chosen]
    steps = sorted(set.intersection(*(set(points) for points in by_source)))
    return [_pool(step, [p[step] for p in by_source], [c.get(step) for c in counts]) for step in steps]


def _by_step(series: Series) -> dict[int, float]:
    return dict(zip(series.steps, series.values, strict=True))


def _pool(step: int, scores: list[float], counts: list[float | None]) -> MeanScore:
    known = [count for count in counts if count]
    if len(known) < len(counts):
        return MeanScore(step=step, score=sum(scores) / len(scores), num_prompts=None)
    total = sum(known)
    score = sum(s * n for s, n in zip(scores, known, strict=True)) / total
    return MeanScore(step=step, score=score, num_prompts=round(total))


def validation_change(run: Run, prefix: str, data_source: str | None = None) -> Change | None:
    """Compare the first with the last validation; return None if there are fewer than two."""
    curve = validation_curve(run, prefix, data_source)
    return Change(before=curve[0], after=curve[-1]) if len(curve) > 1 else None


def format_duration(seconds: float) -> str:
    """Format a duration as `42 s`, `34 min` or `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def headline(run: Run) -> Headline:
    """Summarize a run: its validation score before and after RL, or without validation its training reward."""
    total = run.config.get("trainer", {}).get("total_steps")
    is_partial = isinstance(total, int) and run.last_step < total
    steps = f"{run.last_step} of {total} steps" if is_partial else f"{run.last_step} steps"
    duration = f"{steps} in {format_duration(run.elapsed_s)}"
    if (cut := run.get("response_length/clip_ratio").values) and sum(cut) / len(cut) >= MANY_CUT:
        duration += f"; {sum(cut) / len(cut):.0%} of the responses were cut at rollout.max_response_tokens"
    change = validation_change(run, SAMPLED)
    for metric, sentence in SUPERVISED.items():
        if series := run.get(metric):
            first, last = (f"{series.values[i]:.3f} after step {series.steps[i]}" for i in (0, -1))
            length = f"{run.last_step} steps in {format_duration(run.elapsed_s)}"
            return Headline(sentence=f"{sentence}: {last} ({first}).", details=(length,))
    if change is None:
        return Headline(sentence=_reward_sentence(run), details=(duration,))
    names, count = sorted(run.under(SAMPLED)), change.after.num_prompts
    where = names[0] if len(names) == 1 else f"{len(names)} data sources"
    details = [duration, f"validated on {where if count is None else f'{count} prompts of {where}'}"]
    greedy = validation_change(run, GREEDY)
    if greedy is not None:
        details.append(f"greedy decoding: {greedy.before} → {greedy.after}")
    if change.gain_std_error is not None:
        details.append("± is one standard error, √(p(1−p)/n)")
    is_clear = abs(change.gain) > CLEAR_CHANGE_STD_ERRORS * (change.gain_std_error or 0.0)
    verb = ("rose" if change.gain > 0 else "fell") if is_clear else "did not clearly change:"
    before = "before RL" if change.before.step == 0 else f"at step {change.before.step}"
    sentence = (
        f"Validation score {verb} from {change.before} {before} to {change.after} "
        f"after {change.after.step} steps ({change.gain:+.3f})."
    )
    return Headline(sentence=sentence, details=tuple(details))


def _reward_sentence(run: Run) -> str:
    rewards = run.get("critic/score/mean").values
    measured = validation_curve(run, SAMPLED)
    validated = "".join(f"Validation score {p} at step {p.step}, not measured again. " for p in measured)
    if not rewards:
        return validated + ("No training step has finished yet." if run.last_step == 0 else "No reward was logged.")
    if len(rewards) < 2 * REWARD_EDGE_STEPS:
        return f"{validated}Mean training reward: {sum(rewards) / len(rewards):.3f} over {len(rewards)} step(s)."
    first, last = rewards[:REWARD_EDGE_STEPS], rewards[-REWARD_EDGE_STEPS:]
    return (
        f"{validated}Mean training reward: {sum(first) / len(first):.3f} over the first {len(first)} steps, "
        f"{sum(last) / len(last):.3f} over the last {len(last)}."
    )
