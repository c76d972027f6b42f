"""Ray that does not come up, and a cluster that is closed twice. No Ray here: what it does is faked."""

import errno
import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray._private import services

from megarl.cluster import ray_session
from megarl.cluster.cluster import Cluster
from megarl.cluster.ray_failures import explain
from megarl.cluster.ray_session import lost_ray, open_ray
from megarl.config.schema import ClusterConfig, Config
from megarl.errors import WorkerError
from megarl.host.janitor import RUN_ID_VARIABLE

# What Ray itself raises where its processes do not come up, of every kind it has, and the remedy.
FAILURES = [
    (
        Exception(
            "The current node timed out during startup. This could happen because some of the raylet failed to start"
        ),
        "Ray's processes did not come up in time: start again when the machine has less to do",
    ),
    (RuntimeError("Failed to start GCS.\nLast 2 lines of error files:\nE bind failed"), "free CPUs, memory and room"),
    (RuntimeError("Failed to start GCS.\nE bind: Address already in use"), "another program has a port"),
    (ConnectionError("ray client connection timeout"), "Ray's processes did not come up in time"),
    (OSError("AF_UNIX path length cannot exceed 107 bytes"), "set TMPDIR to a directory whose path has at most"),
    (
        ValueError("Attempting to cap object store memory usage at 10485760 bytes, but the minimum allowed is 75 MB"),
        "set cluster.object_store_mib to at least 75",
    ),
    (OSError(errno.ENOSPC, "No space left on device"), "free space in"),
    (OSError(errno.EMFILE, "Too many open files"), "raise the limit of open files: ulimit -n"),
    (RuntimeError("can't start new thread"), "raise the limit of processes (ulimit -u"),
    (socket.gaierror(-2, "Name or service not known"), "the name of this host has no address"),
    (RuntimeError("Version mismatch: The cluster was started with Ray: 2.9"), "install the same Ray and Python"),
    (PermissionError(errno.EACCES, "Permission denied"), "let this user write to"),
    (PermissionError(errno.EPERM, "Operation not permitted"), "a container or sandbox forbids it"),
    (RuntimeError("The raylet ended with exit code -9"), "killed or got no memory"),
    (ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379"), "export RAY_AUTH_MODE=token here"),
]
# What Ray raises says that it waited; the log of the process that it waited for, why. From Ray 2.60.
LOGGED = [
    (
        "gcs_server.err",
        "(gcs_server) logging.cc:118: Unhandled exception: what(): signal_set_service pipe: Too many open files",
        "raise the limit of open files",
    ),
    ("raylet.out", "Failed to start the grpc server: bind 127.0.0.1:6379: Address already in use", "has a port"),
    ("raylet.out", "[2026-11-26 10:32:59,603 I 1 1] (raylet) x.cc:1: Permission denied: no cgroup", "in time"),
    ("raylet.err", "Possible reasons include: (1) SIGKILL by the user or system OOM killer", "in time"),
    ("raylet.err", "terminate called after throwing an instance of 'std::bad_alloc'", "got no memory"),
    ("gcs_server.out", "write failed: No space left on device", "free space in"),
]


@pytest.fixture(autouse=True)
def _same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Ray of other tests goes on, with the token that this process has."""
    monkeypatch.setattr(ray_session, "fresh_token", dict)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.mark.parametrize(("file", "line", "remedy"), LOGGED)
def test_logs_of_rays_processes_say_more_than_a_time_out(tmp_path: Path, file: str, line: str, remedy: str) -> None:
    logs = tmp_path / "mr-1" / "r" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / file).write_text(line)
    assert remedy in explain(RuntimeError("Timed out waiting for file gcs_server_port"), tmp_path / "mr-1")


@pytest.mark.parametrize(("failure", "remedy"), FAILURES, ids=lambda each: str(each)[:20])
def test_ray_that_does_not_start_has_its_remedy(
    failure: Exception, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray's init does, before it fails
        raise failure

    monkeypatch.setattr(ray, "init", init)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(WorkerError) as caught:
        open_ray(ClusterConfig(), num_cpus=2.0, temp_dir=tmp_path / "mr", environment={})
    message = str(caught.value)
    assert message.startswith(f"Ray did not start ({type(failure).__name__}: {failure}); ")
    assert remedy in message.partition("); ")[2]
    assert "{" not in message
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_ray_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", asked.update)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    open_ray(ClusterConfig(object_store_mib=100), num_cpus=6.5, temp_dir=tmp_path, environment={"A": "1"})
    # 6.5 CPUs of placement need seven logical ones, on a host of two.
    assert (asked["num_cpus"], asked["object_store_memory"]) == (7, 100 * 2**20)
    assert asked["runtime_env"] == {"env_vars": {"A": "1"}}
    # Below the run's own directory, since Ray lets everybody write to what it is given.
    assert asked["_temp_dir"] == str(tmp_path / "r")
    open_ray(ClusterConfig(num_cpus=3), num_cpus=6.5, temp_dir=tmp_path, environment={})
    assert asked["num_cpus"] == 3


@pytest.mark.parametrize("joins", [False, True])
def test_what_a_job_of_ray_has_does_not_reach_a_ray_of_the_runs_own(
    joins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its package lies in the cluster that has the job; where both name a variable, Ray would refuse to start."""
    monkeypatch.setattr(os, "environ", {**os.environ, "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"})
    seen: list[tuple[bool, str]] = []

    def init(**_: Any) -> None:
        seen.append(("RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ, os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"]))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray._private.worker, "_global_node", SimpleNamespace(raylet_socket_name=""))
    monkeypatch.setattr(ray_session, "_doors", [])
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        address = f"127.0.0.1:{gcs.getsockname()[1]}" if joins else None
        open_ray(ClusterConfig(address=address), num_cpus=2.0, temp_dir=tmp_path, environment={})
    assert seen == [(joins, "1")]


def test_a_ray_of_the_users_own_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook has called ray.init."""
    shutdowns: list[None] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: shutdowns.append(None))
    with pytest.raises(WorkerError, match=r"connected to a Ray already; call ray.shutdown\(\) first"):
        Cluster(Config())
    assert (shutdowns, RUN_ID_VARIABLE in os.environ) == ([], False)


def test_a_ray_that_came_up_too_slowly_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice; what has come up of it ends first, and nothing else."""
    children: list[subprocess.Popen[bytes]] = []

    def init(**_: Any) -> None:
        assert not [child for child in children[1:] if psutil.pid_exists(child.pid)]
        if len(children) < 3:
            children.append(subprocess.Popen(["sleep", "300"]))
            raise FAILURES[0][0]

    children.append(subprocess.Popen(["sleep", "300"]))
    monkeypatch.setattr(ray, "init", init)
    open_ray(ClusterConfig(), num_cpus=2.0, temp_dir=tmp_path, environment={})
    assert [psutil.pid_exists(child.pid) for child in children] == [True, False, False]
    children[0].kill()
    children[0].wait()


@pytest.mark.parametrize(
    ("runs", "start_timeout_s", "times"),
    [(True, 60.0, 3), (False, 60.0, 1), (True, 1e-9, 1)],
    ids=["up", "ended", "late"],
)
def test_a_node_that_runs_has_time_to_register(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool, start_timeout_s: float, times: int
) -> None:
    (tmp_path / "raylet").symlink_to("/bin/sleep")
    asked: list[str] = []

    def get_node(address: str, _: str) -> None:
        asked.append(address)
        if len(asked) < 3:
            raise RuntimeError("node not found")

    def init(**_: Any) -> None:
        node = subprocess.Popen([tmp_path / "raylet", "300"])
        if not runs:
            node.kill()
            # It has ended, and nobody has asked how.
            os.waitid(os.P_PID, node.pid, os.WEXITED | os.WNOWAIT)
        with suppress(RuntimeError):
            services.get_node("here", "")
        node.kill()
        node.wait()

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray, "init", init)
    open_ray(ClusterConfig(start_timeout_s=start_timeout_s), num_cpus=2.0, temp_dir=tmp_path, environment={})
    assert asked == ["here"] * times
    assert services.get_node is get_node


def test_a_cluster_that_was_joined_is_lost_when_it_accepts_no_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gcs_server may be away for a while; not when a process has died."""
    now = [100.0]
    monkeypatch.setattr(ray_session, "awake_s", lambda: now[0])
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray_session, "is_token_auth_enabled", lambda: True)
    door = tmp_path / "raylet"
    node = SimpleNamespace(raylet_socket_name=str(door), dead_processes=list)
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    with socket.socket(socket.AF_UNIX) as raylet, socket.create_server(("127.0.0.1", 0)) as gcs:
        raylet.bind(str(door))
        raylet.listen()
        port = gcs.getsockname()[1]
        open_ray(ClusterConfig(address=f"127.0.0.1:{port}"), num_cpus=2.0, temp_dir=None, environment={})
        assert lost_ray() is None
        gcs.close()
        now[0] += 1000.0
        # Nobody has looked meanwhile.
        assert lost_ray(patience_s=20.0) is None
        now[0] += 19.0
        assert lost_ray(patience_s=20.0) is None
        assert str(lost_ray()).startswith(f"Ray's gcs_server at 127.0.0.1:{port}, of the cluster at cluster.address, ")
        with socket.create_server(("127.0.0.1", port)):
            now[0] += 10.0
            assert lost_ray(patience_s=20.0) is None
        now[0] += 3.0
        assert lost_ray(patience_s=20.0) is None
        now[0] += 20.0
        assert "(Connection refused), and no run goes on without it" in str(lost_ray(patience_s=20.0))
    assert str(lost_ray()).startswith(f"Ray's raylet at {door}, of the cluster at cluster.address, ")
    open_ray(ClusterConfig(), num_cpus=2.0, temp_dir=tmp_path, environment={})
    assert lost_ray() is None


def test_a_raylet_whose_host_has_no_other_process_of_the_run_is_asked_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = [100.0], list[str]()
    reasons = [""]
    monkeypatch.setattr(ray_session, "awake_s", lambda: now[0])
    monkeypatch.setattr(ray._private.worker, "_global_node", None)
    monkeypatch.setattr(ray_session, "why_not", lambda address, within_s: asked.append(address) or reasons[0])
    monkeypatch.setattr(ray_session, "_doors", [ray_session._Door(kind=ray_session.RAYLET, address="/r")])
    for _ in range(120):
        now[0] += 1.0
        assert lost_ray(patience_s=20.0) is None
    assert len(asked) == 2
    reasons[0], died = "Connection refused", now[0]
    while lost_ray(patience_s=20.0) is None:
        now[0] += 1.0
    assert now[0] - died <= 60.0 + 20.0 + 2.0


def test_a_cluster_whose_ray_does_not_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def init(**_: Any) -> None:
        children.append(subprocess.Popen(["sleep", "300"]))
        raise FAILURES[0][0]

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(WorkerError, match="Ray did not start"):
        Cluster(Config(), with_engine=False)
    assert not [child for child in children if psutil.pid_exists(child.pid)]
    assert RUN_ID_VARIABLE not in os.environ


def test_a_cluster_may_be_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shutdowns: list[None] = []
    monkeypatch.setattr(Cluster, "_start", lambda *_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: shutdowns.append(None))
    with Cluster(Config()) as cluster:
        cluster.close()
        # The next descriptors have the numbers that the janitor's pipe had.
        read_end, write_end = os.pipe()
        cluster.close()
    os.write(write_end, b"open")
    assert os.read(read_end, 4) == b"open"
    os.close(read_end)
    os.close(write_end)
    # By now Ray may be another cluster's.
    assert len(shutdowns) == 1
