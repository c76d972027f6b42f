"""Which groups a step trains on: prompts in order, filters, refills, and prompts that wait for the next step.

Prompt i has two samples, whose scores a table gives. A group passes the filter if they differ. The sampler does not
shuffle: its batches of two are [0, 1], [2, 3], … and across the end of an epoch.
"""

import asyncio
import json
import math
import random
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algos.advantages import compute_advantages
from megarl.cluster.offloading import Phase
from megarl.config.algo import AdvantageConfig, AlgoConfig, FilterConfig
from megarl.config.generation import RolloutConfig, ScheduleConfig
from megarl.data.sampler import MixtureSampler, PromptSampler
from megarl.data.stop_tokens import StopTokens
from megarl.errors import RunError, WorkerError
from megarl.host import loop
from megarl.record.metrics import Timers
from megarl.rewards.judge import Judged, Tally
from megarl.rollout.scheduler import Scheduler
from megarl.rollout.source import Doing, Group, RolloutSource, SamplingPlan, SamplingStopped, generating
from megarl.train.collect import Collected, Rollouts
from megarl.train.groups import refill_count
from megarl.train.outcome import cut_warning
from megarl.train.prompt_queue import PromptQueue
from megarl.train.rows import training_rows
from megarl.types import DROPPED, FinishReason, Prompt, Reward, Sample, prompt_segment, scored_batch
from megarl.types.judged import Trouble
from tests.helpers.loops import answered, turns
from tests.helpers.reward_items import item
from tests.helpers.segments import demonstration_segment, policy_segment

MIXED, WRONG, RIGHT = (0.0, 1.0), (0.0, 0.0), (1.0, 1.0)
# All wrong as well, as the responses were cut.
CUT = (-1.0, -1.0)
# In place of a score: nobody could judge the sample.
LOST = math.nan


def queue_of(size: int, batch_size: int = 2, *, shuffle: bool = False) -> PromptQueue:
    return PromptQueue(PromptSampler(size, batch_size, seed=3, shuffle=shuffle))


def test_prompts_come_in_the_samplers_order() -> None:
    queue = queue_of(6)
    # Takes need not be of the sampler's size: what is left of a batch waits.
    assert [queue.take(count, except_for=set()) for count in (2, 3, 1)] == [[0, 1], [2, 3, 4], [5]]
    assert queue.take(2, except_for=set()) == [0, 1]


def test_prompts_that_are_passed_over_keep_their_place() -> None:
    queue = queue_of(6)
    assert queue.take(2, except_for={0, 2}) == [1, 3]
    # 4 and 5 are drawn after them.
    assert queue.take(3, except_for=set()) == [0, 2, 4]


def test_prompts_that_are_given_back_are_first() -> None:
    queue = queue_of(6)
    assert queue.take(3, except_for=set()) == [0, 1, 2]
    queue.give_back([2, 0])
    assert queue.take(4, except_for=set()) == [2, 0, 3, 4]


def test_no_take_has_a_prompt_twice() -> None:
    queue = queue_of(3, 3)
    assert queue.take(2, except_for=set()) == [0, 1]
    queue.give_back([0])
    # Waiting are 0 and 2, then the next epoch's 0, 1, 2: its 0 waits, and its 2 is not reached.
    assert queue.take(3, except_for=set()) == [0, 2, 1]
    assert queue.take(3, except_for=set()) == [0, 2, 1]


# --- the queue


def test_a_queue_continues_from_its_state() -> None:
    queue, resumed = queue_of(7, 3, shuffle=True), queue_of(7, 3, shuffle=True)
    first = queue.take(4, except_for={2})
    queue.give_back(first[2:])
    resumed.load_state_dict(json.loads(json.dumps(queue.state_dict())))
    assert [resumed.take(n, except_for=set()) for n in (1, 5, 7)] == [
        queue.take(n, except_for=set()) for n in (1, 5, 7)
    ]


@given(
    st.integers(4, 9),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 3), st.sets(st.integers(0, 8), max_size=1)), max_size=12),
)
def test_no_prompt_is_lost(size: int, batch_size: int, takes: list[tuple[int, set[int]]]) -> None:
    """All that the sampler gave was taken or waits, no matter what was passed over; what waits does so once."""
    queue, sampler = queue_of(size, batch_size, shuffle=True), PromptSampler(size, batch_size, seed=3)
    taken: Counter[int] = Counter()
    for count, used in takes:
        indices = queue.take(count, except_for=used)
        assert len(set(indices)) == count
        assert not used & set(indices)
        taken.update(indices)
    state = queue.state_dict()
    drawn = Counter(index for _ in range(state["sampler"]["num_batches"]) for index in sampler.next_batch())
    waiting = Counter(state["waiting"])
    assert set(waiting.values()) <= {1}
    assert set(drawn) == set(taken + waiting)
    assert taken + waiting <= drawn


def test_a_mixture_of_which_a_part_is_passed_over_again_and_again_does_not_grow() -> None:
    sampler = MixtureSampler([90, 6], [1.0, 1.0], batch_size=8, seed=0)
    queue = PromptQueue(sampler)
    used: set[int] = set()
    for _ in range(30):
        used |= set(queue.take(3, except_for=used))
    # The six rows of the small file were drawn again and again and wait once each.
    assert len(queue.state_dict()["waiting"]) <= 96


# --- groups

ENDS = StopTokens(token_ids=(0,), tails=("",), declared=(0, 3), stop_token_ids=(0, 3, 9), names=("",))


class World(RolloutSource):
    """Prompts, an engine and a judge; `asked` lists the prompts of every generation by step."""

    def __init__(self, scores: Sequence[Sequence[float]], *, demonstrated: bool = False) -> None:
        self.scores, self.demonstrated = scores, demonstrated
        self.prompts = [
            Prompt(uid=f"q:{i}", token_ids=(i,), data_source="q", ground_truth="") for i in range(len(scores))
        ]
        self.asked: list[tuple[int, list[int]]] = []
        self.plans: list[SamplingPlan] = []
        # The samples that were begun already, and by plan those that wait for an answer.
        self.begun: list[Sample] = []
        self.pending: list[list[tuple[Sample, asyncio.Future[None]]]] = []
        self.phases: list[Phase] = []

    async def sample(self, group: Group) -> None:
        """All samples of a table; with `demonstrated` the first starts with a demonstration."""
        if not self.plans or self.plans[-1] is not group.plan:
            self.plans.append(group.plan)
            self.asked.append((group.plan.step, []))
            self.pending.append([])
        index = group.prompt.token_ids[0]
        self.asked[-1][1].append(index)
        self.begun += group.parts.values()
        new_answer = asyncio.get_running_loop().create_future
        asked = [(self._sample(index, i, group.plan.step), new_answer()) for i in range(len(self.scores[index]))]
        self.pending[-1] += asked
        await asyncio.gather(*(self._finish(group, sample, answer) for sample, answer in asked))

    async def _finish(self, group: Group, sample: Sample, answer: "asyncio.Future[None]") -> None:
        await answer
        await group.finish(sample)

    def wait(self, work: "asyncio.Future[None]", *, timeout_s: float, doing: Doing = generating) -> None:
        loop.wait(answered(work, self.answer))

    def answer(self) -> None:
        """Finish what was asked for first and by one plan, in an order of its own."""
        samples = self.pending.pop(0)
        random.Random(samples[0][0].seed).shuffle(samples)
        for _, answer in samples[::-1]:
            answer.set_result(None)

    def parts(self, groups: Iterable[Group]) -> list[Sample]:
        return []

    def _sample(self, index: int, place: int, step: int) -> Sample:
        given = [demonstration_segment([7])] if self.demonstrated and place == 0 else []
        return Sample(
            uid=f"q:{index}",
            sample_index=place,
            seed=step,
            segments=(prompt_segment([index]), *given, policy_segment([100 + place])),
            finish_reason=FinishReason.LENGTH if self.scores[index] == CUT else FinishReason.STOP,
        )

    def begin(self) -> "WorldJudging":
        return WorldJudging()

    def finish(self, judgings: "Sequence[WorldJudging]", samples: Sequence[Sample]) -> Judged:
        told = [sample for judging in judgings for sample in judging.told]
        assert {id(sample) for sample in told} == {id(sample) for sample in samples}
        assert len(told) == len(samples)
        tallies = {"reward/jobs": Tally(total=len(samples)), "reward/s": Tally(total=2.0, over=len(samples))}
        troubles = [Trouble(item=item(samples[0].uid, "", ""), outcome="crashed", reason=samples[0].uid)]
        return Judged(rewards=[self.judge(sample) for sample in samples], tallies=tallies, troubles=troubles)

    def judge(self, sample: Sample) -> Reward:
        score = self.scores[int(sample.prompt_token_ids[0])][sample.sample_index]
        return DROPPED if score is LOST else Reward(score=score, correct=score > 0.5)

    def collector(
        self,
        cfg: FilterConfig,
        num_prompts: int,
        *,
        queue: PromptQueue | None = None,
        timers: Timers | None = None,
        schedule: ScheduleConfig | None = None,
    ) -> Rollouts:
        schedule = schedule or ScheduleConfig()
        return Rollouts(
            scheduler=Scheduler(prompts_per_step=num_prompts, staleness=schedule.staleness),
            algo=AlgoConfig(filter=cfg),
            rollout=RolloutConfig(num_samples=len(self.scores[0]), schedule=schedule),
            total_steps=100,
            run_seed=0,
            queue=queue or queue_of(len(self.scores)),
            prompts=self.prompts,
            source=self,
            wait=self.wait,
            rewards=self,  # type: ignore[arg-type]
            stop_tokens=ENDS,
            record_file=lambda step: Path("nowhere", str(step)),
            enter=self.phases.append,
            timers=timers or Timers(),
        )


class WorldJudging:
    """Notes what it is told of; the world checks that it was told of everything once, and judges it."""

    def __init__(self) -> None:
        self.told: list[Sample] = []

    def add(self, prompt: Prompt, sample: Sample) -> None:
        assert prompt.uid == sample.uid
        self.told.append(sample)

    def pending(self) -> Sequence[Future[Any]]:
        return ()


def admit(rollouts: Rollouts, version: int) -> None:
    """Admit prompts, and let the source begin to sample them."""
    rollouts.admit(version)
    loop.wait(turns())


def collect(rollouts: Rollouts, step: int) -> Collected:
    """A step without training."""
    admit(rollouts, step - 1)
    collected = rollouts.take(step)
    rollouts.settle()
    rollouts.scheduler.release()
    return collected


def prompts_of(collected: Collected) -> list[int]:
    """The groups' prompts in their order; checks that groups are whole and every sample has its own reward."""
    samples, indices = collected.rollout.samples, []
    assert list(collected.rollout.prompts) == list(dict.fromkeys(s.uid for s in samples))
    for start in range(0, len(samples), 2):
        first, second = samples[start : start + 2]
        assert first.uid == second.uid
        assert {first.sample_index, second.sample_index} == {0, 1}
        indices.append(int(first.prompt_token_ids[0]))
    assert len(collected.rewards) == len(samples)
    return indices


def test_every_sample_has_its_own_reward() -> None:
    world = World([(0.0, 0.25), (0.5, 0.75)])
    collected = collect(world.collector(FilterConfig(), 2), 1)
    rewards = {
        (s.uid, s.sample_index): r.score for s, r in zip(collected.rollout.samples, collected.rewards, strict=True)
    }
    assert rewards == {("q:0", 0): 0.0, ("q:0", 1): 0.25, ("q:1", 0): 0.5, ("q:1", 1): 0.75}


def test_engines_stop_at_every_end_and_responses_that_were_cut_are_counted() -> None:
    """Also of groups that the filter removes: if all are cut, all may be wrong."""
    world = World([CUT, CUT, MIXED, CUT])
    collector = world.collector(FilterConfig(mean_score=(0.0, 1.0)), 4)
    collected = collect(collector, 1)
    assert prompts_of(collected) == [2]
    assert collected.outcome.cut_frac == 0.75
    assert world.plans[-1].sampling.stop_token_ids == (0, 3, 9)
    assert cut_warning(collected.outcome.cut_frac, 64, ("<|im_end|>", "<|endoftext|>")) == (
        "warning: 75% of the responses of step 1 were cut at rollout.max_response_tokens=64, before any of the ends "
        "'<|im_end|>', '<|endoftext|>'; raise the limit or, if the model ends answers in another way, set "
        "rollout.stop_token_ids or rollout.stop to its end"
    )


def test_a_run_whose_steps_have_no_groups_ends_and_says_what_was_sampled() -> None:
    world = World([WRONG, RIGHT, WRONG, WRONG, MIXED, WRONG, RIGHT, RIGHT, RIGHT, RIGHT])
    collector = world.collector(FilterConfig(mean_score=(0.0, 1.0), max_skipped_steps=3), 2)
    # Two steps without groups, one with a group, then three without.
    assert [len(prompts_of(collect(collector, step))) for step in (1, 2, 3, 4, 5)] == [0, 0, 1, 0, 0]
    with pytest.raises(RunError, match=r"3 steps in a row .* 2 judged groups, whose means of 'correct' are 0 to 1, 0 "):
        collect(collector, 6)


def test_metrics_are_of_all_that_was_sampled() -> None:
    world = World([WRONG, MIXED, RIGHT, MIXED, WRONG])
    got = collect(world.collector(FilterConfig(mean_score=(0.0, 1.0), max_refills=1), 3, queue=queue_of(5, 3)), 1)
    # 0, 1, 2, of which 1 passes; two are missing and a third passes: all of the other two are asked.
    # Troubles of both batches are told of, those of groups that the filter removed among them.
    assert [each.reason for each in got.troubles] == ["q:0", "q:3"]
    assert world.asked == [(1, [0, 1, 2]), (1, [3, 4])]
    assert got.metrics == {
        "filter/num_groups": 5.0,
        "filter/num_groups_removed": 3.0,
        "filter/num_refills": 1.0,
        "batch/solve_none": 2.0,
        "batch/solve_all": 1.0,
        "batch/solved": 0.4,
        # Of the two groups that stay, one of two rows each.
        "batch/failed": 0.5,
        "batch/on_solved": 0.4,
        # Ten samples were judged, in two batches that took two seconds each.
        "reward/jobs": 10.0,
        "reward/s": 0.4,
    }


def test_refills_until_the_step_is_full_and_what_is_left_over_is_first_next_time() -> None:
    #        step 1: [0, 1]    refills: [2, 3]    [4, 5]
    world = World([WRONG, WRONG, MIXED, RIGHT, MIXED, MIXED, MIXED, WRONG])
    collector = world.collector(FilterConfig(mean_score=(0.0, 1.0), max_refills=5), 2)
    first = collect(collector, 1)
    # None of 2 passed: a whole batch. 1 of 4 passed and 1 is missing: 4 would be likely to do, 2 are the most.
    assert world.asked == [(1, [0, 1]), (1, [2, 3]), (1, [4, 5])]
    assert prompts_of(first) == [2, 4]
    assert first.metrics["filter/num_refills"] == 2
    # 5 passed, found no place, and is sampled anew by the policy of its step.
    second = collect(collector, 2)
    assert world.asked[3:] == [(2, [5, 6])]
    assert prompts_of(second) == [5, 6]
    assert {sample.seed for sample in second.rollout.samples} == {2}


def test_refills_end_where_they_are_told_to() -> None:
    world = World([WRONG] * 4 + [MIXED] * 4)
    collected = collect(world.collector(FilterConfig(mean_score=(0.0, 1.0), max_refills=1), 2), 1)
    assert world.asked == [(1, [0, 1]), (1, [2, 3])]
    assert prompts_of(collected) == []
    assert collected.metrics["filter/num_refills"] == 1


def test_no_prompt_is_asked_twice_in_a_step() -> None:
    world = World([WRONG, WRONG, RIGHT, WRONG, MIXED])
    collector = world.collector(FilterConfig(mean_score=(0.0, 1.0), max_refills=9), 2)
    first = collect(collector, 1)
    # The last refill asks for all that is left, one prompt; the sampler's next batch holds 4 and the new epoch's 0.
    assert world.asked == [(1, [0, 1]), (1, [2, 3]), (1, [4])]
    assert prompts_of(first) == [4]
    assert first.metrics["filter/num_refills"] == 2
    # 0 has been waiting since.
    assert prompts_of(collect(collector, 2)) == [4]
    assert world.asked[3] == (2, [0, 1])


def test_scores_of_demonstrations_may_be_left_out() -> None:
    """Sample 0 starts with a demonstration, and the others alone may decide about their group."""
    scores = [(1.0, 0.0, 0.0), (1.0, 1.0, 0.0)]
    for counted, kept in ((True, [0, 1]), (False, [1])):
        world = World(scores, demonstrated=True)
        cfg = FilterConfig(mean_score=(0.0, 1.0), count_demonstrations=counted)
        collected = collect(world.collector(cfg, 2), 1)
        assert list(collected.rollout.prompts) == [f"q:{i}" for i in kept]
        assert collected.metrics["batch/off_solved"] == 1.0
        assert collected.metrics["batch/on_solved"] == 0.25


def test_what_nobody_could_judge_does_not_train() -> None:
    """A group goes on without a lost row; one row alone, or none, is no group."""
    world = World([(1.0, LOST, 0.0, 0.0), (LOST, 1.0, LOST, LOST), (LOST,) * 4, (0.0, 1.0, 1.0, LOST)])
    collected = collect(world.collector(FilterConfig(), 4, queue=queue_of(4, 4)), 1)
    found = {
        (s.uid, s.sample_index): r.score for s, r in zip(collected.rollout.samples, collected.rewards, strict=True)
    }
    assert found == {
        ("q:0", 0): 1.0,
        ("q:0", 2): 0.0,
        ("q:0", 3): 0.0,
        ("q:3", 0): 0.0,
        ("q:3", 1): 1.0,
        ("q:3", 2): 1.0,
    }
    assert list(collected.rollout.prompts) == ["q:0", "q:3"]
    assert collected.metrics["filter/num_groups"] == 2.0
    assert collected.metrics["batch/solved"] == 0.5


def test_a_greedy_response_is_compared_with_and_not_trained_on() -> None:
    """Two samples of each prompt train; the third one, of the same table, is greedy."""
    world = World([(0.0, 1.0, 1.0), (1.0, LOST, 0.25), (1.0, 1.0, LOST)])
    plain = world.collector(FilterConfig(), 3, queue=queue_of(3, 3))
    algo = AlgoConfig(advantage=AdvantageConfig(estimator="remax"))
    rollout = RolloutConfig(num_samples=2)
    collected = collect(replace(plain, algo=algo, rollout=rollout), 1)
    assert (world.plans[-1].num_samples, world.plans[-1].last_is_greedy) == (3, True)
    found = {
        (sample.uid, sample.sample_index): (reward.score, reward.details["greedy_score"])
        for sample, reward in zip(collected.rollout.samples, collected.rewards, strict=True)
    }
    # Of prompt 1 one sample is lost, and one alone is no group; of prompt 2 the greedy one is.
    assert found == {("q:0", 0): (0.0, 1.0), ("q:0", 1): (1.0, 1.0)}
    training = training_rows(collected, algo)
    batch = scored_batch(training.rows, training.rewards)
    assert compute_advantages(batch, algo.advantage).advantages[:, 0].tolist() == [-1.0, 0.0]


def test_lost_groups_are_replaced_by_refills() -> None:
    world = World([(LOST, 1.0), MIXED, MIXED, MIXED])
    collected = collect(world.collector(FilterConfig(mean_score=(0.0, 1.0), max_refills=2), 2), 1)
    assert prompts_of(collected) == [1, 2]


@pytest.mark.parametrize("resumed_after", [1, 2, 3])
def test_a_resumed_run_asks_the_same_prompts(resumed_after: int) -> None:
    rng = random.Random(0)
    scores = [rng.choice([MIXED, MIXED, WRONG, RIGHT]) for _ in range(11)]
    cfg = FilterConfig(mean_score=(0.0, 1.0), max_refills=3)
    world, again = World(scores), World(scores)
    collector = world.collector(cfg, 3, queue=queue_of(11, 3, shuffle=True))
    got, state = [], None
    for step in range(1, 7):
        got.append(prompts_of(collect(collector, step)))
        if step == resumed_after:
            state = json.loads(json.dumps(collector.queue.state_dict()))
    assert state is not None
    resumed = again.collector(cfg, 3, queue=queue_of(11, 3, shuffle=True))
    resumed.queue.load_state_dict(state)
    assert [prompts_of(collect(resumed, step)) for step in range(resumed_after + 1, 7)] == got[resumed_after:]
    assert again.asked == [call for call in world.asked if call[0] > resumed_after]
    # The filter acted, and something waited for its step.
    assert len(world.asked) > 6


def test_times_of_generation_and_judging_add_up_over_refills() -> None:
    world, now = World([WRONG, WRONG, MIXED, MIXED]), [0.0]
    timers = Timers(clock=lambda: now[0])
    answer, judge = world.answer, world.judge

    def slow_answer() -> None:
        now[0] += 10.0
        answer()

    def slow_judge(sample: Sample) -> Reward:
        now[0] += 0.25
        return judge(sample)

    world.answer, world.judge = slow_answer, slow_judge  # type: ignore[method-assign]
    collect(world.collector(FilterConfig(mean_score=(0.0, 1.0), max_refills=1), 2, timers=timers), 1)
    assert timers.pop() == {"timing_s/gen": 20.0, "timing_s/reward": 2.0}


@pytest.mark.parametrize(
    ("wanted", "kept", "sampled", "expected"),
    [
        (8, 0, 8, 8),  # nothing passed: a batch
        (8, 4, 8, 8),  # half passed: 4 missing ask for 8
        (8, 6, 8, 3),  # 2 / (6/8) = 2.67
        (8, 7, 16, 3),  # 1 / (7/16) = 2.29
        (8, 1, 8, 8),  # 7 / (1/8) = 56 are more than a batch
        (8, 7, 7, 1),
    ],
)
def test_refills_ask_for_as_many_as_are_likely_to_do(wanted: int, kept: int, sampled: int, expected: int) -> None:
    assert refill_count(wanted, num_kept=kept, num_sampled=sampled) == expected


# --- ahead of training

AHEAD = ScheduleConfig(staleness=1, on_update="continue")


def test_the_pipeline_replaces_what_the_filter_removes() -> None:
    world = World([WRONG, MIXED, RIGHT, MIXED, MIXED, MIXED, MIXED, MIXED])
    cfg = FilterConfig(mean_score=(0.0, 1.0), max_refills=2)
    rollouts = world.collector(cfg, 2, schedule=AHEAD)
    admit(rollouts, 0)
    collected = rollouts.take(1)
    # 0 is removed, and 2 after it; their places are filled at once by 4 and 5.
    assert prompts_of(collected) == [1, 3]
    assert collected.metrics["filter/num_refills"] == 2
    assert world.asked == [(1, [0, 1]), (2, [2, 3]), (3, [4]), (3, [5])]
    assert rollouts.scheduler.pipeline == {1: 0, 3: 0, 4: 0, 5: 0}


def test_a_pipeline_without_progress_names_its_oldest_ticket() -> None:
    """Prompt 1 has finished, but strict order waits for prompt 0, of which a sample is missing."""
    world = World([MIXED] * 9)
    rollouts = world.collector(FilterConfig(), 2, schedule=AHEAD)
    admit(rollouts, 0)
    for sample, answer in world.pending[0]:
        if (sample.uid, sample.sample_index) != ("q:0", 1):
            answer.set_result(None)

    def wait(work: "asyncio.Future[None]", *, timeout_s: float, doing: Doing) -> None:
        loop.wait(turns())
        assert not work.done()
        raise WorkerError(f"no progress within {timeout_s:g} s: {doing()}")

    rollouts.wait = wait
    progress = "3 of 8 samples finished; the oldest ticket, 0"
    message = rf"within 3600 s: generating: {progress} \(q:0\), has 1 of 2"
    with pytest.raises(WorkerError, match=message):
        rollouts.take(1)


def test_no_prompt_is_under_way_twice() -> None:
    """The next epoch begins with 0, which the step that is under way has taken."""
    world = World([MIXED, WRONG, MIXED, MIXED])
    cfg = FilterConfig(mean_score=(0.0, 1.0), max_refills=1)
    rollouts = world.collector(cfg, 2, schedule=AHEAD, queue=queue_of(4))
    admit(rollouts, 0)
    assert prompts_of(rollouts.take(1)) == [0, 2]
    assert [index for _, indices in world.asked for index in indices] == [0, 1, 2, 3]


def test_the_last_steps_admit_no_more_than_they_take() -> None:
    world = World([MIXED] * 9)
    rollouts = world.collector(FilterConfig(), 2, schedule=AHEAD)
    rollouts.total_steps = 2
    for step in (1, 2):
        admit(rollouts, step - 1)
        rollouts.take(step)
        rollouts.scheduler.release()
    assert [index for _, indices in world.asked for index in indices] == [0, 1, 2, 3]
    assert rollouts.scheduler.pipeline == {}


@pytest.mark.parametrize(("on_update", "finished"), [("finish", 4), ("continue", 2)])
def test_only_finish_waits_for_all_samples_before_new_weights(on_update: Any, finished: int) -> None:
    world = World([MIXED] * 9)
    rollouts = world.collector(FilterConfig(), 2, schedule=ScheduleConfig(staleness=1, on_update=on_update))
    admit(rollouts, 0)
    rollouts.take(1)
    rollouts.settle()
    assert 4 - 2 * len(world.pending) == finished


def test_a_checkpoint_keeps_the_pipeline(tmp_path: Path) -> None:
    """Finished groups are not sampled again, unfinished ones go on, and both train in their turn."""
    world, again = World([MIXED] * 12), World([MIXED] * 12)
    finish = ScheduleConfig(staleness=1)
    rollouts = world.collector(FilterConfig(), 2, schedule=finish)
    collect(rollouts, 1)
    admit(rollouts, 1)
    queue = json.loads(json.dumps(rollouts.queue.state_dict()))
    state = json.loads(json.dumps(rollouts.save(tmp_path)))
    resumed = again.collector(FilterConfig(), 2, schedule=finish)
    resumed.queue.load_state_dict(queue)
    resumed.restore(state, tmp_path, step=1, goes_on=True)
    loop.wait(turns())
    # 2 and 3 were finished: their samples are handed over. 4 and 5 had no sample yet.
    assert {sample.uid for sample in again.begun} == {"q:2", "q:3"}
    assert again.asked == [(2, [2, 3]), (3, [4, 5])]
    assert resumed.scheduler.pipeline == rollouts.scheduler.pipeline
    for step, prompts in ((2, [2, 3]), (3, [4, 5]), (4, [6, 7])):
        assert prompts_of(collect(resumed, step)) == prompts


def test_a_signal_within_a_step_keeps_the_samples_that_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run samples only the rest, and every step trains on what it would have trained on."""
    world, again = World([MIXED] * 12), World([MIXED] * 12)
    rollouts = world.collector(FilterConfig(), 2)
    collect(rollouts, 1)
    admit(rollouts, 1)

    def answer_first() -> None:
        """Finish one group of the step, then the signal comes."""
        for _, answer in world.pending[0][:2]:
            answer.set_result(None)
        monkeypatch.setattr("megarl.train.collect.last_stop_signal", lambda: signal.SIGTERM)

    monkeypatch.setattr(world, "answer", answer_first)
    with pytest.raises(SamplingStopped):
        rollouts.take(2)
    monkeypatch.undo()
    queue, state = json.loads(json.dumps([rollouts.queue.state_dict(), rollouts.save(tmp_path)]))
    resumed = again.collector(FilterConfig(), 2)
    resumed.queue.load_state_dict(queue)
    resumed.restore(state, tmp_path, step=1, goes_on=True)
    loop.wait(turns())
    assert {sample.uid for sample in again.begun} == {"q:2"}
    assert [prompts_of(collect(resumed, step)) for step in (2, 3)] == [[2, 3], [4, 5]]


def test_the_first_step_goes_on_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.train.collect.last_stop_signal", lambda: signal.SIGTERM)
    assert prompts_of(collect(World([MIXED] * 4).collector(FilterConfig(), 2), 1)) == [0, 1]


@pytest.mark.parametrize(("schedule", "goes_on"), [(ScheduleConfig(), True), (AHEAD, False)])
def test_a_changed_schedule_or_engine_samples_the_pipeline_anew(
    schedule: ScheduleConfig, goes_on: bool, tmp_path: Path
) -> None:
    world, again = World([MIXED] * 9), World([MIXED] * 9)
    rollouts = world.collector(FilterConfig(), 2, schedule=AHEAD)
    collect(rollouts, 1)
    state = rollouts.save(tmp_path)
    resumed = again.collector(FilterConfig(), 2, schedule=schedule)
    resumed.queue.load_state_dict(rollouts.queue.state_dict())
    resumed.restore(state, tmp_path, step=1, goes_on=goes_on)
    loop.wait(turns())
    assert again.asked == []
    assert prompts_of(collect(resumed, 2)) == [2, 3]


def test_a_run_whose_samples_nobody_judges_ends_and_says_so() -> None:
    world = World([(LOST, LOST)] * 6)
    collector = world.collector(FilterConfig(max_skipped_steps=2), 2)
    assert prompts_of(collect(collector, 1)) == []
    with pytest.raises(
        RunError,
        match=r"^2 steps in a row .* 0 judged groups, 2 that could not be judged \(1 samples .*\)\. Mend what keeps",
    ):
        collect(collector, 2)


def test_groups_are_judged_by_right_and_wrong_unless_told_otherwise() -> None:
    """Rewards of −1 and 1 with three of four wrong have a mean of −0.5, which bounds of 0 and 1 would remove."""
    world = World([(-1.0, -1.0, 1.0, -1.0), (-1.0, -1.0, -1.0, -1.0)])
    for by, kept in (("correct", [0]), ("score", []), ("reward", [])):
        cfg = FilterConfig(by=by, mean_score=(0.0, 1.0))  # type: ignore[arg-type]
        rollout = collect(world.collector(cfg, 2), 1).rollout
        assert [int(prompt.token_ids[0]) for prompt in rollout.prompts.values()] == kept
