"""Judge groups of samples and filter out those that carry no learning signal."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.algos.advantages import GREEDY_SCORE
from megarl.algos.filters import filter_scores, group_metrics, kept_rows
from megarl.config.algo import FilterConfig
from megarl.rewards.judge import Judged
from megarl.rewards.manager import Judging, RewardManager
from megarl.rollout.source import Group, rollout_of
from megarl.types import DROPPED, Reward, Sample, SegmentSource


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroup:
    """The samples of a group that have a reward; `num_sampled` also counts those that no scorer could judge."""

    group: Group
    samples: tuple[Sample, ...]
    rewards: tuple[Reward, ...]
    num_sampled: int

    @property
    def is_judged(self) -> bool:
        """Return whether the group's rewards can be compared: a single reward would be its own baseline."""
        return len(self.samples) >= min(2, self.num_sampled)


async def all_heard(groups: Sequence[Group]) -> None:
    """Wait until judges have answered all that they have been asked about finished groups."""
    if pending := [asyncio.wrap_future(answer) for each in _judgings(groups) for answer in each.pending()]:
        # Those that fail are explained when the groups are judged.
        await asyncio.gather(*pending, return_exceptions=True)


def _judgings(groups: Sequence[Group]) -> list[Judging]:
    """Return the judgings of groups, of which several may have the same."""
    return list({id(group.judging): group.judging for group in groups if group.judging is not None}.values())


def judge_groups(groups: Sequence[Group], rewards: RewardManager) -> tuple[list[JudgedGroup], Judged]:
    """Wait for the rewards of finished groups, which are judged together; return also what judges said, to log it."""
    samples = rollout_of(groups).samples
    judged = rewards.finish(_judgings(groups), samples)
    by_uid: dict[str, list[tuple[Sample, Reward]]] = {group.prompt.uid: [] for group in groups}
    for sample, reward in zip(samples, judged.rewards, strict=True):
        by_uid[sample.uid].append((sample, reward))
    found = []
    for group in groups:
        pairs = by_uid[group.prompt.uid]
        if group.plan.last_is_greedy:
            # The greedy sample's reward becomes a detail of the others; if nobody could judge it, these
            # have nothing to be compared with, and are dropped.
            last = group.plan.num_samples - 1
            (baseline,) = (r for s, r in pairs if s.sample_index == last)
            pairs = [
                (s, DROPPED if baseline.dropped else replace(r, details={**r.details, GREEDY_SCORE: baseline.score}))
                for s, r in pairs
                if s.sample_index != last
            ]
        known = [(sample, reward) for sample, reward in pairs if not reward.dropped]
        found.append(
            JudgedGroup(
                group=group,
                samples=tuple(sample for sample, _ in known),
                rewards=tuple(reward for _, reward in known),
                num_sampled=len(pairs),
            )
        )
    return found, judged


def filter_groups(groups: Sequence[JudgedGroup], cfg: FilterConfig) -> tuple[list[JudgedGroup], dict[str, float]]:
    """Return the judged groups that pass the filter, and the metrics of all judged groups."""
    judged = [group for group in groups if group.is_judged]
    rows = [(s, r) for group in judged for s, r in zip(group.samples, group.rewards, strict=True)]
    uids = [sample.uid for sample, _ in rows]
    sources = [{segment.source for segment in sample.segments} for sample, _ in rows]
    demonstrated = [SegmentSource.DEMONSTRATION in each for each in sources]
    keep = kept_rows(filter_scores([r for _, r in rows], cfg), uids, cfg, demonstrated=demonstrated)
    kept = {uid for uid, stays in zip(uids, keep, strict=True) if stays}
    metrics = group_metrics([r.correct for _, r in rows], uids, keep, demonstrated=demonstrated)
    return [each for each in judged if each.group.prompt.uid in kept], metrics


def refill_count(num_wanted: int, *, num_kept: int, num_sampled: int) -> int:
    """Estimate how many prompts to sample next, from the pass rate so far; at most one batch."""
    missing = num_wanted - num_kept
    passed_frac = num_kept / num_sampled
    return num_wanted if passed_frac == 0 else min(num_wanted, math.ceil(missing / passed_frac))
