"""Run in a process of its own (`RankPool`): one vLLM engine and one host of environments, without Ray."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megarl.environments.host import EpisodeHost, HostSpec, StartRequest, TurnRequest
from megarl.rollout.conversations import OnLost, OnReply
from megarl.rollout.engine import Completion, GenerationRequest, VllmEngine
from megarl.rollout.engine_spec import EngineSpec
from megarl.rollout.source import Doing, SamplingPlan
from megarl.rollout.vllm_source import OnCompletion, VllmSource
from megarl.types import Prompt, Sample
from tests.e2e.engines import running
from tests.helpers.rank_pool import RankContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Finished samples, and what the engine returned for each request, with the request's prompt and seed."""

    samples: tuple[Sample, ...]
    returned: list[tuple[tuple[int, ...], int, Completion]]


@dataclass
class _World:
    """The engine and the host as `VllmSource` calls them. Requests are generated one batch after the other."""

    engine: VllmEngine
    host: EpisodeHost
    loop: asyncio.AbstractEventLoop
    returned: list[tuple[tuple[int, ...], int, Completion]] = field(default_factory=list)
    asked: list[tuple[GenerationRequest, OnCompletion, int]] = field(default_factory=list)
    acting: list[tuple[Future[Any], OnReply]] = field(default_factory=list)
    num_started: int = 0

    def submit(self, requests: Sequence[GenerationRequest], tell: OnCompletion) -> None:
        self.asked += [(request, tell, i) for i, request in enumerate(requests)]

    def wait(self, until: Callable[[], bool], *, timeout_s: float, doing: Doing) -> None:
        deadline = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < deadline, doing()
            asked, self.asked = self.asked, []
            completions = self.engine.generate([request for request, _, _ in asked]) if asked else []
            for (request, tell, i), completion in zip(asked, completions, strict=True):
                self.returned.append((request.token_ids, request.seed, completion))
                tell(i, completion)
            done = [each for each in self.acting if each[0].done()]
            self.acting = [each for each in self.acting if each not in done]
            for future, heard in done:
                heard(future.result())
            if not asked and not done:
                time.sleep(0.01)

    def poll(self) -> None:
        raise AssertionError("it waits")

    def unfinished(self) -> list[tuple[OnCompletion, int, Completion]]:
        raise AssertionError("nothing is resumed")

    def start(self, request: StartRequest, tell: OnReply, lost: OnLost) -> int:
        self.num_started += 1
        work = self.host.start(self.num_started, request)
        self.acting.append((asyncio.run_coroutine_threadsafe(work, self.loop), tell))
        return self.num_started

    def act(self, key: int, request: TurnRequest, tell: OnReply) -> None:
        self.acting.append((asyncio.run_coroutine_threadsafe(self.host.act(key, request), self.loop), tell))

    def end(self, key: int) -> None:
        asyncio.run_coroutine_threadsafe(self.host.close(key), self.loop)


def converse(
    _: RankContext, engine: EngineSpec, host: HostSpec, prompts: Sequence[Prompt], plan: SamplingPlan
) -> Outcome:
    """Sample the conversations of prompts."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    with running(engine) as started:
        world = _World(engine=started, host=EpisodeHost(host), loop=loop)
        source = VllmSource(world, world, host.config)
        batch = source.submit(prompts, plan)
        source.wait(lambda: batch.is_complete, timeout_s=200.0)
    return Outcome(samples=batch.rollout().samples, returned=world.returned)
