"""Start Ray on this host for one run, or join a Ray cluster that runs already; end processes on any of its hosts."""

import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from ray._private import ray_constants, services
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.object_store import LEAST_MIB
from megarl.cluster.ray_failures import TIMED_OUT, explain, known_remedy
from megarl.cluster.remotes import Location, got
from megarl.config.schema import ClusterConfig
from megarl.errors import WorkerError
from megarl.host.clock import awake_s
from megarl.host.janitor import HOSTED_RUN_VARIABLE, RUN_ID_VARIABLE
from megarl.host.listeners import LOOPBACK
from megarl.host.ray_environment import fresh_token
from megarl.host.reach import CONNECT_S, why_not
from megarl.host.signals import keep_handlers
from megarl.host.streams import print_lines
from megarl.host.temp_dir import RAY_DIRECTORY

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


# How often to start Ray on a busy machine, and how long to wait for the end of what has come up.
TRIES, END_S = 3, 5.0
# How often to look for a host that has not joined yet.
POLL_S = 0.2
# Without these of Ray's processes nothing goes on. Ray itself ends a driver that they leave behind, without a word.
RAYLET, GCS = ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER
# How often to look whether those of a joined cluster still listen, and how long a gcs_server may take to come back.
LOOK_S, GONE_S = 2.0, 20.0
# A raylet logs every question: as long as it answers, it is asked so often.
LOOK_RAYLET_S = 60.0


@dataclass(slots=True, kw_only=True)
class _Door:
    """Where a process of a joined cluster listens, when it was last asked, and since when it accepts no connections."""

    kind: str
    address: str
    asked: float = 0.0
    closed_since: float = math.inf


_doors: list[_Door] = []


def open_ray(
    settings: ClusterConfig, *, num_cpus: float, temp_dir: Path | None, environment: Mapping[str, str]
) -> None:
    """Connect this process to the run's Ray cluster. Ray's workers get the environment variables in `environment`.

    Without `settings.address`, start Ray here, with `settings.num_cpus` logical CPUs, or else at least `num_cpus`. It
    keeps its files in `temp_dir`, listens only on the loopback interface, and requires a token that only this process
    and its children have.

    Raises:
        WorkerError: Ray did not start or could not be reached, or not all of `settings.hosts` joined.
    """
    _doors.clear()
    if settings.address is not None:
        _join(settings.address, settings, environment)
        return
    assert temp_dir is not None, "a Ray of this host's own needs a directory"
    os.environ.update(fresh_token())
    # Ray has read them already, when this process imported it.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    # Otherwise Ray would replace the loopback address by the address at which other hosts reach this one.
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        _start(
            environment,
            settings.start_timeout_s,
            address="local",
            # Logical CPUs only decide placement: ranks and engines may share a core.
            num_cpus=settings.num_cpus or max(os.cpu_count() or 1, math.ceil(num_cpus)),
            object_store_memory=(settings.object_store_mib or LEAST_MIB) << 20,
            include_dashboard=False,
            _temp_dir=str(temp_dir / RAY_DIRECTORY),
            _node_ip_address=LOOPBACK,
        )
    # Ray may raise OSError, ValueError, RuntimeError or Exception itself, depending on where it fails.
    except Exception as error:
        raise WorkerError(f"Ray did not start ({type(error).__name__}: {error}); {explain(error, temp_dir)}") from error


def _start(environment: Mapping[str, str], timeout_s: float, **settings: object) -> None:
    """Start Ray; again where its processes were too slow for limits of Ray's that nobody can set."""
    deadline = awake_s() + timeout_s
    for left in reversed(range(TRIES)):
        others = set(psutil.Process().children(recursive=True))
        try:
            with _time_to_register(deadline):
                return _connect(environment, **settings)
        except Exception as error:
            started = [each for each in psutil.Process().children(recursive=True) if each not in others]
            for process in started:
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
            psutil.wait_procs(started, timeout=END_S)
            if not left or not TIMED_OUT.search(str(error)):
                raise


@contextmanager
def _time_to_register(deadline: float) -> Iterator[None]:
    """Let Ray wait for its node until a deadline, while the node runs: its own 30 s are too few on a busy machine."""
    get_node = services.get_node

    def runs() -> bool:
        with suppress(psutil.NoSuchProcess):
            return any(each.name() == "raylet" and is_alive(each) for each in psutil.Process().children())
        return False

    def registered(*where: object) -> object:
        while True:
            try:
                return get_node(*where)
            except RuntimeError:
                if awake_s() > deadline or not runs():
                    raise
                time.sleep(POLL_S)

    services.get_node = registered
    try:
        yield
    finally:
        services.get_node = get_node


def lost_ray(*, patience_s: float = 0.0) -> str | None:
    """Say which process this one's Ray has lost that it needs, and how; None if it has lost none.

    patience_s: for how long those of a cluster that was joined may be out of reach.
    """
    node, now = ray._private.worker._global_node, awake_s()
    for kind, process in () if node is None else node.dead_processes():
        if kind in (RAYLET, GCS):
            code = process.returncode
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return (
                f"Ray's {kind} (process {process.pid}) has ended {how}, and no run goes on without it; see whether "
                "somebody or the kernel's out-of-memory killer (dmesg) ended it, then --resume; see RUN/logs"
            )
    for door in _doors:
        is_rare = door.kind == RAYLET and door.closed_since == math.inf
        # Where a raylet ends, processes die, and then it is asked at once; unless all of them are on other hosts.
        if patience_s and now < door.asked + (LOOK_RAYLET_S if is_rare else LOOK_S):
            continue
        door.asked, reason = now, why_not(door.address, within_s=1.0)
        door.closed_since = min(door.closed_since, now) if reason else math.inf
        if now >= door.closed_since + patience_s:
            return (
                f"Ray's {door.kind} at {door.address}, of the cluster at cluster.address, accepts no connections any "
                f"more ({reason}), and no run goes on without it; look into that cluster's logs, start it again, then "
                "--resume; see RUN/logs"
            )
    return None


def _join(address: str, settings: ClusterConfig, environment: Mapping[str, str]) -> None:
    # A job starts Ray and its driver side by side; any other cluster is there already.
    wait_s = settings.start_timeout_s if HOSTED_RUN_VARIABLE in os.environ else CONNECT_S
    deadline = awake_s() + settings.start_timeout_s
    try:
        _wait_for_port(address, awake_s() + wait_s)
        _connect(environment, address=address)
        raylet = ray._private.worker._global_node.raylet_socket_name
        _doors.extend([_Door(kind=RAYLET, address=raylet), _Door(kind=GCS, address=address)])
    except Exception as error:
        raise WorkerError(
            f"cluster.address: no Ray cluster at {address} within {wait_s:g} s "
            f"({type(error).__name__}: {error}); "
            f"{known_remedy(error) or 'look into the logs of the hosts, or raise cluster.start_timeout_s'}"
        ) from error
    if not is_token_auth_enabled():
        print_lines(
            f"warning: cluster.address: whoever reaches the Ray at {address} can run code as you; start it with "
            "RAY_AUTH_MODE=token and a token (`ray get-auth-token --generate`), and export the same here"
        )
    while missing := set(settings.hosts) - {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}:
        if awake_s() > deadline:
            raise WorkerError(
                f"{', '.join(sorted(missing))} of {len(settings.hosts)} hosts did not join Ray at {address} within "
                f"{settings.start_timeout_s:g} s; look into the logs of these hosts, or raise cluster.start_timeout_s"
            )
        time.sleep(POLL_S)


def _wait_for_port(address: str, deadline: float) -> None:
    """Wait until a port accepts connections; Ray itself would give up after seconds and print many lines about it."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        except OSError:
            if awake_s() > deadline:
                raise
            time.sleep(POLL_S)


class _JobConfig(ray.job_config.JobConfig):
    """Keeps Ray from letting its workers look for modules first where the driver stands; see `search_here_last`."""

    def _runtime_env_has_working_dir(self) -> bool:
        return True


def _connect(environment: Mapping[str, str], **settings: object) -> None:
    # Of `ray job submit`: files and variables of the cluster that has the job. A Ray of this run's own has no such
    # files, and the variables are this process's, too.
    if settings["address"] == "local":
        os.environ.pop(RAY_JOB_CONFIG_JSON_ENV_VAR, None)
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    of_run = {"runtime_env": {"env_vars": dict(environment)}, "job_config": _JobConfig()}
    with keep_handlers():
        ray.init(log_to_driver=False, logging_level="error", **of_run, **settings)
