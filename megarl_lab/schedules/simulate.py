"""Simulate a run in time, from the costs of its parts: engines with continuous batching, a trainer, and the schedule.

The `Scheduler` is the one that runs follow; what is simulated is only how long things take. Engines decode in
continuous time: a sequence that arrives within a decode step joins it at once.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megarl.errors import ConfigError
from megarl.rollout.scheduler import Scheduler

# Sequences end when they are within this many decode steps of their last one: rounding must not add an event.
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Times of the parts of a run, in seconds; of the trainer, in seconds × devices where it says so.

    decode_step_s, decode_sequence_s: a decode step of b sequences takes decode_step_s + b · decode_sequence_s.
    max_num_seqs: how many sequences an engine decodes at a time; others wait. recompute_s: per token whose keys and
    values an engine computes again after an update. train_step_s: per step, whatever its tokens. train_token_s:
    seconds × devices per token of prompts and responses. old_logprobs_token_s: seconds × devices per token that a step
    needs on top if it computes old log-probs. sync_s: pause of engines and trainer at an update.
    """

    decode_step_s: float
    decode_sequence_s: float
    max_num_seqs: int
    recompute_s: float
    train_step_s: float
    train_token_s: float
    old_logprobs_token_s: float
    sync_s: float

    def __post_init__(self) -> None:
        if self.decode_step_s + self.decode_sequence_s <= 0:
            raise ConfigError(
                f"got {self.decode_step_s} s per decode step and {self.decode_sequence_s} s per sequence in it, "
                "expected one of them above 0; give what an engine measures"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLengths:
    """The tokens of one prompt, and those of each of its responses."""

    prompt: int
    responses: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The samples of each step: `prompts_per_step` groups, drawn from `groups`, of `num_samples` samples.

    A drawn group with another number of samples gives `num_samples` of them, with repetitions.
    """

    prompts_per_step: int
    num_samples: int
    groups: tuple[GroupLengths, ...]

    def draw(self, rng: random.Random) -> GroupLengths:
        """Draw a group."""
        group = rng.choice(self.groups)
        if len(group.responses) == self.num_samples:
            return group
        return GroupLengths(prompt=group.prompt, responses=tuple(rng.choices(group.responses, k=self.num_samples)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A way to run: `num_engines` engines, `num_trainers` devices that train, and `rollout.schedule` with its window in
    tickets. With staleness 0, trainer and engines take turns, on the same devices or not.

    has_old_logprobs: whether a step computes old log-probs, as corrections by weights need.
    """

    num_engines: int
    num_trainers: int
    staleness: int = 0
    finish: bool = True
    window: int = 1
    has_old_logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedOutcome:
    """Means over the simulated steps after the first ones, in which the pipeline fills.

    step_s: seconds per step. trainer_idle: share of the time that the trainer waits for samples. engine_idle: share of
    the engines' time in which they neither decode nor recompute. lag_mean, lag_max: updates between a group's admission
    and its step. recomputed_tokens: per step.
    """

    step_s: float
    trainer_idle: float
    engine_idle: float
    lag_mean: float
    lag_max: int
    recomputed_tokens: float


def simulate(
    workload: Workload, costs: Costs, setting: Setting, *, num_steps: int = 8, seed: int = 0
) -> SimulatedOutcome:
    """Simulate a run, and return what `num_steps` steps are like after 2·(staleness + 1) others.

    With the same seed, all settings sample the same lengths in the same order.

    >>> costs = Costs(
    ...     decode_step_s=1.0, decode_sequence_s=0.0, max_num_seqs=8, recompute_s=0.0,
    ...     train_step_s=5.0, train_token_s=0.0, old_logprobs_token_s=0.0, sync_s=0.0,
    ... )
    >>> groups = (GroupLengths(prompt=4, responses=(10, 10)),)
    >>> workload = Workload(prompts_per_step=1, num_samples=2, groups=groups)
    >>> simulate(workload, costs, Setting(num_engines=1, num_trainers=1)).step_s
    15.0
    """
    run = _Simulation(workload, costs, setting, random.Random(seed))
    num_first = 2 * (setting.staleness + 1)
    for step in range(1, num_first + 1):
        run.step(step)
    before = run.totals()
    run.lags.clear()
    for step in range(num_first + 1, num_first + num_steps + 1):
        run.step(step)
    span, waited, busy, recomputed = (after - first for after, first in zip(run.totals(), before, strict=True))
    return SimulatedOutcome(
        step_s=span / num_steps,
        trainer_idle=waited / span,
        engine_idle=max(0.0, 1 - busy / setting.num_engines / span),
        lag_mean=sum(run.lags) / len(run.lags),
        lag_max=max(run.lags),
        recomputed_tokens=recomputed / num_steps,
    )


class _Engine:
    """An engine that decodes up to `max_num_seqs` sequences; its clock stands where it was last looked at."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        # The ticket of each sequence, the tokens that it will have, and those of its prompt.
        self._waiting: deque[tuple[int, int, int]] = deque()
        # The same, after the number of decode steps at which the sequence ends.
        self._running: list[tuple[float, int, int, int]] = []
        self._num_steps = self._clock = 0.0
        self.busy_s = 0.0
        self.num_open = 0

    def add(self, ticket: int, num_tokens: int, num_prompt: int) -> None:
        self._waiting.append((ticket, num_tokens, num_prompt))
        self.num_open += 1
        self._fill()

    def next_end(self) -> float:
        """Return the time at which a sequence ends next; infinity without any."""
        if not self._running:
            return math.inf
        return self._clock + max(0.0, self._running[0][0] - self._num_steps) * self._step_s()

    def run_until(self, time: float) -> list[int]:
        """Decode up to a time, and return the tickets of the sequences that ended, one for each."""
        ended: list[int] = []
        while self._running and (end := self.next_end()) <= time:
            self._decode(end)
            while self._running and self._running[0][0] <= self._num_steps + _EPSILON:
                ended.append(heapq.heappop(self._running)[1])
            self._fill()
        if self._running and time > self._clock:
            self._decode(time)
        self._clock = max(self._clock, time)
        self.num_open -= len(ended)
        return ended

    def update(self, time: float) -> float:
        """Take new weights at a time up to which the engine pauses; return how many tokens it computes again."""
        tokens = sum(length - (end - self._num_steps) + prompt for end, _, length, prompt in self._running)
        self._clock = time + tokens * self._costs.recompute_s
        self.busy_s += self._clock - time
        return tokens

    def _decode(self, time: float) -> None:
        self._num_steps += (time - self._clock) / self._step_s()
        self.busy_s += time - self._clock
        self._clock = time

    def _step_s(self) -> float:
        return self._costs.decode_step_s + self._costs.decode_sequence_s * len(self._running)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._costs.max_num_seqs:
            ticket, length, prompt = self._waiting.popleft()
            heapq.heappush(self._running, (self._num_steps + length, ticket, length, prompt))


class _Simulation:
    """A run at a moment `now`, after some steps."""

    def __init__(self, workload: Workload, costs: Costs, setting: Setting, rng: random.Random) -> None:
        self._workload, self._costs, self._setting, self._rng = workload, costs, setting, rng
        self._scheduler = Scheduler(
            prompts_per_step=workload.prompts_per_step, staleness=setting.staleness, window=setting.window
        )
        self._engines = [_Engine(costs) for _ in range(setting.num_engines)]
        # By ticket: how many of its samples have not ended, and the tokens of all its samples.
        self._open: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        self._now = self._waited_s = self._recomputed = 0.0
        self.lags: list[int] = []

    def totals(self) -> tuple[float, float, float, float]:
        """Return the time, the seconds that the trainer waited and that engines worked, and the tokens recomputed."""
        return self._now, self._waited_s, sum(engine.busy_s for engine in self._engines), self._recomputed

    def step(self, step: int) -> None:
        """Simulate a step: admit, take, train, settle, push, release."""
        costs, setting, scheduler = self._costs, self._setting, self._scheduler
        self._admit(step - 1)
        num_tokens = 0
        for _ in range(self._workload.prompts_per_step):
            self._wait(lambda: scheduler.takeable() is not None)
            number = scheduler.takeable()
            assert number is not None, "the wait ended"
            scheduler.take(number)
            num_tokens += self._tokens.pop(number)
            self.lags.append(step - 1 - scheduler.pipeline[number])
        token_s = costs.train_token_s + (costs.old_logprobs_token_s if setting.has_old_logprobs else 0.0)
        self._run_until(self._now + costs.train_step_s + num_tokens * token_s / setting.num_trainers)
        if setting.finish:
            self._wait(lambda: not self._open)
        self._run_until(self._now)
        self._now += costs.sync_s
        self._recomputed += sum(engine.update(self._now) for engine in self._engines)
        scheduler.release()

    def _admit(self, version: int) -> None:
        """Admit what the pipeline has room for; each sample goes to the engine that has the fewest unfinished."""
        for _ in range(self._scheduler.admissible()):
            number, group = self._scheduler.admit(version), self._workload.draw(self._rng)
            self._open[number] = len(group.responses)
            self._tokens[number] = sum(group.responses) + len(group.responses) * group.prompt
            for length in group.responses:
                min(self._engines, key=lambda engine: engine.num_open).add(number, length, group.prompt)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Let engines work until something holds; it may change whenever a ticket is done."""
        began = self._now
        events = [(engine.next_end(), index) for index, engine in enumerate(self._engines)]
        heapq.heapify(events)
        while not until():
            is_done = False
            while not is_done:
                end, index = events[0]
                assert end < math.inf, "all that was admitted is under way"
                self._now = max(self._now, end)
                is_done = self._record(self._engines[index].run_until(end))
                heapq.heapreplace(events, (self._engines[index].next_end(), index))
        self._waited_s += self._now - began

    def _run_until(self, time: float) -> None:
        """Let engines work up to a time."""
        self._now = time
        for engine in self._engines:
            self._record(engine.run_until(time))

    def _record(self, ended: Iterable[int]) -> bool:
        """Note that samples of these tickets ended; return whether a ticket is done."""
        is_done = False
        for ticket in ended:
            self._open[ticket] -= 1
            if not self._open[ticket]:
                del self._open[ticket]
                self._scheduler.done(ticket)
                is_done = True
        return is_done
