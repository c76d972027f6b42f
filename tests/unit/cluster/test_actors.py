"""An engine's actor knows which of its workers have ended, ends those of the engine before it, and streams replies."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray.exceptions import RayError

from megarl.cluster import actors
from megarl.cluster.actors import EngineActor
from megarl.cluster.episodes import EnvironmentWorkerActor
from megarl.cluster.ray_session import end_run_processes
from megarl.cluster.remotes import MOST_RESULTS, Process, Stream
from megarl.config.schema import EngineConfig
from megarl.host.janitor import RUN_ID_VARIABLE
from megarl.rollout.engine_spec import EngineSpec
from tests.helpers.waiting import wait_until

SPEC = EngineSpec(model_path="", dtype="float32", seed=0, max_model_tokens=1, config=EngineConfig(tp=2))


@pytest.fixture
def workers() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [subprocess.Popen(["sleep", "300"]) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_lost_workers(workers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def __init__(self, _: EngineSpec) -> None:
            """Has these processes as its workers."""

        def process_ids(self) -> list[int]:
            return [os.getpid(), *(process.pid for process in workers)]

    monkeypatch.setattr(actors, "VllmEngine", Engine)
    actor = EngineActor()
    # It may be asked before it has started its engine.
    assert actor.lost_workers() == []
    assert len(actor.start(SPEC, [])) == 3
    assert actor.lost_workers() == []
    workers[1].kill()
    status = psutil.Process(workers[1].pid).status
    wait_until(lambda: status() == psutil.STATUS_ZOMBIE, "the end of the worker", seen=status)
    assert actor.lost_workers() == [1]
    workers[1].wait()
    workers[0].kill()
    workers[0].wait()
    assert actor.lost_workers() == [0, 1]


def test_what_is_left_of_an_engine_is_ended_if_it_is_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id may be another process's by now."""
    monkeypatch.setenv(RUN_ID_VARIABLE, "ours")
    ours = subprocess.Popen(["sleep", "300"])
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setenv(RUN_ID_VARIABLE, "theirs")
    theirs = subprocess.Popen(["sleep", "300"])
    monkeypatch.setenv(RUN_ID_VARIABLE, "ours")
    try:
        end_run_processes([gone.pid, ours.pid, theirs.pid])
        assert ours.wait(timeout=0) == -signal.SIGKILL
        assert theirs.poll() is None
    finally:
        for process in (ours, theirs):
            process.kill()
            process.wait()


class Node:
    """A further node of an engine; `ray.get` of what its methods return is the value itself, or an error."""

    def __init__(self, pids: list[int]) -> None:
        self.pids, self.lost, self.told = pids, list[int](), list[Any]()

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Any:
            self.told.append((method, *args))
            return {"start": self.pids, "lost_workers": self.lost}.get(method)

        return SimpleNamespace(remote=remote)


def test_an_engine_answers_for_the_workers_of_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are numbered over the nodes, with the process of a further node before its workers."""

    class Engine:
        def __init__(self, spec: EngineSpec) -> None:
            self.spec = spec

        def process_ids(self) -> list[int]:
            return [os.getpid(), os.getpid()]

        def close(self) -> None:
            """End its workers."""

    def get(answers: list[Any], **_: Any) -> list[Any]:
        for answer in answers:
            if answer and isinstance(answer[0], RayError):
                raise answer[0]
        return answers

    monkeypatch.setattr(actors, "VllmEngine", Engine)
    monkeypatch.setattr(actors.ray, "get", get)
    monkeypatch.setattr(actors.ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setenv("VLLM_HOST_IP", "")
    nodes = [Node([100, 101, 102]), Node([200, 201, 202])]
    actor = EngineActor([Process(name="node", actor=node) for node in nodes])
    ids = actor.start_all(SPEC, [["0"], ["1"], []], [[], [5, 6], []])
    assert ids == [[os.getpid()] * 2, [100, 101, 102], [200, 201, 202]]
    assert os.environ["VLLM_HOST_IP"] == "10.0.0.1"
    starts = [node.told[0] for node in nodes]
    assert [(method, devices, pids) for method, _, devices, pids in starts] == [
        ("start", ["1"], [5, 6]),
        ("start", [], []),
    ]
    specs = [actor.engine.spec, *(spec for _, spec, _, _ in starts)]
    assert [spec.node.rank for spec in specs] == [0, 1, 2]
    assert {(spec.node.num_nodes, spec.node.address, spec.node.port) for spec in specs} == {
        (3, "10.0.0.1", specs[0].node.port)
    }
    assert actor.lost_workers() == []
    # Here worker 0, then process 1 with workers 2 and 3, then process 4 with workers 5 and 6.
    nodes[1].lost = [1]
    assert actor.lost_workers() == [6]
    nodes[0].lost = [RayError()]
    assert actor.lost_workers() == [1, 6]
    actor.close()
    assert [node.told[-1] for node in nodes] == [("close",)] * 2


def of_engine() -> AsyncIterator[Any]:
    actor: Any = object.__new__(EngineActor)
    actor.engine = SimpleNamespace(serve=itertools.count)

    async def replies() -> AsyncIterator[Any]:
        served: Any = actor.serve()
        yield next(served)
        with contextlib.suppress(StopIteration):
            while True:
                # As Ray does.
                yield served.send("statistics")

    return replies()


def of_environment() -> AsyncIterator[Any]:
    actor: Any = object.__new__(EnvironmentWorkerActor)
    actor._replies = SimpleNamespace(get=lambda: asyncio.sleep(0, (0, None)), empty=lambda: True)
    replies: AsyncIterator[Any] = actor.serve()
    return replies


@pytest.mark.parametrize("serve", [of_engine, of_environment])
def test_a_stream_goes_on_in_another_call_before_ray_keeps_much_of_it(serve: Callable[[], AsyncIterator[Any]]) -> None:
    """As long as a call lasts, Ray keeps an entry of each of its results."""
    counts: list[int] = []

    async def begin() -> AsyncIterator[Awaitable[Any]]:
        counts.append(0)
        async for reply in serve():
            counts[-1] += 1
            yield asyncio.sleep(0, reply)

    async def read(num_results: int) -> None:
        begun: Any = begin
        stream = Stream[Any](process=Process(name="", actor=None), begin=begun, ref=begun())
        results = stream.results()
        for _ in range(num_results):
            await anext(results)

    asyncio.run(read(2 * MOST_RESULTS + 1))
    assert counts == [MOST_RESULTS, MOST_RESULTS, 1]
