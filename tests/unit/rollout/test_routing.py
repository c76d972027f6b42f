"""Which engine works on which request; all values are worked out by hand."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.config import Config, from_dict
from megarl.config.check_engines import check_schedule
from megarl.config.generation import Sampling
from megarl.errors import ConfigError
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.routing import (
    ByLoad,
    EngineState,
    InTurns,
    RequestMove,
    deal_requests,
    find_moves,
    free_kv_tokens,
    place_requests,
    router_of,
)
from megarl.rollout.stepping import EngineLoad, EngineStepCost
from megarl.types import RowImage


def requests(prompts: Sequence[int]) -> list[GenerationRequest]:
    return [
        GenerationRequest(token_ids=(prompt,), seed=i, sampling=Sampling(temperature=1.0), max_tokens=4)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("prompts", "order", "engines"),
    [
        ([7, 7, 8, 8], [0], [0, 0, 0, 0]),
        # A prompt's samples stay together, whatever lies between them.
        ([7, 7, 8, 8, 9, 9], [0, 1], [0, 0, 1, 1, 0, 0]),
        ([7, 8, 7, 9, 8, 7], [0, 1, 2], [0, 1, 0, 2, 1, 0]),
        # Too few prompts: no engine stays idle.
        ([7, 7, 7], [0, 1], [0, 1, 0]),
        ([7], [0, 1, 2], [0]),
        ([], [0, 1], []),
        # Engine 1 has less to do than engine 2, and engine 0 is dead.
        ([7, 8, 9], [1, 2], [1, 2, 1]),
    ],
)
def test_deal(prompts: Sequence[int], order: list[int], engines: list[int]) -> None:
    assert deal_requests(requests(prompts), order) == engines


def request(prompt: int = 7, *, length: int = 1, max_tokens: int = 100, **given: Any) -> GenerationRequest:
    """A request whose sample may move, as in training."""
    sampling = Sampling(temperature=1.0)
    return GenerationRequest(
        token_ids=(prompt,) * length, seed=0, sampling=sampling, max_tokens=max_tokens, may_move=True, **given
    )


def engine(count: int, *, free: float = math.inf, written: Mapping[int, int] | None = None) -> EngineState:
    """An engine with requests 0 … count − 1."""
    return EngineState(
        requests={key: request(key) for key in range(count)},
        free_tokens=free,
        written=written or {},
        cost=EngineStepCost(base_s=1.0, sequence_s=0.01, prompt_token_s=0.001),
    )


def place(
    asked: Sequence[GenerationRequest], *engines: EngineState, num_slots: int = 8, typical: float = 0.0
) -> list[int | None]:
    found = place_requests(asked, dict(enumerate(engines)), num_slots=num_slots, typical=typical)
    return [found.get(i) for i in range(len(asked))]


def test_the_next_request_goes_to_the_engine_with_the_most_free_kv_cache() -> None:
    """Each takes 10 tokens for its prompt, and 20 that its response is expected to have."""
    asked = [request(i, length=10) for i in range(4)]
    assert place(asked, engine(1, free=100.0), engine(3, free=150.0), typical=20.0) == [1, 1, 0, 1]


def test_samples_of_a_prompt_stay_together_up_to_an_engines_share() -> None:
    """Of 8 requests on two engines, each has a share of 4; of 24, of 12."""
    assert place([request(7)] * 8, engine(0), engine(0), num_slots=256) == [0] * 4 + [1] * 4
    asked = [request(prompt) for prompt in (7, 8, 9) for _ in range(8)]
    assert place(asked, engine(0), engine(0), num_slots=256) == [0] * 8 + [1] * 8 + [0] * 4 + [1] * 4


def test_an_engine_has_a_quarter_more_requests_than_places_and_the_rest_waits() -> None:
    assert place([request(i) for i in range(4)], engine(4), engine(4), num_slots=4) == [0, 1, None, None]
    # Without room for a prompt of 10 and a response of 30 tokens; but a response of at most 5 has room.
    full = [engine(1, free=39.0), engine(2, free=15.0)]
    assert place([request(length=10)], *full, typical=30.0) == [None]
    assert place([request(length=10, max_tokens=5)], *full, typical=30.0) == [0]
    # An engine without requests cannot wait for room.
    assert place([request(length=10)], full[0], engine(0, free=0.0), typical=30.0) == [1]


def test_a_conversation_goes_first_and_stays_at_its_engine_unless_that_is_over_budget() -> None:
    turn = request(length=10, num_before=5, engine=1)
    assert place([request(8), turn], engine(0), engine(4), num_slots=4) == [0, 1]
    assert place([request(8), turn], engine(4), engine(5), num_slots=4) == [None, 0]
    assert place([turn], engine(1, free=100.0), engine(1, free=39.0), typical=30.0) == [0]
    # Its engine has died.
    assert place([replace(turn, engine=2)], engine(1), engine(0)) == [1]


def test_free_kv_tokens() -> None:
    """Two samples of a prompt of 3 tokens, of which one has 40; one of a prompt of 5 may have 10. 20 are expected."""
    requests = {0: request(7, length=3), 1: request(7, length=3), 2: request(8, length=5, max_tokens=10)}
    load = EngineLoad(kv_tokens=1000, written={0: 40}, cost=None)
    assert free_kv_tokens(requests, load, typical=20.0, shares_prompts=True) == 1000 - (3 + 5) - (40 + 20 + 10)
    assert free_kv_tokens(requests, load, typical=20.0, shares_prompts=False) == 1000 - (3 + 3 + 5) - (40 + 20 + 10)


def test_equal_ids_that_show_other_images_are_other_prompts() -> None:
    a, b = (request(length=3, images=(RowImage(places=np.array([1]), digest=digest),)) for digest in "ab")
    assert deal_requests([a, b, a], [0, 1]) == [0, 1, 0]
    load = EngineLoad(kv_tokens=100, written={}, cost=None)
    assert free_kv_tokens({0: a, 1: b, 2: a}, load, typical=10.0, shares_prompts=True) == 100 - (3 + 3) - 3 * 10
    # The engine of the request before has not the most room.
    assert place([a, a], engine(1, free=50.0), engine(3, free=40.0), typical=10.0) == [0, 0]
    assert place([a, b], engine(1, free=50.0), engine(3, free=40.0), typical=10.0) == [0, 1]


def moves(*engines: EngineState, num_slots: int = 8) -> list[RequestMove]:
    return find_moves(dict(enumerate(engines)), num_slots=num_slots)


def test_an_idle_engine_takes_half_of_what_waits_elsewhere_the_latest_first() -> None:
    waits = dict.fromkeys(range(5, 8), 0)
    busy = engine(8, written=dict.fromkeys(range(5), 9) | waits)
    assert moves(engine(0), busy) == [RequestMove(source=1, target=0, keys=(7, 6, 5))]
    # What is not reported may run, unless all places are taken.
    assert moves(engine(0), engine(8)) == []
    # Of 20 at 8 places, ten move to the first idle engine, and none to the second: the source takes part in one move.
    keys = tuple(range(19, 9, -1))
    assert moves(engine(20), engine(0), engine(0)) == [RequestMove(source=0, target=1, keys=keys)]
    assert moves(engine(0), engine(1)) == []


def test_places_that_are_free_are_filled_with_what_waits_for_one_elsewhere() -> None:
    """Nine requests at eight places: one waits. The other engine has two, unless it has no memory left."""
    full = engine(9, written=dict.fromkeys(range(8), 9))
    assert moves(full, engine(2, written={0: 9, 1: 9})) == [RequestMove(source=0, target=1, keys=(8,))]
    assert moves(full, engine(2, written={0: 9, 1: 9}, free=-1.0)) == []
    assert moves(engine(8), engine(2)) == []


def test_running_requests_move_to_an_idle_engine_where_that_pays() -> None:
    """A request with n tokens of at most 100 is expected to get min(n, 100 − n) more; a sequence costs 10 ms a step.

    Of four, the two with the most left move: 1 with 50 and 2 with 49. Each step saves the time of the two that stay,
    49 · 20 ms; that is more than twice the 0.1 s of the move and the 50 + 49 + 2 tokens at 1 ms that are computed
    again. With a hundredth of what a sequence costs, nothing pays.
    """
    busy = engine(4, written={0: 90, 1: 50, 2: 49, 3: 1})
    assert moves(engine(0), busy) == [RequestMove(source=1, target=0, keys=(1, 2), goes_on=True)]
    cheap = EngineStepCost(base_s=1.0, sequence_s=0.0001, prompt_token_s=0.001)
    assert moves(engine(0), replace(busy, cost=cheap)) == []
    assert moves(engine(0), replace(busy, cost=None)) == []
    # One alone has nobody to leave; one engine at work does not take running ones.
    assert moves(engine(0), engine(1, written={0: 50})) == []
    assert moves(engine(1, written={0: 9}), busy) == []


def test_of_running_requests_only_as_many_move_as_pay() -> None:
    """With 15 tokens left, the second saves 15 · 20 ms, less than twice (0.1 + 0.067) s; the first 50 · 30 ms."""
    cost = EngineStepCost(base_s=1.0, sequence_s=0.01, prompt_token_s=0.001)
    busy = replace(engine(4, written={0: 50, 1: 15, 2: 5, 3: 5}), cost=cost)
    assert moves(engine(0), busy) == [RequestMove(source=1, target=0, keys=(0,), goes_on=True)]


def test_requests_that_end_with_a_text_stay_once_they_run() -> None:
    """The text may begin before the move and end after it."""
    busy = engine(4, written=dict.fromkeys(range(4), 50))
    sampling = Sampling(temperature=1.0, stop=("</answer>",))
    stopped = replace(busy, requests={key: replace(r, sampling=sampling) for key, r in busy.requests.items()})
    assert len(moves(engine(0), busy)[0].keys) == 2
    assert moves(engine(0), stopped) == []


def test_samples_that_must_not_depend_on_time_stay_once_they_run() -> None:
    """As those of a validation."""
    busy = engine(4, written={0: 50, 1: 50, 2: 50, 3: 0})
    fixed = replace(busy, requests={key: replace(r, may_move=False) for key, r in busy.requests.items()})
    assert moves(engine(0), replace(fixed, written=dict.fromkeys(range(4), 50))) == []
    # What has no tokens begins with its own seed wherever it is.
    assert moves(engine(0), fixed) == [RequestMove(source=1, target=0, keys=(3,))]


def config_of(
    *, deterministic: bool = False, num_engines: int = 2, routing: str | None = None, **rollout: Any
) -> Config:
    engine, schedule = {"num_engines": num_engines, "max_num_seqs": 4}, {"routing": routing}
    return from_dict(
        Config,
        {
            "model": {"path": "m"},
            "run": {"deterministic": deterministic},
            "rollout": {"engine": engine, "schedule": schedule, **rollout},
        },
    )


def test_by_load_counts_requests_that_are_under_way_between_engines() -> None:
    """Engine 0 has four requests, of which two are about to go to engine 1, which thus is not idle any more."""
    router = ByLoad(config_of().rollout.engine)
    router.sent(0, {key: request(key) for key in range(4)})
    router.heard(0, EngineLoad(kv_tokens=0, written=dict.fromkeys(range(4), 0), cost=None))
    assert router.moves([0, 1]) == [RequestMove(source=0, target=1, keys=(3, 2))]
    assert router.moves([0, 1]) == []
    # One comes with another id and one finished before it could be taken: engine 1 is idle again.
    router.ended(2)
    router.ended(3, 10)
    assert router.moves([0, 1]) == [RequestMove(source=0, target=1, keys=(1,))]
    router.sent(1, {1: request(1)})
    assert router.place([request(8), request(9)], [0, 1]) == {0: 0, 1: 1}
    # The only finished response had 10 tokens: with prompts of 1, 11 tokens are needed beside the first request's.
    router.heard(0, EngineLoad(kv_tokens=21, written={0: 5}, cost=None))
    router.heard(1, EngineLoad(kv_tokens=22, written={1: 5}, cost=None))
    assert router.place([request(8), request(9)], [0, 1]) == {0: 1}


@pytest.mark.parametrize(
    ("changes", "router"),
    [
        ({}, ByLoad),
        ({"routing": "in_turns"}, InTurns),
        ({"deterministic": True}, InTurns),
        ({"source": "regenerate"}, InTurns),
        ({"num_engines": 1}, InTurns),
    ],
)
def test_bits_that_must_not_depend_on_time_are_dealt_in_turns(changes: dict[str, Any], router: type[Any]) -> None:
    config = config_of(**changes)
    assert type(router_of(config.rollout, deterministic=config.run.deterministic)) is router


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"deterministic": True}, "run.deterministic=true"),
        ({"source": "regenerate"}, "rollout.source=regenerate"),
    ],
)
def test_routing_by_load_is_refused_where_it_would_change_bits(changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout.schedule.routing: got by_load with {cause}, but"):
        check_schedule(config_of(routing="by_load", **changes))
