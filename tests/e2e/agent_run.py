"""Run in a process of its own (`RankPool`): one vLLM engine and one environment worker, without Ray."""

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.environments.worker import EnvironmentWorker, WorkerSpec
from megarl.host import loop
from megarl.rollout.conversations import Conversation
from megarl.rollout.engine import Completion, GenerationRequest, VllmEngine
from megarl.rollout.engine_spec import EngineSpec
from megarl.rollout.regenerate import spans_of
from megarl.rollout.source import Doing, SamplingPlan, collect
from megarl.rollout.vllm_source import VllmSource
from megarl.types import Prompt, Sample
from megarl.types.episodes import EpisodeReply, StartRequest, TriesRequest, TurnRequest
from tests.e2e.engines import running
from tests.helpers.loops import begin_groups, turns
from tests.helpers.rank_pool import RankContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Finished samples, and what the engine returned for each request, with the request's prompt and seed."""

    samples: tuple[Sample, ...]
    returned: list[tuple[tuple[int, ...], int, Completion]]


@dataclass
class _World:
    """The engine and the host, in a loop of its own, as `VllmSource` calls them.

    Requests are generated one batch after the other.
    """

    engine: VllmEngine
    host: EnvironmentWorker
    host_loop: asyncio.AbstractEventLoop
    returned: list[tuple[tuple[int, ...], int, Completion]] = field(default_factory=list)
    asked: "list[tuple[GenerationRequest, asyncio.Future[Completion]]]" = field(default_factory=list)
    num_started: int = 0

    def generate(self, request: GenerationRequest) -> "asyncio.Future[Completion]":
        completion: asyncio.Future[Completion] = loop.event_loop().create_future()
        self.asked.append((request, completion))
        return completion

    def wait(self, work: "asyncio.Future[None]", *, timeout_s: float, doing: Doing) -> None:
        loop.wait(self._serve(work, timeout_s, doing))

    async def _serve(self, work: "asyncio.Future[None]", timeout_s: float, doing: Doing) -> None:
        deadline = time.monotonic() + timeout_s
        while not work.done():
            assert time.monotonic() < deadline, doing()
            asked, self.asked = self.asked, []
            completions = self.engine.generate([request for request, _ in asked]) if asked else []
            for (request, asked_for), completion in zip(asked, completions, strict=True):
                self.returned.append((request.token_ids, request.seed, completion))
                asked_for.set_result(completion)
            await turns()
            if not self.asked:
                await asyncio.sleep(0.01)

    def parts(self) -> "dict[asyncio.Future[Completion], Completion]":
        raise AssertionError("nothing is resumed")

    def start(self, request: StartRequest) -> Conversation:
        self.num_started += 1
        reply = self._reply(self.host.start(self.num_started, request))
        return Conversation(key=self.num_started, worker=0, reply=reply)

    def act(self, conversation: Conversation, request: TurnRequest | TriesRequest) -> None:
        conversation.reply = self._reply(self.host.act(conversation.key, request))

    def end(self, conversation: Conversation) -> None:
        asyncio.run_coroutine_threadsafe(self.host.close(conversation.key), self.host_loop)

    def _reply(self, work: Coroutine[Any, Any, EpisodeReply]) -> "asyncio.Future[EpisodeReply]":
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.host_loop), loop=loop.event_loop())


def converse(
    _: RankContext, engine: EngineSpec, host: WorkerSpec, prompts: Sequence[Prompt], plan: SamplingPlan
) -> Outcome:
    """Sample the conversations of prompts, and each of their turns once more from the samples, as `regenerate` does."""
    host_loop = asyncio.new_event_loop()
    threading.Thread(target=host_loop.run_forever, daemon=True).start()
    with running(engine) as started:
        world = _World(engine=started, host=EnvironmentWorker(host), host_loop=host_loop)
        source = VllmSource(world, world, host.config)
        rollout = collect(world.wait, begin_groups(source, prompts, plan), timeout_s=200.0)
        spans = [span for sample in rollout.samples for span in spans_of(Path("again"), sample)]
        for span, completion in zip(spans, started.generate([span.request(plan) for span in spans]), strict=True):
            span.compare(completion)
    return Outcome(samples=rollout.samples, returned=world.returned)
