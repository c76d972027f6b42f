"""Environment workers on nodes of their own: Ray on addresses of this machine's loopback, nodes that die or freeze."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.ray_constants import PROCESS_TYPE_RAYLET

from megarl.cluster.engines import EngineGroup
from megarl.cluster.episodes import EnvironmentWorkers
from megarl.cluster.placement import PlacementPlan
from megarl.cluster.ray_session import open_ray
from megarl.cluster.reservation import Reservation
from megarl.config.environments import EnvironmentConfig, EnvironmentEntry
from megarl.config.generation import Sampling
from megarl.config.schema import ClusterConfig
from megarl.environments import Action, Environment, Reply
from megarl.environments.endpoint import chat_server
from megarl.environments.worker import WorkerSpec
from megarl.errors import WorkerError
from megarl.host import loop
from megarl.host.device.platform import apply_environment
from megarl.host.janitor import Janitor
from megarl.host.ray_environment import RAY_ENVIRONMENT, health_checks
from megarl.host.temp_dir import RAY_DIRECTORY
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.source import Group, SamplingPlan
from megarl.rollout.vllm_source import VllmSource
from megarl.types import FinishReason, Message, Prompt, version_spans
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.helpers.loops import begin_groups
from tests.helpers.remote_processes import attend_until
from tests.helpers.waiting import wait_until

# After how long Ray takes a silent node for lost.
LOST_S = 6.0
NUM_NODES, NUM_SAMPLES, NUM_TURNS, END = 4, 24, 4, 2
CONFIG = EnvironmentConfig(
    entries={"patient": EnvironmentEntry(type=f"{__file__}:Patient")}, hosts=4, nodes=2, max_host_restarts=5
)
PLAN = SamplingPlan(step=1, num_samples=1, sampling=Sampling(temperature=1.0), max_response_tokens=400, run_seed=0)


class Patient(Environment):
    """Echoes slowly, and says at the end where it ran, and where its agents' endpoint listens."""

    def __init__(self) -> None:
        self._num_turns = 0

    async def reply(self, action: Action) -> Reply:
        await asyncio.sleep(0.3)
        self._num_turns += 1
        if self._num_turns < NUM_TURNS:
            return Reply(messages=(Message(role="user", content=action.text),))
        own = {"node": ray.util.get_node_ip_address(), "endpoint": chat_server().held.getsockname()[0]}
        return Reply(done=True, reward=1.0, details=own)


class Echoing:
    """Engines whose next turn follows from the tokens before it."""

    def generate(self, request: GenerationRequest) -> "asyncio.Future[Completion]":
        future: asyncio.Future[Completion] = loop.event_loop().create_future()
        answer = Completion(
            token_ids=np.array([40 + sum(request.token_ids) % 50, END], dtype=np.int32),
            logprobs=np.full(2, -0.5, dtype=np.float32),
            finish_reason=FinishReason.STOP,
            versions=version_spans(np.zeros(2)),
        )
        loop.event_loop().call_later(0.01, future.set_result, answer)
        return future

    def parts(self) -> "dict[asyncio.Future[Completion], Completion]":
        return {}


class Nodes:
    """Ray's nodes after the driver's, by address."""

    def __init__(self, janitor: Janitor) -> None:
        self._raylets: dict[str, psutil.Process] = {}
        for i in range(2, 2 + NUM_NODES):
            # `ray start` would look for the head at another address of this host.
            asked = RayParams(
                gcs_address=ray.get_runtime_context().gcs_address,
                node_ip_address=f"127.0.0.{i}",
                temp_dir=f"{janitor.temp_dir}/{RAY_DIRECTORY}",
                num_cpus=2,
                num_gpus=0,
                object_store_memory=80 << 20,
                min_worker_port=0,
                max_worker_port=0,
                node_manager_port=0,
                dashboard_agent_listen_port=None,
                include_log_monitor=False,
            )
            node = Node(asked, head=False, shutdown_at_exit=False, spawn_reaper=False)
            (raylet,) = node.all_processes[PROCESS_TYPE_RAYLET]
            self._raylets[asked.node_ip_address] = psutil.Process(raylet.process.pid)
        wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1 + NUM_NODES, "all nodes")

    def signal(self, address: str, number: signal.Signals) -> None:
        """Send a signal to the processes of a node, all at once."""
        raylet = self._raylets[address]
        for process in (raylet, *raylet.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def end(self) -> None:
        for address in self._raylets:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.signal(address, signal.SIGKILL)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    janitor = Janitor()
    with pytest.MonkeyPatch.context() as patch:
        apply_environment()
        for name, value in (RAY_ENVIRONMENT | health_checks(LOST_S)).items():
            patch.setenv(name, value)
        own = ClusterConfig(num_cpus=1, object_store_mib=80)
        own_nodes: list[Nodes] = []
        try:
            open_ray(own, num_cpus=1, temp_dir=janitor.temp_dir, environment={"TMPDIR": str(janitor.temp_dir)})
            own_nodes.append(Nodes(janitor))
            yield own_nodes[0]
        finally:
            for each in own_nodes:
                each.end()
            ray.shutdown()
            janitor.close()


def sampled(group: EngineGroup, *, meanwhile: Sequence[Callable[[], None]] = ()) -> dict[str, Group]:
    """Sample conversations, and do these things once so many replies have come that all of them are under way."""
    workers = group.environment_workers
    prompts = [
        Prompt(uid=f"p{i}", token_ids=(5, 6 + i), data_source="d", ground_truth="", environment="patient")
        for i in range(NUM_SAMPLES)
    ]
    groups = begin_groups(VllmSource(Echoing(), workers, CONFIG), prompts, PLAN)
    for act in meanwhile:
        attend_until(group, lambda: any(sum(len(s.segments) for s in each.parts.values()) > 3 for each in groups))
        act()
    attend_until(group, lambda: all(each.is_done for each in groups), timeout_s=180.0)
    return {each.prompt.uid: each for each in groups}


def test_nodes_that_die_or_freeze_cost_no_sample(nodes: Nodes, tmp_path: Path) -> None:
    """Their workers move, to spare nodes first; whatever dies, samples are those of a run where nothing did."""
    make_byte_tokenizer().save_pretrained(tmp_path)
    spec = WorkerSpec(model_path=str(tmp_path), chat_template={}, names=("patient",), config=CONFIG)
    group = EngineGroup([], timeout_s=60.0)
    reserved = Reservation(PlacementPlan(groups={}, ranks=()), hosts=(), timeout_s=60.0)
    workers = group.environment_workers = EnvironmentWorkers(
        spec, timeout_s=120.0, trouble=group.trouble, unused_nodes=reserved.unused_nodes, silence_s=60.0
    )
    roster = workers.processes[0].roster

    def where() -> list[str]:
        return [process.location.address for process in workers.processes]

    def samples(**how: Sequence[Callable[[], None]]) -> tuple[dict[str, list[int]], set[str], int]:
        found = [(uid, sample) for uid, each in sampled(group, **how).items() for sample in each.samples.values()]
        assert [sample.finish_reason for _, sample in found] == [FinishReason.STOP] * NUM_SAMPLES
        details = [sample.episode.details for _, sample in found]
        assert {each["endpoint"] for each in details} == {"127.0.0.1"}
        blamed = sum(sample.episode.num_restarts for _, sample in found)
        return {uid: sample.token_ids.tolist() for uid, sample in found}, {each["node"] for each in details}, blamed

    assert where() == ["127.0.0.2", "127.0.0.3"] * 2
    expected, addresses, blamed = samples()
    assert (addresses, blamed) == ({"127.0.0.2", "127.0.0.3"}, 0)

    # A worker: another one takes its place, on the same node.
    found, addresses, _ = samples(meanwhile=[lambda: os.kill(workers.processes[0].location.pid, signal.SIGKILL)])
    assert (found, addresses, roster.num_restarts) == (expected, {"127.0.0.2", "127.0.0.3"}, 1)

    # A node, with two workers. Two nodes at once, one without a word.
    found, _, blamed = samples(meanwhile=[lambda: nodes.signal("127.0.0.2", signal.SIGKILL)])
    assert (found, blamed, roster.num_restarts) == (expected, 0, 2)
    assert sorted(where()) == ["127.0.0.3", "127.0.0.3", "127.0.0.4", "127.0.0.5"]
    both = [lambda: nodes.signal("127.0.0.3", signal.SIGSTOP), lambda: nodes.signal("127.0.0.4", signal.SIGKILL)]
    found, addresses, blamed = samples(meanwhile=both)
    assert (found, addresses, blamed, roster.num_restarts) == (expected, {"127.0.0.5"}, 0, 4)
    assert where() == ["127.0.0.5"] * 4

    # The last: the run ends, and can be resumed.
    with pytest.raises(WorkerError, match=r"all nodes of environment\.nodes are lost; --resume once there are others"):
        samples(meanwhile=[lambda: nodes.signal("127.0.0.5", signal.SIGKILL)])
    workers.close()
    loop.abandon()
