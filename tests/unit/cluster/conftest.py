"""A Ray of this machine's own, and processes on it."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray

from megarl.cluster.ray_session import open_ray
from megarl.cluster.remotes import Process, results
from megarl.config.schema import ClusterConfig
from megarl.host.device.platform import apply_environment
from megarl.host.fork_server import ForkServers
from megarl.host.janitor import Janitor
from megarl.host.ray_environment import RAY_ENVIRONMENT
from tests.helpers import remote_processes
from tests.helpers.remote_processes import Worker, start

NUM_PROCESSES = 4


@pytest.fixture(scope="package")
def ray_session() -> Iterator[Janitor]:
    """The janitor of the session's run."""
    janitor = Janitor()
    apply_environment()
    os.environ.update(RAY_ENVIRONMENT)
    settings = ClusterConfig(num_cpus=NUM_PROCESSES, object_store_mib=80)
    environment = {"TMPDIR": str(janitor.temp_dir), "HF_TOKEN": "of the user"}
    servers = ForkServers(janitor.temp_dir, "tests.helpers.worker_imports", ["worker"], environment)
    try:
        open_ray(settings, num_cpus=1, temp_dir=janitor.temp_dir, environment=environment)
        remote_processes.runtime_env = servers.runtime_envs()["worker"]
        yield janitor
    finally:
        remote_processes.runtime_env = {}
        ray.shutdown()
        servers.close()
        janitor.close()


@pytest.fixture(scope="module")
def processes(ray_session: Janitor) -> Iterator[list[Process[Worker]]]:
    """Processes that have started: the time-outs of tests are for what they are asked, not for a loaded machine."""
    begun = [start(index) for index in range(NUM_PROCESSES)]
    locations = results([process.ask(Worker.locate) for process in begun], timeout_s=120.0)
    yield [replace(process, location=location) for process, location in zip(begun, locations, strict=True)]
    for process in begun:
        ray.kill(process.actor)
