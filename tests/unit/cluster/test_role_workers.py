"""Which group of ranks a call goes to. The groups are fakes that write down what they are asked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.algos.sft import SftAlgorithm
from megarl.cluster import Process, RoleWorkers, WorkerGroup
from megarl.cluster.workers import Calls
from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.types import AlgoState
from megarl.types.messages import Head, LoadRequest, Part, Role, RoleSpec, StoreResult, UpdateRequest, UpdateResult

TP2, DP2, ONE = LayoutConfig(tp=2), LayoutConfig(dp=2), LayoutConfig()
ANSWERS = {"finish_checkpoint": True}


def spec(role: Role, layout: LayoutConfig) -> RoleSpec:
    head = Head.SCALAR if role is Role.CRITIC else Head.LM
    return RoleSpec(role=role, model=ModelConfig(), settings=ActorConfig(layout=layout), head=head)


ACTOR, REFERENCE, CRITIC = spec(Role.ACTOR, TP2), spec(Role.REFERENCE, DP2), spec(Role.CRITIC, DP2)


class FakeGroup(WorkerGroup):
    """Answers at once; `log` is shared by all groups of a test."""

    def __init__(self, name: str, layout: LayoutConfig, log: list[tuple[Any, ...]]) -> None:
        processes = [Process(name=f"{name} rank {i}", actor=None) for i in range(layout.world_size)]
        super().__init__(processes, layout=layout, timeout_s=1.0)
        self.name, self.log = name, log
        self.answers: dict[str, Any] = dict(ANSWERS)

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Calls:
        self.log.append((self.name, method, *args, *kwargs.values()))
        return [(process, self.answers.get(method)) for process in self.processes]

    def score(self, role: Role, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.log.append((self.name, "score", role))
        return {self.name: []}

    def update(self, rows: Any, plan: Any, request: UpdateRequest) -> UpdateResult:
        self.log.append((self.name, "update", request.role))
        return UpdateResult(metrics={}, before={})

    def store_weights(self, role: Role, files: Sequence[Path], *, with_checksums: bool) -> StoreResult:
        self.log.append((self.name, "store_weights", role, with_checksums))
        return StoreResult(num_elements={}, checksums={})

    def offload(self, role: Role, parts: Sequence[Part]) -> int:
        self.log.append((self.name, "offload", role))
        return 7

    def onload(self, role: Role, parts: Sequence[Part]) -> None:
        self.log.append((self.name, "onload", role))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the groups were asked, and the waits in between."""
    entries: list[tuple[Any, ...]] = []

    def wait_all(calls: Calls, *, timeout_s: float, doing: str) -> list[Any]:
        entries.append(("wait", len(calls), doing))
        return [answer for _, answer in calls]

    monkeypatch.setattr("megarl.cluster.role_workers.wait_all", wait_all)
    return entries


@pytest.fixture
def workers(log: list[tuple[Any, ...]]) -> RoleWorkers:
    return RoleWorkers([FakeGroup("first", TP2, log), FakeGroup("second", DP2, log)], timeout_s=1.0)


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
    workers.score(Role.REFERENCE, [], [], temperature=1.0, step=1)
    assert log[-1] == ("first", "score", Role.REFERENCE)


def test_calls_go_to_the_group_of_their_role(workers: RoleWorkers, log: list[tuple[Any, ...]]) -> None:
    loaded(workers, log, ACTOR, REFERENCE, CRITIC)
    scores = [
        workers.score(role, [], [], temperature=1.0, step=1) for role in (Role.ACTOR, Role.REFERENCE, Role.CRITIC)
    ]
    assert [list(score) for score in scores] == [["first"], ["second"], ["second"]]
    for role in (Role.ACTOR, Role.CRITIC):
        workers.update([], [], request_of(role))
    workers.store_weights([Path("f")], with_checksums=True)
    workers.store_weights([Path("f")], role=Role.CRITIC)
    assert workers.offload(Role.CRITIC, [Part.PARAMS]) == 7
    workers.onload(Role.ACTOR, [Part.PARAMS])
    assert log[3:] == [
        ("first", "update", Role.ACTOR),
        ("second", "update", Role.CRITIC),
        ("first", "store_weights", Role.ACTOR, True),
        ("second", "store_weights", Role.CRITIC, False),
        ("second", "offload", Role.CRITIC),
        ("first", "onload", Role.ACTOR),
    ]


def test_a_role_that_is_not_loaded_is_named(workers: RoleWorkers, log: list[tuple[Any, ...]]) -> None:
    with pytest.raises(AssertionError, match="host actor, reference, not the critic; load it first"):
        loaded(workers, log, ACTOR, REFERENCE).score(Role.CRITIC, [], [], temperature=1.0, step=1)


def test_checkpoints_are_of_all_groups_at_once(workers: RoleWorkers, log: list[tuple[Any, ...]]) -> None:
    loaded(workers, log, ACTOR, CRITIC)
    workers.start_checkpoint(Path("d"))
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
    assert log[4] == ("second", "load_checkpoint", "d", {Role.ACTOR})


def test_a_checkpoint_is_written_when_every_group_says_so(workers: RoleWorkers, log: list[tuple[Any, ...]]) -> None:
    group = loaded(workers, log, ACTOR, CRITIC).groups[1]
    assert isinstance(group, FakeGroup)
    group.answers["finish_checkpoint"] = False
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
    assert workers.layouts == [TP2, DP2]


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
