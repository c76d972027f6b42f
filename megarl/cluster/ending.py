"""End processes of the run by their ids, on any of its hosts."""

import contextlib
import os
import time
from collections.abc import Sequence

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.remotes import Location, got
from megarl.host.clock import awake_s
from megarl.host.janitor import RUN_ID_VARIABLE

# How long to wait for killed processes to be gone, and for a host to begin with it.
END_TIMEOUT_S = 10.0


def end_at(location: Location) -> None:
    """Kill a process on its host, even if SIGSTOP has stopped it (`ray.kill` cannot); ignore a host that is gone."""
    if location.host == ray.get_runtime_context().get_node_id():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            process = psutil.Process(location.pid)
            process.kill()
            process.wait(END_TIMEOUT_S)
        return
    strategy = NodeAffinitySchedulingStrategy(location.host, soft=False)
    task = ray.remote(num_cpus=0)(end_run_processes).options(scheduling_strategy=strategy)
    with contextlib.suppress(RayError, GetTimeoutError):
        got(task.remote([location.pid]), 2 * END_TIMEOUT_S)


def end_run_processes(pids: Sequence[int]) -> None:
    """Kill the given processes of this host, if they still live and belong to this run, and wait for their end."""
    run_id = os.environ.get(RUN_ID_VARIABLE)
    mine = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(pid)
            if process.environ().get(RUN_ID_VARIABLE) == run_id:
                process.kill()
                mine.append(process)
    deadline = awake_s() + END_TIMEOUT_S
    while any(map(is_alive, mine)) and awake_s() < deadline:
        time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process lives. A zombie counts as dead, although psutil's `is_running` returns True for it."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
