"""The samples that a step trains on: prompts in their order, groups sampled and judged, refilled where a filter asks.

With a filter (`algo.filter`) groups that teach nothing are removed. Up to `max_refills` further batches of prompts
then replace them. Prompts whose groups passed but found no place are the first of the next step: they are sampled
anew, by the policy of that step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megarl.algos.filters import group_metrics, kept_rows
from megarl.config.algo import FilterConfig
from megarl.data.prompts import PromptDataset
from megarl.data.sampler import Sampler
from megarl.record.metrics import Timers
from megarl.rewards.judge import Judged, Tally, tally_metrics
from megarl.rollout.source import OnSample
from megarl.types import Prompt, Reward, RolloutBatch, Sample

# Samples a group for every prompt in a step, and tells of each sample as soon as it is finished.
Generate = Callable[[Sequence[Prompt], int, OnSample], RolloutBatch]


class Judging(Protocol):
    """Judges the samples of one batch, which it is told of as they finish."""

    def add(self, prompt: Prompt, sample: Sample) -> None: ...

    def finish(self, samples: Sequence[Sample]) -> Judged: ...


class Rewards(Protocol):
    """Who judges: `megarl.rewards.RewardManager`."""

    def begin(self) -> Judging: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Samples with their rewards in the same order, in groups that lack only what nobody could judge, and how they
    were found.
    """

    rollout: RolloutBatch
    rewards: Sequence[Reward]
    metrics: Mapping[str, float] = field(default_factory=dict)


class PromptQueue:
    """Indices of prompts in the sampler's order, those that were given back first."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._waiting: list[int] = []

    def take(self, count: int, *, except_for: set[int]) -> list[int]:
        """The next `count` indices; those of `except_for` keep their place."""
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
        """Take these first next time."""
        # Each once: a mixture draws the rows of a small file again and again while they wait.
        self._waiting = list(dict.fromkeys([*indices, *self._waiting]))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: the sampler's state, and the indices that wait."""
        return {"sampler": dict(self._sampler.state_dict()), "waiting": list(self._waiting)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state["sampler"])
        self._waiting = [int(index) for index in state["waiting"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The samples of one prompt, without those that nobody could judge, and how many there were."""

    index: int
    prompt: Prompt
    samples: tuple[Sample, ...]
    rewards: tuple[Reward, ...]
    num_sampled: int

    @property
    def is_judged(self) -> bool:
        """Whether its rewards can be compared: one alone would be its own baseline."""
        return len(self.samples) >= min(2, self.num_sampled)


class GroupCollector:
    """Finds `num_prompts` groups for each step."""

    def __init__(
        self,
        queue: PromptQueue,
        prompts: Sequence[Prompt] | PromptDataset,
        generate: Generate,
        rewards: Rewards,
        *,
        cfg: FilterConfig,
        num_prompts: int,
        timers: Timers,
    ) -> None:
        self.queue = queue
        self._prompts, self._generate, self._rewards = prompts, generate, rewards
        self._cfg, self._num_prompts, self._timers = cfg, num_prompts, timers

    def collect(self, step: int) -> Collected:
        """The groups of a step, in the order of their prompts; fewer, or none, if the filter removed too many."""
        sampled, tallies = self._sample(self._num_prompts, step, used=set())
        kept, judged = self._passed(sampled), [tallies]
        num_refills = 0
        while len(kept) < self._num_prompts and num_refills < self._cfg.max_refills:
            count = refill_count(self._num_prompts, num_kept=len(kept), num_sampled=len(sampled))
            count = min(count, len(self._prompts) - len(sampled))
            if count == 0:  # every prompt was asked
                break
            num_refills += 1
            more, tallies = self._sample(count, step, used={group.index for group in sampled})
            judged.append(tallies)
            sampled += more
            kept += self._passed(more)
        self.queue.give_back([group.index for group in kept[self._num_prompts :]])
        kept = kept[: self._num_prompts]
        return Collected(
            rollout=RolloutBatch(
                prompts={group.prompt.uid: group.prompt for group in kept},
                samples=tuple(sample for group in kept for sample in group.samples),
            ),
            rewards=[reward for group in kept for reward in group.rewards],
            metrics=self._metrics(sampled) | tally_metrics(judged) | {"filter/num_refills": float(num_refills)},
        )

    def _sample(self, count: int, step: int, *, used: set[int]) -> tuple[list[_Group], Mapping[str, Tally]]:
        indices = self.queue.take(count, except_for=used)
        prompts = [self._prompts[index] for index in indices]
        judging = self._rewards.begin()
        with self._timers("gen"):
            rollout = self._generate(prompts, step, judging.add)
        with self._timers("reward"):
            judged = judging.finish(rollout.samples)
        by_uid: dict[str, list[tuple[Sample, Reward]]] = {prompt.uid: [] for prompt in prompts}
        for sample, reward in zip(rollout.samples, judged.rewards, strict=True):
            by_uid[sample.uid].append((sample, reward))
        groups = [_group(index, prompt, by_uid[prompt.uid]) for index, prompt in zip(indices, prompts, strict=True)]
        return groups, judged.tallies

    def _passed(self, groups: Sequence[_Group]) -> list[_Group]:
        judged = [group for group in groups if group.is_judged]
        rows = _rows(judged)
        keep = kept_rows(rows.scores, rows.uids, self._cfg, demonstrated=rows.demonstrated)
        kept = {uid for uid, stays in zip(rows.uids, keep, strict=True) if stays}
        return [group for group in judged if group.prompt.uid in kept]

    def _metrics(self, sampled: Sequence[_Group]) -> dict[str, float]:
        """Of all that was sampled and judged, removed or not."""
        rows = _rows([group for group in sampled if group.is_judged])
        keep = kept_rows(rows.scores, rows.uids, self._cfg, demonstrated=rows.demonstrated)
        return group_metrics(rows.correct, rows.uids, keep, demonstrated=rows.demonstrated)


def _group(index: int, prompt: Prompt, judged: Sequence[tuple[Sample, Reward]]) -> _Group:
    left = [(sample, reward) for sample, reward in judged if not reward.dropped]
    return _Group(
        index=index,
        prompt=prompt,
        samples=tuple(sample for sample, _ in left),
        rewards=tuple(reward for _, reward in left),
        num_sampled=len(judged),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """What filters read, a number per sample."""

    uids: Sequence[str]
    scores: Sequence[float]
    correct: Sequence[bool]
    demonstrated: Sequence[bool]


def _rows(groups: Sequence[_Group]) -> _Rows:
    judged = [(s, r) for group in groups for s, r in zip(group.samples, group.rewards, strict=True)]
    return _Rows(
        uids=[sample.uid for sample, _ in judged],
        scores=[reward.score for _, reward in judged],
        correct=[reward.correct for _, reward in judged],
        demonstrated=[sample.has_demonstration for sample, _ in judged],
    )


def refill_count(num_wanted: int, *, num_kept: int, num_sampled: int) -> int:
    """Prompts to sample next: as many as the share that passed so far makes likely to do, one batch at most."""
    missing = num_wanted - num_kept
    passed_frac = num_kept / num_sampled
    return num_wanted if passed_frac == 0 else min(num_wanted, math.ceil(missing / passed_frac))
