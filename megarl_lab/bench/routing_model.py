"""Simulate how engines share a step's samples: the routers are those of runs, time is added up instead of spent."""

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field, replace

from megarl.config.generation import Sampling
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.routing import Router
from megarl.rollout.stepping import REPORT_S, EngineLoad, EngineStepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A step's samples, whose lengths have a long tail.

    Lengths are log-normal: sigma_prompts says how much prompts differ, sigma_samples how much samples of a prompt do.
    """

    num_prompts: int = 8
    num_samples: int = 32
    prompt_tokens: int = 32
    mean: float = 100.0
    sigma_prompts: float = 1.4
    sigma_samples: float = 0.4
    most: int = 800

    def lengths(self, seed: int) -> list[list[int]]:
        """Draw the length of each sample, by prompt."""
        draw = random.Random(seed)
        middle = math.log(self.mean) - (self.sigma_prompts**2 + self.sigma_samples**2) / 2
        found = []
        for _ in range(self.num_prompts):
            prompt = draw.gauss(middle, self.sigma_prompts)
            each = [math.exp(prompt + draw.gauss(0.0, self.sigma_samples)) for _ in range(self.num_samples)]
            found.append([min(self.most, max(4, round(length))) for length in each])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How engines shared samples: the seconds until all were finished, and what share of it an engine was idle.

    num_steps: how many steps the engines took in all, with `num_sequences` in them added up, and `prompt_tokens` in
    those that computed prompts. driver_s: the driver's CPU seconds, which the engines' cores may have to give.
    """

    step_s: float
    idle: float
    num_tokens: int
    num_moved: int
    num_steps: int
    num_sequences: int
    prompt_tokens: int
    driver_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Sample:
    """A request under way, how long its response will be, and its tokens so far."""

    request: GenerationRequest
    length: int
    written: int = 0


@dataclass(slots=True, kw_only=True)
class _Engine:
    """An engine and its samples, of which the first `num_slots` that came are decoded."""

    cost: EngineStepCost
    num_slots: int
    now: float = 0.0
    busy_s: float = 0.0
    reported_at: float = 0.0
    num_steps: int = 0
    num_sequences: int = 0
    prompt_tokens: int = 0
    samples: dict[int, _Sample] = field(default_factory=dict)

    def step(self) -> list[int]:
        """Take a step; return the requests that finish in it."""
        batch = dict(itertools.islice(self.samples.items(), self.num_slots))
        prompt_tokens = sum(len(each.request.token_ids) for each in batch.values() if not each.written)
        took = self.cost.base_s + self.cost.sequence_s * len(batch) + self.cost.prompt_token_s * prompt_tokens
        self.now, self.busy_s = self.now + took, self.busy_s + took
        self.num_steps, self.num_sequences = self.num_steps + 1, self.num_sequences + len(batch)
        self.prompt_tokens += prompt_tokens
        for each in batch.values():
            each.written += 1
        return [key for key, each in batch.items() if each.written == each.length]


class SimulatedEngines:
    """Engines of equal cost, whose requests a router deals and moves. Each takes `delay_s` to arrive."""

    def __init__(
        self, router: Router, *, num_engines: int, num_slots: int, cost: EngineStepCost, delay_s: float
    ) -> None:
        self._router, self._delay_s = router, delay_s
        self._engines = [_Engine(cost=cost, num_slots=num_slots) for _ in range(num_engines)]
        self._ids = itertools.count()
        self._outbox: list[_Sample] = []
        # Samples on their way: when and where they arrive, and by which id.
        self._posted: list[tuple[float, int, int, _Sample]] = []
        self._num_moved = 0

    def run(self, mix: Mix, seed: int) -> Sharing:
        """Generate a step's samples."""
        start, self._num_moved = max(engine.now for engine in self._engines), 0
        for engine in self._engines:
            engine.now, engine.busy_s, engine.reported_at = start, 0.0, start
            engine.num_steps = engine.num_sequences = engine.prompt_tokens = 0
        lengths = mix.lengths(seed)
        for prompt, its_lengths in enumerate(lengths):
            for length in its_lengths:
                request = GenerationRequest(
                    token_ids=(prompt,) * mix.prompt_tokens,
                    seed=0,
                    sampling=Sampling(temperature=1.0),
                    max_tokens=mix.most,
                    may_move=True,
                )
                self._outbox.append(_Sample(request=request, length=length))
        self._place(start)
        while self._posted or any(engine.samples for engine in self._engines):
            self._advance()
        end = max(engine.now for engine in self._engines)
        idle = 1 - sum(engine.busy_s for engine in self._engines) / (len(self._engines) * (end - start))
        return Sharing(
            step_s=end - start,
            idle=idle,
            num_tokens=sum(map(sum, lengths)),
            num_moved=self._num_moved,
            num_steps=sum(engine.num_steps for engine in self._engines),
            num_sequences=sum(engine.num_sequences for engine in self._engines),
            prompt_tokens=sum(engine.prompt_tokens for engine in self._engines),
        )

    def _advance(self) -> None:
        """Let a sample arrive or an engine take a step, whichever comes first."""
        working = [i for i, engine in enumerate(self._engines) if engine.samples]
        first = min(working, key=lambda i: self._engines[i].now, default=-1)
        if self._posted and (first < 0 or self._posted[0][0] <= self._engines[first].now):
            arrives, to, key, sample = heapq.heappop(self._posted)
            engine = self._engines[to]
            if not engine.samples:
                engine.now = max(engine.now, arrives)
            engine.samples[key] = sample
            return
        engine = self._engines[first]
        if (done := engine.step()) or engine.now >= engine.reported_at + REPORT_S:
            engine.reported_at = engine.now
            for key in done:
                self._router.ended(key, engine.samples.pop(key).written)
            written = {key: each.written for key, each in engine.samples.items()}
            self._router.heard(first, EngineLoad(kv_tokens=0, written=written, cost=engine.cost))
            self._place(engine.now)
            if not self._outbox:
                self._move(engine.now)

    def _place(self, now: float) -> None:
        placed = self._router.place([each.request for each in self._outbox], range(len(self._engines)))
        for i in sorted(placed):
            self._send(placed[i], next(self._ids), self._outbox[i], now)
        self._outbox = [each for i, each in enumerate(self._outbox) if i not in placed]

    def _send(self, to: int, key: int, sample: _Sample, now: float) -> None:
        self._router.sent(to, {key: sample.request})
        heapq.heappush(self._posted, (now + self._delay_s, to, key, sample))

    def _move(self, now: float) -> None:
        for move in self._router.moves(range(len(self._engines))):
            for key in move.keys:
                # Otherwise it is still on its way, and then it stays.
                if (sample := self._engines[move.source].samples.pop(key, None)) is None:
                    continue
                self._router.ended(key)
                if move.goes_on:
                    self._num_moved += 1
                    ids, left = sample.request.token_ids, sample.length - sample.written
                    request = replace(
                        sample.request,
                        token_ids=(*ids, *[0] * sample.written),
                        num_before=sample.written,
                        max_tokens=sample.request.max_tokens - sample.written,
                    )
                    key, sample = next(self._ids), _Sample(request=request, length=left)
                else:
                    sample.written = 0
                # It is asked for first.
                self._send(move.target, key, sample, now + self._delay_s)
