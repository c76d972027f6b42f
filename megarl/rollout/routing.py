"""Decide which engine works on which request, without clock or IO.

`in_turns` gives every request to an engine at once, where it stays: the result depends on nothing but the requests.
`by_load` keeps requests back until an engine has a place and memory for them, so that whichever engine is through
first gets the next one; and when no more are left, idle engines take requests over from the fullest ones.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Protocol

from megarl.config.engine import EngineConfig
from megarl.config.generation import RolloutConfig
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.stepping import EngineLoad, EngineStepCost

# An engine may have this many more requests than it decodes at a time: they begin without the driver.
SPARE = 0.25
# Seconds from the decision that a request moves until the other engine has it.
MOVE_S = 0.1
# How often what a move costs its requests it must save them: nobody knows how long they will be.
MARGIN = 2.0
# The mean length of responses is that of about this many.
_NUM_LENGTHS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMove:
    """Requests, by id, that go from one engine to another.

    goes_on: whether samples keep the tokens that they have; otherwise they begin again, and become what they would have
    been.
    """

    source: int
    target: int
    keys: tuple[int, ...]
    goes_on: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """An engine as the driver knows it.

    requests: those that it has, by id, without those that are about to leave it; num_coming: how many are about to
    come. written: tokens so far by id, as last reported. free_tokens: KV tokens that are neither used nor expected to
    be by its requests. cost: of its steps, if known.
    """

    requests: Mapping[int, GenerationRequest] = field(default_factory=dict)
    num_coming: int = 0
    written: Mapping[int, int] = field(default_factory=dict)
    free_tokens: float = math.inf
    cost: EngineStepCost | None = None

    @property
    def count(self) -> int:
        return len(self.requests) + self.num_coming


def _content(request: GenerationRequest) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return what an engine reads: ids, and which images they show. Equal ids may show others."""
    return request.token_ids, tuple(image.digest for image in request.images)


def deal_requests(requests: Sequence[GenerationRequest], order: Sequence[int]) -> list[int]:
    """Assign requests to engines, which take turns in the given order; return the engine of each request.

    Requests with the same prompt go to one engine, which then uses its prefix cache; distinct prompts are assigned in
    turn. If there are fewer prompts than engines, single requests are assigned in turn. A request that names its engine
    goes there if it is among them.
    """
    prompts = {content: i for i, content in enumerate(dict.fromkeys(_content(r) for r in requests))}
    by_prompt = len(prompts) >= len(order)
    return [
        r.engine
        if r.engine is not None and r.engine in order
        else order[(prompts[_content(r)] if by_prompt else i) % len(order)]
        for i, r in enumerate(requests)
    ]


def free_kv_tokens(
    requests: Mapping[int, GenerationRequest], load: EngineLoad, *, typical: float, shares_prompts: bool
) -> float:
    """Return the KV tokens of an engine that its requests neither use nor are expected to use.

    typical: the expected length of a response. shares_prompts: whether equal prompts are in the cache once.
    """
    prompts: dict[object, int] = {}
    responses = 0.0
    for key, request in requests.items():
        ids, digests = _content(request)
        # Whole prompts are too long to be compared with each other at every reply.
        prompts[(len(ids), ids[:8], ids[-8:], digests) if shares_prompts else key] = len(ids)
        responses += max(load.written.get(key, 0), min(typical, request.max_tokens))
    return load.kv_tokens - sum(prompts.values()) - responses


def place_requests(
    requests: Sequence[GenerationRequest], engines: Mapping[int, EngineState], *, num_slots: int, typical: float
) -> dict[int, int]:
    """Return the engine of each request, by its position, that one of the engines is to have now; the others wait.

    Samples that have begun come first. A request goes to the engine that it names, which has its prefix, else to that
    of the request before it if that has the same prompt and not more than its share of all requests, else to the engine
    with the most free KV cache. An engine is over budget and gets none with (1 + `SPARE`) · `num_slots` requests, or
    without room for a prompt and a response of `typical` length; an engine without requests always gets one.
    """
    counts = {i: engine.count for i, engine in engines.items()}
    free = {i: engine.free_tokens for i, engine in engines.items()}
    most = math.ceil((1 + SPARE) * num_slots)
    share = math.ceil((sum(counts.values()) + len(requests)) / len(engines))
    found: dict[int, int] = {}
    prompt: tuple[tuple[int, ...], tuple[str, ...]] | None = None
    home = -1
    begun = [i for i, request in enumerate(requests) if request.num_before]
    new = (i for i, request in enumerate(requests) if not request.num_before)
    for position in chain(begun, new):
        request = requests[position]
        needed = len(request.token_ids) + min(typical, request.max_tokens)
        able = [i for i in engines if not counts[i] or (counts[i] < most and free[i] >= needed)]
        if not able:
            break
        if request.engine in able:
            engine = request.engine
        elif _content(request) == prompt and home in able and counts[home] < share:
            engine = home
            needed -= len(request.token_ids)
        else:
            engine = max(able, key=lambda i: (free[i], -counts[i], -i))
        counts[engine] += 1
        free[engine] -= needed
        found[position], prompt, home = engine, _content(request), engine
    return found


def find_moves(engines: Mapping[int, EngineState], *, num_slots: int) -> list[RequestMove]:
    """Return the moves with which engines that have too little to do take requests over from the fullest engine.

    Requests that wait there for one of `num_slots` places go to any engine with free places. Others go to idle engines
    alone, at most half of them: those that are reported to have no tokens, or else running ones, where that pays; see
    `_paying`.
    """
    counts = {i: engine.count for i, engine in engines.items()}
    # An engine takes part in one move at a time.
    available, moves = set(engines), list[RequestMove]()
    for target in sorted(engines, key=lambda i: (counts[i], i)):
        others = [i for i in available if i != target]
        is_idle = counts[target] == 0
        if target not in available or not others or not (is_idle or engines[target].free_tokens > 0):
            continue
        source = max(others, key=lambda i: (counts[i], -i))
        state, most = engines[source], (counts[source] - counts[target]) // 2
        if not is_idle:
            most = min(most, counts[source] - num_slots, num_slots - counts[target])
        sent = enumerate(state.requests)
        waiting = [k for n, k in sent if not state.written.get(k) and (k in state.written or n >= num_slots)]
        keys = waiting[::-1][: max(0, most)]
        running = _paying(state, most) if is_idle and not keys else []
        if keys or running:
            moves.append(RequestMove(source=source, target=target, keys=tuple(keys or running), goes_on=bool(running)))
            available -= {source, target}
    return moves


def _paying(state: EngineState, most: int) -> list[int]:
    """List up to `most` running requests that end earlier on an idle engine, in spite of what is computed again there.

    Lengths have a long tail: on average, what a sample has is no more than what is still to come, so its rest is taken
    to be as long, within its limit. In each step, those that leave and those that stay save what the others cost there,
    `EngineStepCost.sequence_s` each. Samples that end with a text stay, since one engine alone would see it whole.
    """
    if state.cost is None:
        return []
    movable = (key for key, r in state.requests.items() if r.may_move and not r.sampling.stop)
    running = {key: n for key in movable if (n := state.written.get(key, 0))}
    left = {key: min(n, state.requests[key].max_tokens - n) for key, n in running.items()}
    longest = sorted(left, key=lambda key: (-left[key], key))[:most]
    tokens = list(accumulate(len(state.requests[key].token_ids) + running[key] for key in longest))
    for n in range(len(longest), 0, -1):
        saved_s = left[longest[n - 1]] * (len(state.requests) - n) * state.cost.sequence_s
        if saved_s >= MARGIN * (tokens[n - 1] * state.cost.prompt_token_s + MOVE_S):
            return longest[:n]
    return []


class Router(Protocol):
    """Decides which engine works on which request; it is told of all that happens to requests."""

    def place(self, requests: Sequence[GenerationRequest], living: Sequence[int]) -> Mapping[int, int]:
        """Return the living engine of each request, by its position, that is to be sent now."""

    def moves(self, living: Sequence[int]) -> Sequence[RequestMove]:
        """Return the moves that are to be made now, when no request waits to be placed."""

    def sent(self, engine: int, requests: Mapping[int, GenerationRequest]) -> None:
        """Note that an engine was sent requests, by id."""

    def ended(self, key: int, num_tokens: int | None = None) -> None:
        """Note that a request has left its engine. num_tokens: its length if it has finished."""

    def heard(self, engine: int, load: EngineLoad) -> None:
        """Note an engine's load."""


class InTurns:
    """A router that deals all requests at once, see `deal_requests`; the engines with the fewest requests come first.

    Nothing depends on when engines finish what, so the same requests always go to the same engines.
    """

    def __init__(self, engine: EngineConfig | None = None) -> None:
        self._engine_of: dict[int, int] = {}

    def place(self, requests: Sequence[GenerationRequest], living: Sequence[int]) -> Mapping[int, int]:
        counts = dict.fromkeys(living, 0)
        for engine in self._engine_of.values():
            if engine in counts:
                counts[engine] += 1
        return dict(enumerate(deal_requests(requests, sorted(living, key=lambda i: (counts[i], i)))))

    def moves(self, living: Sequence[int]) -> Sequence[RequestMove]:
        return ()

    def sent(self, engine: int, requests: Mapping[int, GenerationRequest]) -> None:
        self._engine_of |= dict.fromkeys(requests, engine)

    def ended(self, key: int, num_tokens: int | None = None) -> None:
        self._engine_of.pop(key, None)

    def heard(self, engine: int, load: EngineLoad) -> None:
        """Ignore the load."""


class ByLoad:
    """A router that gives engines what they have room for, and moves requests to idle ones.

    See `place_requests` and `find_moves`.
    """

    def __init__(self, engine: EngineConfig) -> None:
        self._num_slots, self._shares_prompts = engine.max_num_seqs, engine.prefix_caching
        self._engine_of: dict[int, int] = {}
        self._requests: dict[int, dict[int, GenerationRequest]] = {}
        self._loads: dict[int, EngineLoad] = {}
        # By id, where requests are about to go.
        self._coming: dict[int, int] = {}
        self._states: dict[int, EngineState] = {}
        self._mean_length, self._num_lengths = 0.0, 0

    def place(self, requests: Sequence[GenerationRequest], living: Sequence[int]) -> Mapping[int, int]:
        engines = self._known(living)
        return place_requests(requests, engines, num_slots=self._num_slots, typical=self._mean_length)

    def moves(self, living: Sequence[int]) -> Sequence[RequestMove]:
        found = find_moves(self._known(living), num_slots=self._num_slots)
        for move in found:
            self._coming |= dict.fromkeys(move.keys, move.target)
            self._forget(move.source, move.target)
        return found

    def sent(self, engine: int, requests: Mapping[int, GenerationRequest]) -> None:
        for key in requests:
            self.ended(key)
        self._engine_of |= dict.fromkeys(requests, engine)
        self._requests.setdefault(engine, {}).update(requests)
        self._forget(engine)

    def ended(self, key: int, num_tokens: int | None = None) -> None:
        if num_tokens is not None:
            self._num_lengths = min(self._num_lengths + 1, _NUM_LENGTHS)
            self._mean_length += (num_tokens - self._mean_length) / self._num_lengths
        if (engine := self._engine_of.pop(key, None)) is not None:
            del self._requests[engine][key]
            self._forget(engine, self._coming.pop(key, engine))

    def heard(self, engine: int, load: EngineLoad) -> None:
        self._loads[engine] = load
        self._forget(engine)

    def _forget(self, *engines: int) -> None:
        for engine in engines:
            self._states.pop(engine, None)

    def _known(self, living: Sequence[int]) -> dict[int, EngineState]:
        for engine in living:
            if engine not in self._states:
                every, load = self._requests.get(engine, {}), self._loads.get(engine)
                free = math.inf
                if load is not None and load.kv_tokens:
                    shares, typical = self._shares_prompts, self._mean_length
                    free = free_kv_tokens(every, load, typical=typical, shares_prompts=shares)
                self._states[engine] = EngineState(
                    requests={key: request for key, request in every.items() if key not in self._coming},
                    num_coming=sum(target == engine for target in self._coming.values()),
                    written={} if load is None else load.written,
                    free_tokens=free,
                    cost=None if load is None else load.cost,
                )
        return {engine: self._states[engine] for engine in living}


ROUTERS: Mapping[str, Callable[[EngineConfig], Router]] = {"in_turns": InTurns, "by_load": ByLoad}


def router_of(rollout: RolloutConfig, *, deterministic: bool) -> Router:
    """Return the router of a run: the one that is set, or else `by_load` unless bits must not depend on time."""
    is_fixed = deterministic or rollout.source != "vllm" or rollout.engine.num_engines == 1
    return ROUTERS[rollout.schedule.routing or ("in_turns" if is_fixed else "by_load")](rollout.engine)
