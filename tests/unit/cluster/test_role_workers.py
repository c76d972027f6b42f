"""Which group of ranks a call goes to. The groups are fakes that write down what they are asked."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.algos.objectives import SftAlgorithm
from megarl.cluster.remotes import PendingCall, Process
from megarl.cluster.workers import RankGroup, RoleWorkers
from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.types import AlgoState
from megarl.types.messages import (
    ForwardRequest,
    ForwardResult,
    Head,
    LoadRequest,
    MicroBatchPlan,
    Part,
    Role,
    RoleSpec,
    StoreResult,
    UpdateRequest,
    UpdateResult,
)

# Rows go to ranks through Ray's object store; without one, Ray would start one that outlives these tests.
pytestmark = pytest.mark.usefixtures("ray_session")

TP2, DP2, ONE = LayoutConfig(tp=2), LayoutConfig(dp=2), LayoutConfig()
STORED = StoreResult(num_elements={}, checksums={})
ANSWERS = {"finish_checkpoint": True, "store_weights": STORED}
PLAN = MicroBatchPlan([[], []])


def spec(role: Role, layout: LayoutConfig) -> RoleSpec:
    head = Head.SCALAR if role is Role.CRITIC else Head.LM
    return RoleSpec(role=role, model=ModelConfig(), settings=ActorConfig(layout=layout), head=head)


ACTOR, REFERENCE, CRITIC = spec(Role.ACTOR, TP2), spec(Role.REFERENCE, DP2), spec(Role.CRITIC, DP2)


class FakeActor:
    """A rank of a group that writes down what it is asked, if it is the group's first; `log` is shared by all."""

    def __init__(self, group: str, rank: int, log: list[tuple[Any, ...]]) -> None:
        self.group, self.rank, self.log = group, rank, log
        self.answers: dict[str, Any] = dict(ANSWERS)
        self.call = SimpleNamespace(remote=self.answer)
        rows = {"forward": ForwardResult(quantities={group: {}}), "update": UpdateResult(metrics={}, before={})}
        self.forward, self.update = (
            SimpleNamespace(remote=partial(self.answer_with_rows, *each)) for each in rows.items()
        )

    def answer(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = method.__name__
        if self.rank == 0:
            self.log.append((self.group, name, *args, *kwargs.values()))
        return (3, 4)[self.rank] if name == "offload" else self.answers.get(name)

    def answer_with_rows(
        self, method: str, answer: Any, _: Any, indices: Any, request: ForwardRequest | UpdateRequest
    ) -> Any:
        if self.rank == 0:
            self.log.append((self.group, method, request.role))
        return answer


def group_of(name: str, layout: LayoutConfig, log: list[tuple[Any, ...]]) -> RankGroup:
    names = [f"{name} rank {i}" for i in range(layout.world_size)]
    processes = [Process(name=text, actor=FakeActor(name, i, log)) for i, text in enumerate(names)]
    return RankGroup(layout=layout, processes=processes)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the groups were asked, and the waits in between."""
    entries: list[tuple[Any, ...]] = []

    def wait_all(calls: Sequence[PendingCall[Any]], *, timeout_s: float, doing: str) -> list[Any]:
        entries.append(("wait", len(calls), doing))
        return [call.ref for call in calls]

    monkeypatch.setattr("megarl.cluster.workers.wait_all", wait_all)
    return entries


@pytest.fixture
def workers(log: list[tuple[Any, ...]]) -> RoleWorkers:
    return RoleWorkers([group_of("first", TP2, log), group_of("second", DP2, log)], timeout_s=1.0)


def loaded(workers: RoleWorkers, log: list[tuple[Any, ...]], *roles: RoleSpec) -> RoleWorkers:
    workers.load(LoadRequest(roles=roles, seed=3))
    log.clear()
    return workers


def test_every_group_loads_the_roles_of_its_layout_at_the_same_time(
    workers: RoleWorkers, log: list[tuple[Any, ...]]
) -> None:
    workers.load(LoadRequest(roles=(ACTOR, REFERENCE, CRITIC), seed=3, deterministic=True))
    assert log == [
        ("first", "load", LoadRequest(roles=(ACTOR,), seed=3, deterministic=True)),
        ("second", "load", LoadRequest(roles=(REFERENCE, CRITIC), seed=3, deterministic=True)),
        ("wait", 4, "loading the models"),
    ]


def test_a_group_without_a_role_forgets_the_last_runs_models(workers: RoleWorkers, log: list[tuple[Any, ...]]) -> None:
    loaded(workers, log, ACTOR, REFERENCE)
    workers.load(LoadRequest(roles=(ACTOR, spec(Role.REFERENCE, TP2)), seed=3))
    assert log[1] == ("second", "load", LoadRequest(roles=(), seed=3))
    workers.forward([], PLAN, ForwardRequest(role=Role.REFERENCE, step=1))
    assert log[-2] == ("first", "forward", Role.REFERENCE)


def test_calls_go_to_the_group_of_their_role(workers: RoleWorkers, log: list[tuple[Any, ...]]) -> None:
    loaded(workers, log, ACTOR, REFERENCE, CRITIC)
    answers = [
        workers.forward([], PLAN, ForwardRequest(role=role, step=1))
        for role in (Role.ACTOR, Role.REFERENCE, Role.CRITIC)
    ]
    assert [list(answer) for answer in answers] == [["first"], ["second"], ["second"]]
    for role in (Role.ACTOR, Role.CRITIC):
        workers.update([], PLAN, request_of(role))
    workers.store_weights([Path("f")], with_checksums=True)
    workers.store_weights([Path("f")], role=Role.CRITIC)
    assert workers.offload(Role.CRITIC, [Part.PARAMS]) == 7
    workers.onload(Role.ACTOR, [Part.PARAMS])
    assert [entry for entry in log if entry[0] != "wait"][3:] == [
        ("first", "update", Role.ACTOR),
        ("second", "update", Role.CRITIC),
        ("first", "store_weights", ["f"], True, Role.ACTOR, False),
        ("second", "store_weights", ["f"], False, Role.CRITIC, False),
        ("second", "offload", Role.CRITIC, [Part.PARAMS]),
        ("first", "onload", Role.ACTOR, [Part.PARAMS]),
    ]


def test_a_role_that_is_not_loaded_is_named(workers: RoleWorkers, log: list[tuple[Any, ...]]) -> None:
    with pytest.raises(AssertionError, match="host actor, reference, not the critic; load it first"):
        loaded(workers, log, ACTOR, REFERENCE).forward([], PLAN, ForwardRequest(role=Role.CRITIC, step=1))


def test_checkpoints_are_of_all_groups_at_once(workers: RoleWorkers, log: list[tuple[Any, ...]]) -> None:
    loaded(workers, log, ACTOR, CRITIC)
    workers.start_checkpoint(Path("d"), portable=True)
    workers.load_checkpoint(Path("d"), same_layout={Role.ACTOR})
    assert workers.finish_checkpoint(wait=False)
    assert [entry[:2] for entry in log] == [
        ("first", "save_checkpoint"),
        ("second", "save_checkpoint"),
        ("wait", 4),
        ("first", "load_checkpoint"),
        ("second", "load_checkpoint"),
        ("wait", 4),
        ("first", "finish_checkpoint"),
        ("second", "finish_checkpoint"),
        ("wait", 4),
    ]
    assert log[1] == ("second", "save_checkpoint", "d", True)
    assert log[4] == ("second", "load_checkpoint", "d", {Role.ACTOR}, False)


def test_a_checkpoint_is_written_when_every_group_says_so(workers: RoleWorkers, log: list[tuple[Any, ...]]) -> None:
    last = loaded(workers, log, ACTOR, CRITIC).groups[1].processes[-1]
    last.actor.answers["finish_checkpoint"] = False
    assert not workers.finish_checkpoint(wait=False)


def test_traces_of_further_layouts_have_directories_of_their_own(
    workers: RoleWorkers, log: list[tuple[Any, ...]]
) -> None:
    loaded(workers, log, ACTOR, REFERENCE, CRITIC)
    workers.start_profile()
    workers.stop_profile(Path("profile"))
    assert log[-3:-1] == [
        ("first", "stop_profile", "profile"),
        ("second", "stop_profile", "profile/reference+critic"),
    ]


def test_the_actors_ranks_come_first(workers: RoleWorkers) -> None:
    assert [process.name for process in workers.processes] == [
        "first rank 0",
        "first rank 1",
        "second rank 0",
        "second rank 1",
    ]


def request_of(role: Role) -> UpdateRequest:
    return UpdateRequest(
        role=role,
        step=1,
        objective=SftAlgorithm(),
        state=AlgoState(),
        denominators={"tokens": 1.0},
        temperature=1.0,
        lr=0.1,
    )
