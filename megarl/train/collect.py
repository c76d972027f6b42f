"""Collect the samples of a step: admit prompts in order, sample and judge a group for each, filter, refill.

With a filter (`algo.filter`), groups that carry no learning signal are removed, and up to `max_refills` further
batches of prompts are sampled to replace them. In a synchronous run, if too many groups pass the filter, the prompts of
the surplus go first in the next step, whose policy samples them again. With `rollout.schedule.staleness`, the pipeline
already holds what replaces a removed group.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.algos.advantages import estimator_of
from megarl.cluster import offloading
from megarl.config.algo import AlgoConfig
from megarl.config.schema import RolloutConfig
from megarl.data.prompts import PromptDataset
from megarl.data.stop_tokens import StopTokens
from megarl.errors import RunError
from megarl.host import loop
from megarl.host.signals import last_stop_signal
from megarl.record.episodes import episode_metrics
from megarl.record.metrics import Timers
from megarl.rewards.judge import tally_metrics
from megarl.rewards.manager import Judging, RewardManager
from megarl.rollout.replay import read_record, write_record
from megarl.rollout.scheduler import Scheduler
from megarl.rollout.source import (
    LOOK_S,
    Group,
    RolloutSource,
    SamplingPlan,
    SamplingStopped,
    Wait,
    abandon,
    all_sampled,
    rollout_of,
)
from megarl.train.groups import JudgedGroup, all_heard, filter_groups, judge_groups, refill_count
from megarl.train.outcome import StepOutcome, judged_in_words
from megarl.train.prefixes import plan_prefixes
from megarl.train.prompt_queue import PromptQueue
from megarl.types import Prompt, Reward, RolloutBatch
from megarl.types.judged import Trouble

# The samples of the pipeline in a checkpoint's directory.
SAMPLES_FILE = "rollouts.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The samples of complete groups with their rewards, in the same order, and metrics of the collection.

    A group lacks only those samples that nobody could judge. troubles, outcome: those of all samples, also of
    removed groups.
    """

    rollout: RolloutBatch
    rewards: Sequence[Reward]
    troubles: Sequence[Trouble] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    outcome: StepOutcome = field(default_factory=StepOutcome)


@dataclass(slots=True, kw_only=True)
class Rollouts:
    """The stages of a step that admit prompts, sample and judge them, and take `trainer.prompts_per_step` groups.

    scheduler: decides when prompts are admitted and which groups are taken. prompts: indexed by what `queue` yields.
    stop_tokens: those of responses. record_file: returns the file that takes a step's rollout if `rollout.record` is
    set. enter: called with the phase before each generation, so that the engines are on their devices.
    """

    algo: AlgoConfig
    rollout: RolloutConfig
    total_steps: int
    run_seed: int
    scheduler: Scheduler
    queue: PromptQueue
    prompts: Sequence[Prompt] | PromptDataset
    source: RolloutSource
    wait: Wait
    rewards: RewardManager
    stop_tokens: StopTokens
    record_file: Callable[[int], Path]
    enter: Callable[[offloading.Phase], None]
    timers: Timers
    # The groups that no step has taken, by the numbers of their tickets.
    groups: dict[int, Group] = field(default_factory=dict, init=False)
    # The samples of each of the latest steps that have no groups left, in words.
    skipped: list[str] = field(default_factory=list, init=False)

    def admit(self, version: int) -> None:
        """Admit prompts until the pipeline is full, at the version of the weights that engines have now."""
        with self.timers("gen"):
            self._start(self.scheduler.admissible(self.total_steps - version), version, sampled=[])

    def take(self, step: int) -> Collected:
        """Take a step's groups, judged and filtered, by ticket; fewer, or none, if the filter removes too many.

        Raises SamplingStopped if a signal asks for a stop before the first groups are judged. There is no checkpoint
        of step 0: the first step goes on.
        """
        num_prompts, kept, tallies = self.scheduler.prompts_per_step, [], []
        sampled, troubles = list[JudgedGroup](), list[Trouble]()
        count = num_prompts
        while count:
            taken = self._take_done(count, may_stop=step > 1 and not sampled)
            with self.timers("reward"):
                if self.scheduler.staleness:
                    # Samples of later groups that finish meanwhile are handed to the judges, too.
                    self.wait(loop.spawn(all_heard(taken)), timeout_s=math.inf, doing=lambda: "judging")
                groups, judged = judge_groups(taken, self.rewards)
            sampled += groups
            tallies.append(judged.tallies)
            troubles += judged.troubles
            stay = filter_groups(groups, self.algo.filter)[0]
            kept += stay
            for number in {each.group.number for each in groups} - {each.group.number for each in stay}:
                self.scheduler.remove(number)
            outcome = StepOutcome.of(sampled, troubles)
            # Nothing is wrong with the prompts.
            if outcome.all_failed:
                break
            count = self._refill(step, num_kept=len(kept), sampled=sampled, num_refills=len(tallies) - 1)
        self._require_groups(sampled, kept, outcome)
        surplus = [each.group for each in kept[num_prompts:]]
        self.queue.give_back([group.index for group in surplus])
        for group in surplus:
            self.scheduler.remove(group.number)
        kept = kept[:num_prompts]
        if self.rollout.record:
            write_record(self.record_file(step), rollout_of([each.group for each in sampled]))
        return Collected(
            rollout=RolloutBatch(
                prompts={each.group.prompt.uid: each.group.prompt for each in kept},
                samples=tuple(sample for each in kept for sample in each.samples),
            ),
            rewards=[reward for each in kept for reward in each.rewards],
            troubles=troubles,
            # Group metrics count everything that was sampled and judged, removed or not.
            metrics=filter_groups(sampled, self.algo.filter)[1]
            | tally_metrics(tallies)
            | episode_metrics(sample for each in sampled for sample in each.group.samples.values())
            | {"filter/num_refills": float(len(tallies) - 1)},
            outcome=outcome,
        )

    def settle(self) -> None:
        """With `on_update: finish`, wait until all samples are finished, so that none sees two versions of weights.

        Those of an engine that dies meanwhile may begin again with the new weights; see `EngineSupervisor.outdate`.
        """
        if self.rollout.schedule.on_update == "finish" and self.groups:
            with self.timers("settle"):
                self._wait(all_sampled(self.groups.values()))

    def save(self, directory: Path) -> dict[str, Any]:
        """Write the samples of the pipeline to a checkpoint's directory, and return the other state.

        Those that are not finished go on later only in a run that is ahead, which resumes within samples anyway.
        """
        if self.groups:
            unfinished = self.source.parts(self.groups.values()) if self.scheduler.staleness else []
            finished = [sample for group in self.groups.values() for sample in group.samples.values()]
            prompts = {group.prompt.uid: group.prompt for group in self.groups.values()}
            batch = RolloutBatch(prompts=prompts, samples=(*finished, *unfinished))
            write_record(directory / SAMPLES_FILE, batch)
        tickets = [[group.number, group.index, group.plan.step] for group in self.groups.values()]
        return {"scheduler": self.scheduler.state_dict(), "tickets": tickets}

    def restore(self, state: Mapping[str, Any], directory: Path, *, step: int, goes_on: bool) -> None:
        """Go on with the pipeline that `save` saved after a step or within the next one, if there was any.

        If the schedule has changed, or the engines sample in another way than before (`goes_on` false), the prompts of
        the pipeline are sampled anew, before all others.
        """
        scheduler, saved = self.scheduler, state.get("scheduler", {})
        # Seeds follow the numbers: none may come twice.
        scheduler.next_number = max(step * scheduler.prompts_per_step, saved.get("next_number", 0))
        tickets = [(int(number), int(index), int(target)) for number, index, target in state.get("tickets", ())]
        if not tickets:
            return
        if not goes_on or (saved["staleness"], saved["window"]) != (scheduler.staleness, scheduler.window):
            self.queue.give_back([index for _, index, _ in tickets])
            return
        # Which groups are done is learnt from their samples.
        scheduler.load_state_dict({**saved, "done": []})
        groups = self._groups(tickets, None if scheduler.staleness else self.rewards.begin())
        by_uid = {group.prompt.uid: group for group in groups}
        for sample in read_record(directory / SAMPLES_FILE).samples:
            by_uid[sample.uid].parts[sample.sample_index] = sample
        self._begin(groups)

    def close(self) -> None:
        """Give up what is under way, also after an error, and end the judges."""
        abandon(self.groups.values())
        self.rewards.close()

    def _start(self, count: int, version: int, *, sampled: Sequence[JudgedGroup]) -> int:
        """Admit `count` prompts, or all that are neither under way nor among `sampled`; return how many they were."""
        used = {group.index for group in self.groups.values()} | {each.group.index for each in sampled}
        count = min(count, len(self.prompts) - len(used))
        indices = self.queue.take(count, except_for=used) if count > 0 else []
        if not indices:
            return 0
        # A run that is not ahead judges the groups of a step together.
        is_ahead, per_step = self.scheduler.staleness > 0, self.scheduler.prompts_per_step
        judging = None if is_ahead else self.rewards.begin()
        tickets = []
        for index in indices:
            number = self.scheduler.admit(version)
            tickets.append((number, index, number // per_step + 1 if is_ahead else version + 1))
        self._begin(self._groups(tickets, judging))
        return len(indices)

    def _groups(self, tickets: Sequence[tuple[int, int, int]], judging: Judging | None) -> list[Group]:
        """Return the groups of admitted tickets, without samples; a ticket has a number, an index and a step.

        judging: that of all groups; None: each has its own.
        """
        groups: list[Group] = []
        for target in sorted({target for *_, target in tickets}):
            mine = [(number, index, self.prompts[index]) for number, index, step in tickets if step == target]
            plan = self._plan([prompt for *_, prompt in mine], target)
            groups += [
                Group(prompt=prompt, plan=plan, number=number, index=index, judging=judging or self.rewards.begin())
                for number, index, prompt in mine
            ]
        return groups

    def _begin(self, groups: Sequence[Group]) -> None:
        """Begin to sample groups, which no step has taken."""
        self.enter(offloading.GENERATE)
        for group in groups:
            self.groups[group.number] = group
            group.sampling = loop.spawn(self._sample(group))

    async def _sample(self, group: Group) -> None:
        await self.source.sample(group)
        self.scheduler.done(group.number)

    def _plan(self, prompts: Sequence[Prompt], step: int) -> SamplingPlan:
        """Return how prompts are sampled that will train in this step."""
        rollout, has_greedy = self.rollout, estimator_of(self.algo).needs_greedy
        prefixes = plan_prefixes(
            prompts,
            self.algo.demonstrations,
            step=step,
            num_samples=rollout.num_samples,
            run_seed=self.run_seed,
            end_token_ids=self.stop_tokens.token_ids,
        )
        return SamplingPlan(
            step=step,
            num_samples=rollout.num_samples + has_greedy,
            sampling=rollout.sampling(self.stop_tokens.stop_token_ids),
            max_response_tokens=rollout.max_response_tokens,
            run_seed=self.run_seed,
            prefixes=prefixes,
            last_is_greedy=has_greedy,
            with_nucleus=rollout.top_k != -1,
            head_tokens=rollout.head_tokens,
            may_move=True,
        )

    def _take_done(self, count: int, *, may_stop: bool) -> list[Group]:
        """Wait for `count` finished groups that the step may take, and take them. may_stop: see `take`."""
        numbers: list[int] = []
        with self.timers("gen"):
            if self.scheduler.staleness:
                # There may be samples to go on with, and no new ones.
                self.enter(offloading.GENERATE)
            while len(numbers) < count:
                self._wait(self._takeable(may_stop=may_stop))
                if (number := self.scheduler.takeable()) is None:
                    self.scheduler.put_back()
                    raise SamplingStopped
                self.scheduler.take(number)
                numbers.append(number)
        return [self.groups.pop(number) for number in sorted(numbers)]

    async def _takeable(self, *, may_stop: bool) -> None:
        """Wait until there is a group that the step may take, or a signal asks for a stop."""
        while self.scheduler.takeable() is None and not (may_stop and last_stop_signal()):
            tickets = self.scheduler.waiting()[: self.scheduler.window]
            sampling = [task for number in tickets if (task := self.groups[number].sampling) is not None]
            await asyncio.wait(sampling, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)

    def _wait(self, work: Coroutine[object, object, None]) -> None:
        def doing() -> str:
            # Lists, since the thread that shows it looks while samples come.
            groups = list(self.groups.values())
            oldest = next((group for group in groups if not group.is_done), None)
            if oldest is None:
                return "generating"
            total = sum(group.plan.num_samples for group in groups)
            count = f"{sum(len(group.samples) for group in groups)} of {total} samples finished"
            have = f"has {len(oldest.samples)} of {oldest.plan.num_samples}"
            return f"generating: {count}; the oldest ticket, {oldest.number} ({oldest.prompt.uid}), {have}"

        self.wait(loop.spawn(work), timeout_s=self.rollout.timeout_s, doing=doing)

    def _refill(self, step: int, *, num_kept: int, sampled: Sequence[JudgedGroup], num_refills: int) -> int:
        """Admit prompts for groups that the filter removed, and return how many groups to take next; 0 for none."""
        num_prompts, max_refills = self.scheduler.prompts_per_step, self.algo.filter.max_refills
        if num_kept >= num_prompts or max_refills == 0:
            return 0
        # A replay asks for what the recorded run asked for.
        if self.rollout.schedule.staleness == 0:
            if num_refills == max_refills:
                return 0
            wanted = refill_count(num_prompts, num_kept=num_kept, num_sampled=len(sampled))
            with self.timers("gen"):
                return self._start(wanted, step - 1, sampled=sampled)
        count = min(num_prompts - num_kept, (1 + max_refills) * num_prompts - len(sampled))
        steps_left = self.total_steps - step + 1
        with self.timers("gen"):
            admissible = self.scheduler.admissible(steps_left, step_takes=num_kept + count)
            self._start(admissible, step - 1, sampled=sampled)
        return min(count, len(self.groups))

    def _require_groups(
        self, sampled: Sequence[JudgedGroup], kept: Sequence[JudgedGroup], outcome: StepOutcome
    ) -> None:
        """Raise RunError if the latest `algo.filter.max_skipped_steps` steps, this one included, kept no group."""
        if kept:
            self.skipped.clear()
            return
        cfg = self.algo.filter
        self.skipped.append(judged_in_words(sampled, outcome, cfg))
        if len(self.skipped) >= cfg.max_skipped_steps:
            bounds = f"mean_score={cfg.mean_score and list(cfg.mean_score)}, uniform_scores={list(cfg.uniform_scores)}"
            bounds += f", names={list(cfg.names)}" if cfg.names else ""
            remedy = (
                "Take prompts that can be judged and are neither too easy nor too hard, more samples "
                "(rollout.num_samples), other bounds or a larger max_skipped_steps"
            )
            if not any(group.is_judged for group in sampled):
                remedy = "Mend what keeps samples from being judged; no filter removed them"
            raise RunError(
                f"{len(self.skipped)} steps in a row had no group to train on. algo.filter (by={cfg.by}, {bounds}) saw "
                f"in the last of them {self.skipped[-1]}. {remedy}"
            )
