"""Find out what processes that do not answer are doing, from their state in Linux and their Python stacks.

Every process of a run writes its stacks to a file when it gets SIGUSR2. The handler is in C, so it works even while
the process waits in a collective. It does not work in a stopped process, which is then reported as stopped.
"""

import faulthandler
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.remotes import Location, got
from megarl.host.stage import make_process_files

DUMP_SIGNAL = signal.SIGUSR2
# The seconds that a process gets to write its stacks, and that another host gets to answer.
DUMP_S, HOST_S = 0.5, 10.0
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_PACKAGE = Path(__file__).parents[1]
_COLLECTIVES = "distributed_c10d.py"
# Waits stand there, whoever waits.
_WAITS = "host/clock.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """A process's state in Linux (`running`, `stopped`, `gone`, …) and its Python stacks, the main thread's last."""

    state: str
    stacks: str

    def __str__(self) -> str:
        """Say what the process does: `is stopped` or `waits in all_reduce, called at megarl/parallel/passes.py:88`."""
        if self.state in ("stopped", "gone", "zombie"):
            return f"is {self.state}"
        frames = [found for line in self.stacks.splitlines() if (found := _FRAME.match(line))]
        collective = next((f["function"] for f in frames if f["file"].endswith(_COLLECTIVES)), None)
        at = ""
        for frame in frames:
            # The path within the package, since other hosts may have it installed elsewhere.
            module = frame["file"].rpartition("/megarl/")[2]
            # A checkout may also be called megarl and contain other packages, so check that the module exists.
            if module not in ("", _WAITS, frame["file"]) and (_PACKAGE / module).is_file():
                at = f"megarl/{module}:{frame['line']}"
                break
        if collective is not None:
            return f"waits in {collective}, called at {at}" if at else f"waits in {collective}"
        return f"is at {at}" if at else f"is {self.state}"


def write_stacks_on_signal() -> None:
    """Make this process write its Python stacks to a file whenever it gets `DUMP_SIGNAL`."""
    file = make_process_files() / f"{os.getpid()}.txt"
    # The file stays open as long as the process lives.
    faulthandler.register(DUMP_SIGNAL, file=file.open("a", encoding="utf-8"), all_threads=True)


def activities(pids: Sequence[int], directory: str) -> dict[int, Activity]:
    """Return the `Activity` of each given process on this host. Processes write their stacks to `directory`."""
    asked = [pid for pid in pids if _state(pid) not in ("stopped", "gone", "zombie")]
    for pid in asked:
        os.kill(pid, DUMP_SIGNAL)
    if asked:
        time.sleep(DUMP_S)
    files = {pid: Path(directory) / f"{pid}.txt" for pid in pids}
    return {
        pid: Activity(state=_state(pid), stacks=file.read_text(encoding="utf-8") if file.exists() else "")
        for pid, file in files.items()
    }


def _state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


def describe(locations: Mapping[str, Location]) -> str:
    """Say in one line what processes are doing: `rank 1 is stopped; rank 0 waits in all_reduce, called at …`."""
    found: dict[str, Activity] = {}
    by_host: dict[str, dict[str, Location]] = defaultdict(dict)
    for name, location in locations.items():
        if location.pid:
            by_host[location.host][name] = location
    for host, its in by_host.items():
        directory, pids = next(iter(its.values())).files, [location.pid for location in its.values()]
        if host == ray.get_runtime_context().get_node_id():
            seen = activities(pids, directory)
        else:
            strategy = NodeAffinitySchedulingStrategy(host, soft=False)
            task = ray.remote(num_cpus=0)(activities).options(scheduling_strategy=strategy)
            try:
                seen = got(task.remote(pids, directory), HOST_S)
            except (RayError, GetTimeoutError):
                seen = {pid: Activity(state="on a host that does not answer", stacks="") for pid in pids}
        found |= {name: seen[location.pid] for name, location in its.items()}
    return "; ".join(f"{name} {activity}" for name, activity in found.items())
