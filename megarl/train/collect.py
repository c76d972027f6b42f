"""Collect the samples of a step: take prompts in order, sample and judge a group for each, filter, refill.

With a filter (`algo.filter`), groups that carry no learning signal are removed, and up to `max_refills` further
batches of prompts are sampled to replace them. If too many groups pass the filter, the prompts of the surplus go first
in the next step, whose policy samples them again.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megarl.algos.advantages import GREEDY_SCORE, estimator_of
from megarl.algos.filters import filter_scores, group_metrics, kept_rows
from megarl.cluster import residency
from megarl.config.schema import Config
from megarl.data.prompts import PromptDataset
from megarl.data.sampler import Sampler
from megarl.errors import RunError
from megarl.record.metrics import Timers
from megarl.rewards.judge import Tally, tally_metrics
from megarl.rewards.manager import RewardManager
from megarl.rollout.prefixes import plan_prefixes
from megarl.rollout.replay import record_path, write_record
from megarl.rollout.source import RolloutSource, SamplingPlan
from megarl.types import DROPPED, Prompt, Reward, RolloutBatch, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The samples of complete groups with their rewards, in the same order, and metrics of the collection.

    A group lacks only those samples that nobody could judge.
    """

    rollout: RolloutBatch
    rewards: Sequence[Reward]
    metrics: Mapping[str, float] = field(default_factory=dict)


class PromptQueue:
    """A queue of prompt indices in the sampler's order; indices that were given back come first."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._waiting: list[int] = []

    def take(self, count: int, *, except_for: set[int]) -> list[int]:
        """Take the next `count` indices; those in `except_for` keep their place in the queue."""
        taken: list[int] = []
        passed: list[int] = []
        while len(taken) < count:
            if not self._waiting:
                self._waiting = self._sampler.next_batch()
            index = self._waiting.pop(0)
            (passed if index in except_for or index in taken else taken).append(index)
        self.give_back(passed)
        return taken

    def give_back(self, indices: Sequence[int]) -> None:
        """Put indices back at the front of the queue."""
        # Each once: a mixture draws the rows of a small file again and again while they wait.
        self._waiting = list(dict.fromkeys([*indices, *self._waiting]))

    def state_dict(self) -> dict[str, Any]:
        """Return the queue's state for a checkpoint: the sampler's state, and the indices that were given back."""
        return {"sampler": dict(self._sampler.state_dict()), "waiting": list(self._waiting)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the queue from what `state_dict` returned."""
        self._sampler.load_state_dict(state["sampler"])
        self._waiting = [int(index) for index in state["waiting"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The judged samples of one prompt that may train; `num_sampled` also counts those that nobody could judge."""

    index: int
    prompt: Prompt
    samples: tuple[Sample, ...]
    rewards: tuple[Reward, ...]
    num_sampled: int

    @property
    def is_judged(self) -> bool:
        """Return whether the group's rewards can be compared: a single reward would be its own baseline."""
        return len(self.samples) >= min(2, self.num_sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCollector:
    """The stage of a step that samples and judges `trainer.prompts_per_step` groups.

    prompts: indexed by what `queue` yields. eos_token_id: ends a demonstration that was not cut. records: the directory
    that takes each step's rollout if `rollout.record` is set. enter: called with the phase before each generation, so
    that the engines are on their devices.
    """

    config: Config
    queue: PromptQueue
    prompts: Sequence[Prompt] | PromptDataset
    source: RolloutSource
    rewards: RewardManager
    eos_token_id: int
    records: Path
    enter: Callable[[residency.Phase], None]
    timers: Timers
    # What was sampled in each of the latest steps that have no groups left, in words.
    skipped: list[str] = field(default_factory=list, init=False)

    def collect(self, step: int) -> Collected:
        """Collect a step's groups in the order of their prompts; fewer, or none, if the filter removed too many."""
        num_prompts, max_refills = self.config.trainer.prompts_per_step, self.config.algo.filter.max_refills
        sampled, tallies = self._sample(num_prompts, step, used=set())
        kept, judged = self._filtered(sampled)[0], [tallies]
        num_refills = 0
        while len(kept) < num_prompts and num_refills < max_refills:
            count = refill_count(num_prompts, num_kept=len(kept), num_sampled=len(sampled))
            count = min(count, len(self.prompts) - len(sampled))
            if count == 0:  # every prompt was asked
                break
            num_refills += 1
            more, tallies = self._sample(count, step, used={group.index for group in sampled})
            judged.append(tallies)
            sampled += more
            kept += self._filtered(more)[0]
        self._require_groups(sampled, kept)
        self.queue.give_back([group.index for group in kept[num_prompts:]])
        kept = kept[:num_prompts]
        return Collected(
            rollout=RolloutBatch(
                prompts={group.prompt.uid: group.prompt for group in kept},
                samples=tuple(sample for group in kept for sample in group.samples),
            ),
            rewards=[reward for group in kept for reward in group.rewards],
            # Group metrics count everything that was sampled and judged, removed or not.
            metrics=self._filtered(sampled)[1] | tally_metrics(judged) | {"filter/num_refills": float(num_refills)},
        )

    def _sample(self, count: int, step: int, *, used: set[int]) -> tuple[list[_Group], Mapping[str, Tally]]:
        """Sample and judge a group for each of the next `count` prompts, skipping those in `used`."""
        rollout, run_seed = self.config.rollout, self.config.run.seed
        has_greedy = estimator_of(self.config.algo).needs_greedy
        indices = self.queue.take(count, except_for=used)
        prompts = [self.prompts[index] for index in indices]
        judging = self.rewards.begin()
        with self.timers("gen"):
            prefixes = plan_prefixes(
                prompts,
                self.config.algo.demonstrations,
                step=step,
                num_samples=rollout.num_samples,
                run_seed=run_seed,
                eos_token_id=self.eos_token_id,
            )
            plan = SamplingPlan(
                step=step,
                num_samples=rollout.num_samples + has_greedy,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                max_response_tokens=rollout.max_response_tokens,
                run_seed=run_seed,
                stop=rollout.stop,
                stop_token_ids=rollout.stop_token_ids,
                prefixes=prefixes,
                last_is_greedy=has_greedy,
                with_nucleus=rollout.top_k != -1,
            )
            self.enter(residency.GENERATE)
            self.source.submit(prompts, plan)
            batch = self.source.collect(count, timeout_s=rollout.timeout_s, on_sample=judging.add)
            if rollout.record:
                write_record(record_path(self.records, step), batch)
        with self.timers("reward"):
            judged = judging.finish(batch.samples)
        by_uid: dict[str, list[tuple[Sample, Reward]]] = {prompt.uid: [] for prompt in prompts}
        for sample, reward in zip(batch.samples, judged.rewards, strict=True):
            by_uid[sample.uid].append((sample, reward))
        groups = []
        for index, prompt in zip(indices, prompts, strict=True):
            if has_greedy:
                by_uid[prompt.uid] = _with_greedy_score(by_uid[prompt.uid], rollout.num_samples)
            known = [(sample, reward) for sample, reward in by_uid[prompt.uid] if not reward.dropped]
            groups.append(
                _Group(
                    index=index,
                    prompt=prompt,
                    samples=tuple(sample for sample, _ in known),
                    rewards=tuple(reward for _, reward in known),
                    num_sampled=len(by_uid[prompt.uid]),
                )
            )
        return groups, judged.tallies

    def _require_groups(self, sampled: Sequence[_Group], kept: Sequence[_Group]) -> None:
        """Raise RunError if the latest `algo.filter.max_skipped_steps` steps, this one included, kept no group."""
        if kept:
            self.skipped.clear()
            return
        cfg = self.config.algo.filter
        means = [statistics.fmean(filter_scores(group.rewards, cfg)) for group in sampled if group.is_judged]
        spread = f", whose means of {cfg.by!r} are {min(means):g} to {max(means):g}" if means else ""
        unjudged = len(sampled) - len(means)
        self.skipped.append(f"{len(means)} judged groups{spread}, {unjudged} that could not be judged")
        if len(self.skipped) >= cfg.max_skipped_steps:
            bounds = f"mean_score={cfg.mean_score and list(cfg.mean_score)}, uniform_scores={list(cfg.uniform_scores)}"
            raise RunError(
                f"{len(self.skipped)} steps in a row had no group to train on. algo.filter (by={cfg.by}, {bounds}) saw "
                f"in the last of them {self.skipped[-1]}. Take prompts that are neither too easy nor too hard, more "
                "samples (rollout.num_samples), other bounds, or raise algo.filter.max_skipped_steps"
            )

    def _filtered(self, groups: Sequence[_Group]) -> tuple[list[_Group], dict[str, float]]:
        """Return the judged groups that pass the filter, and the metrics of all judged groups."""
        judged = [group for group in groups if group.is_judged]
        rows = [(s, r) for group in judged for s, r in zip(group.samples, group.rewards, strict=True)]
        uids = [sample.uid for sample, _ in rows]
        demonstrated = [sample.has_demonstration for sample, _ in rows]
        cfg = self.config.algo.filter
        keep = kept_rows(filter_scores([r for _, r in rows], cfg), uids, cfg, demonstrated=demonstrated)
        kept = {uid for uid, stays in zip(uids, keep, strict=True) if stays}
        metrics = group_metrics([r.correct for _, r in rows], uids, keep, demonstrated=demonstrated)
        return [group for group in judged if group.prompt.uid in kept], metrics


def _with_greedy_score(judged: Sequence[tuple[Sample, Reward]], greedy: int) -> list[tuple[Sample, Reward]]:
    """Return a group without its sample of index `greedy`, whose reward becomes a detail of the other rewards.

    If nobody could judge that sample, the others have nothing to be compared with, and are dropped.
    """
    (baseline,) = (reward for sample, reward in judged if sample.sample_index == greedy)
    return [
        (s, DROPPED if baseline.dropped else replace(r, details={**r.details, GREEDY_SCORE: baseline.score}))
        for s, r in judged
        if s.sample_index != greedy
    ]


def refill_count(num_wanted: int, *, num_kept: int, num_sampled: int) -> int:
    """Estimate how many prompts to sample next, from the pass rate so far; at most one batch."""
    missing = num_wanted - num_kept
    passed_frac = num_kept / num_sampled
    return num_wanted if passed_frac == 0 else min(num_wanted, math.ceil(missing / passed_frac))
