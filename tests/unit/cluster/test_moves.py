"""What a group of engines does with requests that a router keeps back or moves; engines answer what they are told."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

from megarl.cluster.engines import EngineGroup
from megarl.cluster.remotes import Roster
from megarl.config.generation import Sampling
from megarl.host import loop
from megarl.rollout.engine import Completion, EngineReply, GenerationRequest
from megarl.rollout.routing import RequestMove
from megarl.rollout.source import SamplingPlan, collect
from megarl.rollout.stepping import EngineLoad
from megarl.rollout.vllm_source import VllmSource
from megarl.types import FinishReason, Prompt, Sample, version_spans
from tests.helpers.loops import begin_groups

LOAD = EngineLoad(kv_tokens=0, written={}, cost=None)


def completion(*token_ids: int, reason: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(
        token_ids=np.asarray(token_ids),
        logprobs=np.full(len(token_ids), -0.5, np.float32),
        finish_reason=reason,
        versions=version_spans(np.zeros(len(token_ids), np.int64)),
    )


class Engine:
    """A process with an engine that answers only what `reply` says; `taken`: what requests have when they are taken."""

    def __init__(self, index: int, roster: Roster) -> None:
        self.name, self.roster = f"engine {index}", roster
        self.added: dict[int, GenerationRequest] = {}
        self.taken: dict[int, Completion | None] = {}
        self.replies: asyncio.Queue[EngineReply | Exception] = asyncio.Queue()
        self.dies = False

    def call(self, method: Callable[..., Any], *args: Any) -> "Engine":
        self.result = getattr(self, method.__name__)(*args)
        return self

    async def answer(self) -> Any:
        result = self.result
        await asyncio.sleep(0)
        if self.dies:
            raise RayActorError
        return result

    @property
    def process(self) -> "Engine":
        return self

    def add(self, requests: Mapping[int, GenerationRequest]) -> None:
        self.added |= requests

    def take_out(self, keys: Collection[int]) -> dict[int, Completion | None]:
        return {key: self.taken[key] for key in keys if key in self.taken}

    def stream(self, method: Callable[..., Any]) -> "Engine":
        return self

    async def results(self) -> AsyncIterator[EngineReply]:
        while True:
            reply = await self.replies.get()
            if isinstance(reply, Exception):
                raise reply
            yield reply

    def reply(self, **completions: Completion) -> None:
        """Let requests finish: `k3` is the one with id 3."""
        self.replies.put_nowait(
            EngineReply(load=LOAD, completions={int(name[1:]): each for name, each in completions.items()})
        )


class Told:
    """A router that does what it is told, and notes what it is told of."""

    def __init__(self) -> None:
        self.to: Callable[[GenerationRequest], int | None] = lambda request: request.engine or 0
        self.next_moves: list[RequestMove] = []
        self.lengths: list[int] = []
        self.notes: list[Any] = []

    def place(self, requests: Sequence[GenerationRequest], living: Sequence[int]) -> dict[int, int]:
        found = ((i, self.to(request)) for i, request in enumerate(requests))
        return {i: engine for i, engine in found if engine is not None}

    def moves(self, living: Sequence[int]) -> list[RequestMove]:
        moves, self.next_moves = self.next_moves, []
        return moves

    def sent(self, engine: int, requests: Mapping[int, GenerationRequest]) -> None:
        self.notes.append((engine, sorted(requests)))

    def ended(self, key: int, num_tokens: int | None = None) -> None:
        self.notes.append((key, num_tokens))

    def heard(self, engine: int, load: EngineLoad) -> None:
        assert load is LOAD


class Run:
    """A group of two engines, and the source that samples from them."""

    def __init__(self) -> None:
        roster = Roster()
        self.engines, self.router = [Engine(i, roster) for i in range(2)], Told()
        self.group = EngineGroup(self.engines, timeout_s=1.0, router=self.router)  # type: ignore[arg-type]
        self.source = VllmSource(self)

    def generate(self, request: GenerationRequest) -> "asyncio.Future[Completion]":
        return self.group.generate(request)

    def wait(self, work: "asyncio.Future[None]", **_: Any) -> None:
        loop.wait(asyncio.wait_for(work, timeout=10.0))

    def parts(self) -> "dict[asyncio.Future[Completion], Completion]":
        return {}

    def turn(self) -> None:
        """Let everything happen that can."""

        async def turns() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        loop.wait(turns())


PLAN = SamplingPlan(step=1, num_samples=2, sampling=Sampling(temperature=1.0), max_response_tokens=9, run_seed=0)
PROMPTS = [Prompt(uid="a", token_ids=(1, 2), data_source="d", ground_truth="1")]


def begin(run: Run, plan: SamplingPlan) -> Callable[[], list[Sample]]:
    groups = begin_groups(run.source, PROMPTS, plan)
    run.turn()
    return lambda: list(collect(run.wait, groups, timeout_s=1.0).samples)


def tokens(sample: Sample) -> list[list[int]]:
    return [segment.token_ids.tolist() for segment in sample.segments]


def test_requests_that_are_kept_back_leave_when_an_engine_has_replied() -> None:
    run = Run()
    places = iter([0])
    run.router.to = lambda _: next(places, None)
    samples = begin(run, PLAN)
    (key,) = run.engines[0].added
    assert key == 0
    run.router.to = lambda _: 1
    run.engines[0].reply(k0=completion(8))
    run.turn()
    assert list(run.engines[1].added) == [1]
    run.engines[1].reply(k1=completion(9, 9))
    assert [tokens(sample) for sample in samples()] == [[[1, 2], [8]], [[1, 2], [9, 9]]]
    assert run.router.notes == [(0, [0]), (0, 1), (1, [1]), (1, 2)]


def test_a_sample_with_tokens_moves_as_a_request_with_a_segment_of_its_own() -> None:
    """And one without tokens as it is; the one that finishes meanwhile does not move."""
    run = Run()
    samples = begin(run, replace(PLAN, num_samples=3))
    engine, other = run.engines
    assert sorted(engine.added) == [0, 1, 2]
    engine.taken = {0: completion(7, 7, reason=FinishReason.ABORT), 1: None}
    run.router.next_moves = [RequestMove(source=0, target=1, keys=(0, 1, 2), goes_on=True)]
    engine.reply()
    engine.reply(k2=completion(5))
    run.turn()
    assert {key: (r.token_ids, r.num_before, r.max_tokens, r.engine) for key, r in other.added.items()} == {
        1: ((1, 2), 0, 9, None),
        3: ((1, 2, 7, 7), 2, 7, 1),
    }
    assert other.added[3].seed == engine.added[0].seed
    other.reply(k1=completion(6), k3=completion(8, 8))
    assert [tokens(sample) for sample in samples()] == [[[1, 2], [7, 7], [8, 8]], [[1, 2], [6]], [[1, 2], [5]]]
    assert run.group.num_moved == 1


def test_a_sample_that_was_thought_to_wait_begins_again_elsewhere() -> None:
    run = Run()
    samples = begin(run, PLAN)
    run.engines[0].taken = {1: completion(7, 7, reason=FinishReason.ABORT)}
    run.router.next_moves = [RequestMove(source=0, target=1, keys=(1,))]
    run.engines[0].reply(k0=completion(8))
    run.turn()
    assert run.engines[1].added == {1: run.engines[0].added[1]}
    run.engines[1].reply(k1=completion(7, 7, 7))
    assert [tokens(sample) for sample in samples()] == [[[1, 2], [8]], [[1, 2], [7, 7, 7]]]


@pytest.mark.parametrize("who", [0, 1])
def test_an_engine_dies_while_a_sample_moves(who: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is the one that has it, the sample begins again elsewhere; so does one that has no tokens yet."""
    run = Run()
    samples = begin(run, PLAN)
    engine = run.engines[who]
    run.engines[0].taken = {0: None, 1: None}
    run.router.next_moves = [RequestMove(source=0, target=1, keys=(0, 1))]

    async def is_replaceable(process: Engine, error: Exception, doing: str) -> bool:
        process.roster.lost[process.name] = process  # type: ignore[assignment]
        return isinstance(error, RayActorError)

    monkeypatch.setattr("megarl.cluster.engines.is_replaceable", is_replaceable)
    if who == 0:
        engine.dies = True
    else:
        engine.roster.lost[engine.name] = engine  # type: ignore[assignment]
    run.router.to = lambda _: 1 - who
    other = run.engines[1 - who]
    other.added.clear()
    run.engines[0].reply()
    run.turn()
    assert len(other.added) == 2
    first, second = sorted(other.added)
    other.reply(**{f"k{first}": completion(8), f"k{second}": completion(9)})
    assert [tokens(sample) for sample in samples()] == [[[1, 2], [8]], [[1, 2], [9]]]
    assert run.group.num_moved == 0


def test_samples_are_interrupted_and_go_on_later() -> None:
    """What is under way ends, with a segment of its own or not at all; further requests wait, new ones too."""
    run = Run()
    samples = begin(run, replace(PLAN, num_samples=3))
    engine = run.engines[0]
    engine.taken = {0: completion(7, 7, reason=FinishReason.ABORT), 1: None}
    # The third sample has finished, but its reply is on its way.
    engine.reply(k2=completion(5))
    run.group.pause()
    engine.added.clear()
    engine.reply()
    later = run.group.generate(
        GenerationRequest(token_ids=(3,), seed=0, sampling=Sampling(temperature=1.0), max_tokens=1)
    )
    run.turn()
    run.group.pause()
    assert engine.added == {}
    run.group.resume()
    run.turn()
    keys = {(r.token_ids, r.num_before): key for key, r in engine.added.items()}
    assert keys.keys() == {((1, 2), 0), ((1, 2, 7, 7), 2), ((3,), 0)}
    first, second, other = keys[(1, 2, 7, 7), 2], keys[(1, 2), 0], keys[(3,), 0]
    engine.reply(**{f"k{first}": completion(8, 8), f"k{second}": completion(6), f"k{other}": completion(4)})
    assert [tokens(sample) for sample in samples()] == [[[1, 2], [7, 7], [8, 8]], [[1, 2], [6]], [[1, 2], [5]]]
    assert later.result().token_ids.tolist() == [4]
    # They go on where they were.
    assert run.group.num_moved == 0


def test_engines_that_are_paused_serve_the_next_run() -> None:
    """A run that pauses engines may end so; the next one on the same cluster has them."""
    run = Run()
    run.group.pause()
    run.group.abort()
    begin(run, replace(PLAN, num_samples=1))
    assert len(run.engines[0].added) == 1


def test_each_token_keeps_the_experts_of_the_engine_that_sampled_it() -> None:
    """One layer and one expert: the second engine computes the first one's tokens again, by other experts."""
    run = Run()
    samples = begin(run, replace(PLAN, num_samples=1))

    def experts(*values: int) -> Any:
        return np.asarray(values, np.int16).reshape(-1, 1, 1)

    taken = completion(7, 7, reason=FinishReason.ABORT)
    # No engine has computed the last token.
    run.engines[0].taken = {0: replace(taken, routed_experts=experts(0, 1, 2))}
    run.router.next_moves = [RequestMove(source=0, target=1, keys=(0,), goes_on=True)]
    run.engines[0].reply()
    run.turn()
    # It leaves out the tokens whose experts are known.
    assert run.engines[1].added[1].num_routed == 3
    run.engines[1].reply(k1=replace(completion(8, 8), routed_experts=experts(13, 14)))
    (sample,) = samples()
    assert sample.routed_experts is not None
    assert sample.routed_experts.ravel().tolist() == [0, 1, 2, 13, 14, -1]
