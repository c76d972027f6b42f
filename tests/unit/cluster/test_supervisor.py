"""What is told to whom when engines die; ranks, engines and transports only write it down."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from megarl.cluster.offloading import GENERATE, LOAD, MemoryLedger, Resident, built_parts, checkpointing
from megarl.cluster.remotes import Process, Roster
from megarl.cluster.supervisor import EngineSupervisor
from megarl.config.generation import Sampling
from megarl.config.schema import ActorConfig, ModelConfig
from megarl.errors import EngineDiedError, RunError, WorkerError
from megarl.host import loop
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.source import Doing
from megarl.rollout.stepping import EngineWork
from megarl.types import FinishReason, version_spans
from megarl.types.messages import Part, Role, RoleSpec

OPEN, PUSH = "open", "push {}".format


def request(seed: int) -> GenerationRequest:
    return GenerationRequest(token_ids=(seed,), seed=seed, sampling=Sampling(temperature=1.0), max_tokens=4)


def completion(request: GenerationRequest) -> Completion:
    return Completion(
        token_ids=np.asarray([request.seed]),
        logprobs=np.zeros(1, np.float32),
        finish_reason=FinishReason.STOP,
        versions=version_spans(np.zeros(1, np.int64)),
    )


class Run:
    """A cluster of two engines, its ranks, and its transports.

    deaths: by the call in which they happen; finished_before_death: by engine, how many of its requests it finishes.
    """

    def __init__(self, *, max_restarts: int = 3, offload: bool = False, deterministic: bool = False) -> None:
        self.calls, self.deaths, self.drops_weights = list[str](), dict[str, Callable[[], Any]](), False
        self.roster, self.engines, self.finished_before_death = Roster(), self, dict[int, int]()
        self.open: dict[int, tuple[int, asyncio.Future[Completion], GenerationRequest]] = {}
        self.trouble, self.environment_workers, self.num_moved = asyncio.Event(), None, 0
        self.outbox: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []
        self.processes = [Process(name=f"engine {i}", actor=i, roster=self.roster) for i in range(2)]
        for process in self.processes:
            self.roster.enter(process)
        self.ledger = MemoryLedger(self, self, enabled=offload)
        self.supervisor = EngineSupervisor(
            self,  # type: ignore[arg-type]
            self.restart_engine,
            self.ledger,
            self.open_sync,
            max_restarts=max_restarts,
            deterministic=deterministic,
            verify=False,
        )

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.deaths:
            self.deaths.pop(call)()

    def die(self, engine: int) -> None:
        """Where nobody waits for it."""
        error = self.roster.report_death(self.processes[engine], f"updating: engine {engine} died")
        if not isinstance(error, EngineDiedError):
            raise error

    def die_in_sync(self) -> None:
        raise self.roster.report_death(self.processes[1], "syncing weights: engine 1 died")

    def die_in_start(self) -> None:
        self.roster.enter(new := Process(name="engine 1", actor="new", roster=self.roster))
        raise self.roster.report_death(new, "restarting engine 1: engine 1 died")

    def restart_engine(self, index: int) -> None:
        self.note(f"restart {index}")
        self.processes[index] = Process(name=f"engine {index}", actor=len(self.calls), roster=self.roster)
        self.roster.enter(self.processes[index])

    # --- as ranks and engines of the ledger

    def offload(self, role: Role, parts: Sequence[Part]) -> int:
        self.note(f"offload {'+'.join(parts)}")
        return 0

    def onload(self, role: Role, parts: Sequence[Part]) -> None:
        self.note(f"onload {'+'.join(parts)}")

    def sleep(self) -> bool:
        self.note("sleep")
        return self.drops_weights

    def wake(self, parts: Sequence[str]) -> None:
        self.note(f"wake {'+'.join(parts)}")

    # --- as a transport

    def open_sync(self) -> "Run":
        self.note(OPEN)
        return self

    def push(self, version: int, *, verify: bool) -> dict[str, float]:
        self.note(PUSH(version))
        return {"sync/wire_bytes": 1.0}

    def close(self) -> None:
        self.note("close")

    # --- as the engines' group

    def generate(self, request: GenerationRequest) -> "asyncio.Future[Completion]":
        completion: asyncio.Future[Completion] = loop.event_loop().create_future()
        self.outbox.append((request, completion))
        return completion

    def flush(self) -> None:
        to = self.living()
        if not (to and self.outbox):
            return
        posted, self.outbox = self.outbox, []
        self.open |= {i: (to[i % len(to)], completion, r) for i, (r, completion) in enumerate(posted)}
        self.note(f"submit {[[i for i in self.open if self.open[i][0] == engine] for engine in range(2)]}")
        self.hand = dict(self.open)

    async def attend(self, work: "asyncio.Future[Any]", *, timeout_s: float, doing: Doing) -> None:
        """All living engines finish what they have, or as many requests as they can before they die."""
        if self.outbox:
            self.flush()
        for engine in self.living():
            count = self.finished_before_death.pop(engine, None)
            for i in [i for i in self.open if self.open[i][0] == engine][:count]:
                _, completed, r = self.open.pop(i)
                completed.set_result(completion(r))
            if count is not None:
                self.die(engine)
                if self.living() and not self.repeats_batches:
                    self.start_again(engine, exactly=False)
                break
        for _ in range(3):
            await asyncio.sleep(0)

    def living(self) -> list[int]:
        return [i for i, process in enumerate(self.processes) if process.name not in self.roster.lost]

    def are_idle(self, engines: Sequence[int]) -> bool:
        return not any(engine in engines for engine, *_ in self.open.values())

    def are_missed(self) -> bool:
        return bool(self.outbox) and not self.living()

    def orphans(self) -> list[int]:
        return sorted({engine for engine, *_ in self.open.values()} - {*self.living()})

    def start_again(self, engine: int, *, exactly: bool) -> None:
        mine = {i: each for i, each in (self.hand if exactly else self.open).items() if each[0] == engine}
        self.note(f"again {list(mine)} on {[engine] if exactly else self.living()}")
        to = engine if exactly else self.living()[0]
        self.open |= {i: (to, *mine[i][1:]) for i in mine if i in self.open}

    def abort(self) -> None:
        """Nothing is under way."""

    def work(self) -> dict[int, EngineWork]:
        return {
            0: EngineWork(
                num_steps=3,
                num_sequences=7,
                prompt_tokens=8,
                cached_tokens=6,
                recomputed_tokens=5,
                num_errors=2,
                busy=[(1.0, 1.5), (2.0, 4.0)],
                began=0.0,
            )
        }


class Told(list[int]):
    """The seeds of completed requests, as they come."""

    def __init__(self, run: Run, num_requests: int) -> None:
        super().__init__()
        self.work = loop.spawn(self._take_all([run.supervisor.generate(request(i)) for i in range(num_requests)]))

    async def _take_all(self, asked: "Sequence[asyncio.Future[Completion]]") -> None:
        for completed in asked:
            completed.add_done_callback(lambda each: self.extend(each.result().token_ids.tolist()))
        await asyncio.gather(*asked)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.cluster.remotes.ray.kill", lambda actor: None)


def generate(run: Run, num_requests: int) -> Told:
    told = Told(run, num_requests)
    wait(run, told)
    return told


def wait(run: Run, told: Told) -> None:
    run.supervisor.wait(told.work, timeout_s=1.0, doing=lambda: "generating")


RESTART_1 = ["close", "restart 1", OPEN]


def test_without_deaths_the_transport_is_opened_once() -> None:
    run = Run()
    assert run.supervisor.push(0) == {"sync/wire_bytes": 1.0}
    assert generate(run, 4) == [0, 2, 1, 3]
    run.supervisor.push(1)
    run.supervisor.close()
    assert run.calls == [OPEN, PUSH(0), "submit [[0, 2], [1, 3]]", PUSH(1), "close"]
    metrics = run.supervisor.metrics()
    assert metrics.pop("perf/engine_idle_s") > 1e9  # since 1970
    assert metrics == {
        "rollout/engine_restarts": 0.0,
        "rollout/request_errors": 2.0,
        "rollout/moved": 0.0,
        "perf/engine_steps": 3.0,
        "perf/engine_sequences": 7.0,
        "perf/engine_busy_s": 2.5,
        "perf/recomputed_tokens": 5.0,
        "engine/prefix_hit_frac": 0.75,
    }
    assert run.supervisor.busy == {"0": [(1.0, 1.5), (2.0, 4.0)]}


def test_a_living_engine_takes_over_what_is_unfinished() -> None:
    """The engine that died is back before the next sync."""
    run = Run()
    run.supervisor.push(4)
    run.finished_before_death = {1: 1}
    assert generate(run, 6) == [0, 2, 4, 1, 3, 5]
    assert run.calls == [OPEN, PUSH(4), "submit [[0, 2, 4], [1, 3, 5]]", "again [3, 5] on [0]"]
    run.supervisor.push(5)
    assert run.calls[4:] == [*RESTART_1, PUSH(5)]
    assert [run.supervisor.metrics()["rollout/engine_restarts"] for _ in range(2)] == [1.0, 0.0]


def test_a_deterministic_run_repeats_the_whole_hand_in_the_same_place() -> None:
    run = Run(deterministic=True)
    run.supervisor.push(4)
    run.finished_before_death = {1: 1}
    assert generate(run, 6) == [0, 2, 4, 1, 3, 5]
    assert run.calls == [
        *(OPEN, PUSH(4), "submit [[0, 2, 4], [1, 3, 5]]", *RESTART_1, PUSH(4)),
        "again [1, 3, 5] on [1]",
    ]


@pytest.mark.parametrize("deterministic", [False, True])
def test_after_an_update_a_new_engine_begins_its_requests_with_the_next_weights(deterministic: bool) -> None:
    """Nobody has the dead engine's weights any more: what it had not finished must not name their version."""
    run = Run(deterministic=deterministic)
    run.supervisor.push(4)
    told = Told(run, 2)
    run.flush()
    run.die(0)
    if not deterministic:
        run.die(1)
    run.calls.clear()
    run.supervisor.outdate()
    wait(run, told)
    assert not [call for call in run.calls if "restart" in call or "push" in call]
    run.supervisor.push(5)
    assert PUSH(5) in run.calls
    assert PUSH(4) not in run.calls
    wait(run, told)
    assert sorted(told) == [0, 1]


def test_the_only_engine_left_dies_too() -> None:
    run = Run()
    run.supervisor.push(0)
    run.finished_before_death = {0: 1, 1: 0}
    assert sorted(generate(run, 4)) == [0, 1, 2, 3]
    assert run.calls[2:] == [
        "submit [[0, 2], [1, 3]]",
        "again [2] on [1]",
        *("close", "restart 0", "restart 1", OPEN, PUSH(0)),
        "again [1, 2, 3] on [0, 1]",
    ]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("ended_by", ["a sync", "a wait"])
def test_requests_of_engines_that_died_outside_a_wait_begin_again(deterministic: bool, ended_by: str) -> None:
    """As when the only engine dies during an update or while a checkpoint is written, with samples under way."""
    run = Run(deterministic=deterministic)
    run.supervisor.push(0)
    told = Told(run, 2)
    run.flush()
    run.die(0)
    run.die(1)
    run.calls.clear()
    version = 1 if ended_by == "a sync" else 0
    if version:
        run.supervisor.push(version)
    else:
        wait(run, told)
    assert run.calls[:5] == ["close", "restart 0", "restart 1", OPEN, PUSH(version)]
    assert run.calls[5:7] == (
        ["again [0] on [0]", "again [1] on [1]"] if deterministic else ["again [0] on [0, 1]", "again [1] on [0, 1]"]
    )
    wait(run, told)
    assert sorted(told) == [0, 1]


def test_engines_that_died_idle_are_back_before_the_next_sync_or_when_none_is_left() -> None:
    run = Run()
    run.supervisor.push(0)
    run.die(1)
    run.supervisor.push(1)
    run.die(1)
    generate(run, 2)
    run.die(0)
    generate(run, 1)
    assert run.calls == [
        *(OPEN, PUSH(0), *RESTART_1, PUSH(1), "submit [[0, 1], []]"),
        *("close", "restart 0", "restart 1", OPEN, PUSH(1), "submit [[0], []]"),
    ]


def test_a_sync_in_which_an_engine_dies_is_repeated_over_a_new_transport() -> None:
    run = Run()
    run.deaths = {PUSH(0): run.die_in_sync}
    run.supervisor.push(0)
    assert run.calls == [OPEN, PUSH(0), *RESTART_1, PUSH(0)]


def test_an_engine_that_dies_while_it_starts_counts_again() -> None:
    run = Run(max_restarts=2)
    run.supervisor.push(0)
    run.die(1)
    run.deaths = {"restart 1": run.die_in_start}
    run.supervisor.push(1)
    assert run.calls == [OPEN, PUSH(0), "close", "restart 1", "restart 1", OPEN, PUSH(1)]
    with pytest.raises(WorkerError, match="updating: engine 0 died; see RUN/logs"):
        run.die(0)


def test_with_offload_devices_are_empty_when_an_engine_starts() -> None:
    """And the trainer's parameters are back before there is a transport."""
    run = Run(offload=True, deterministic=True)
    run.ledger.resident = frozenset({Resident(Role.ACTOR, Part.PARAMS)})
    run.supervisor.push(0)
    run.calls.clear()
    run.ledger.enter(GENERATE)
    assert run.calls == ["offload params", "wake kv_cache"]
    run.calls.clear()
    run.finished_before_death = {1: 0}
    generate(run, 2)
    assert run.calls == [
        "submit [[0], [1]]",
        *("close", "sleep", "restart 1", "onload params", "wake weights", OPEN, PUSH(0), "offload params"),
        *("wake kv_cache", "again [1] on [1]"),
    ]
    assert run.ledger.resident == GENERATE.needs


def checkpointed(run: Run) -> None:
    """A step whose sync is followed by a checkpoint, before which the ranks have all of the actor's memory."""
    actor = RoleSpec(role=Role.ACTOR, model=ModelConfig(), settings=ActorConfig())
    run.ledger.enter(LOAD)
    run.ledger.add(built_parts([actor]))
    run.supervisor.push(7)
    run.ledger.enter(checkpointing([actor]))
    run.calls.clear()


def test_engines_that_dropped_their_weights_for_a_checkpoint_get_them_again() -> None:
    run = Run(offload=True)
    run.drops_weights = True
    checkpointed(run)
    run.ledger.enter(GENERATE)
    assert run.calls == ["offload optimizer", "wake weights", PUSH(7), "offload params", "wake kv_cache"]
    run.calls.clear()
    run.ledger.enter(GENERATE)
    assert run.calls == []


def test_engines_that_kept_their_weights_only_wake() -> None:
    run = Run(offload=True)
    checkpointed(run)
    run.ledger.enter(GENERATE)
    assert run.calls == ["offload optimizer+params", "wake kv_cache+weights"]


def test_dropped_weights_from_which_the_policy_has_moved_on_are_an_error() -> None:
    run = Run(offload=True)
    run.drops_weights = True
    checkpointed(run)
    run.supervisor.outdate()
    with pytest.raises(RunError, match=r"dropped the weights of version 7 .*snapshot"):
        run.ledger.enter(GENERATE)


def test_a_lost_engine_is_replaced_on_request_while_the_other_generates() -> None:
    run = Run()
    run.supervisor.push(7)
    run.supervisor.restart_dead_engines()
    assert run.calls == [OPEN, PUSH(7)]
    Told(run, 2)
    run.flush()
    run.die(1)
    run.calls.clear()
    run.supervisor.restart_dead_engines()
    assert run.calls == [*RESTART_1, PUSH(7), "again [1] on [0, 1]"]
    assert run.living() == [0, 1]


def test_engines_that_generate_are_not_put_to_sleep_for_a_replacement() -> None:
    run = Run(offload=True)
    run.supervisor.push(7)
    Told(run, 2)
    run.flush()
    run.die(1)
    run.calls.clear()
    run.supervisor.restart_dead_engines()
    assert (run.calls, run.living()) == ([], [0])
    # Engine 0 finishes what it has; so does the engine that takes over.
    run.open.clear()
    run.supervisor.restart_dead_engines()
    assert "restart 1" in run.calls
    assert run.living() == [0, 1]
