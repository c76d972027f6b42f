"""Ray that does not come up, and a cluster that is closed twice. No Ray here: what it does is faked."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray

from megarl.cluster.cluster import Cluster
from megarl.cluster.ray_session import open_ray
from megarl.config.schema import ClusterConfig, Config
from megarl.errors import WorkerError
from megarl.host.janitor import RUN_ID_VARIABLE

# What Ray itself raises where its processes do not come up in time, of every kind it has.
FAILURES = [
    Exception(
        "The current node timed out during startup. This could happen because some of the raylet failed to start"
    ),
    RuntimeError("Failed to start GCS.\nLast 2 lines of error files:\nE bind failed"),
    ConnectionError("ray client connection timeout"),
    OSError("AF_UNIX path length cannot exceed 107 bytes"),
    ValueError("The requested object store memory size is greater than the total available memory."),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_ray_that_does_not_start_is_one_kind_of_error(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray's init does, before it fails
        raise failure

    monkeypatch.setattr(ray, "init", init)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(WorkerError) as caught:
        open_ray(ClusterConfig(), num_cpus=2.0, temp_dir=tmp_path / "mr", environment={})
    message = str(caught.value)
    assert message.startswith(f"Ray did not start ({type(failure).__name__}: {failure}); free CPUs, memory")
    assert message.endswith("or lower cluster.object_store_mib, and start the run again")
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_ray_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", asked.update)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    open_ray(ClusterConfig(object_store_mib=100), num_cpus=6.5, temp_dir=tmp_path, environment={"A": "1"})
    # 6.5 CPUs of placement need seven logical ones, on a host of two.
    assert (asked["num_cpus"], asked["object_store_memory"]) == (7, 100 * 2**20)
    assert asked["runtime_env"] == {"env_vars": {"A": "1"}}
    open_ray(ClusterConfig(num_cpus=3), num_cpus=6.5, temp_dir=tmp_path, environment={})
    assert asked["num_cpus"] == 3


def test_a_cluster_whose_ray_does_not_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def init(**_: Any) -> None:
        children.append(subprocess.Popen(["sleep", "300"]))
        raise FAILURES[0]

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(WorkerError, match="Ray did not start"):
        Cluster(Config(), with_engine=False)
    assert children[0].wait(10) == -signal.SIGTERM
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
