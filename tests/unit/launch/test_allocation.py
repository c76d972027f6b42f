"""What a job reads from Slurm's environment, and the ports and addresses that follow."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from megarl.errors import ConfigError
from megarl.launch.allocation import Allocation, RayPorts, address_towards, interface_of, own_address


def test_outside_of_a_job_the_remedy_is_said() -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_ID is not set, so this is no Slurm job; submit one with"):
        Allocation.from_environment({})


def test_jobs_that_run_at_once_have_ports_of_their_own() -> None:
    """Ids of jobs grow by one; a host is hardly shared by jobs that are thousands apart."""
    used = [port for job in range(7000, 10999) for port in _ports(RayPorts.of_job(job))]
    assert len(set(used)) == len(used)
    # Linux takes ports for itself from 32768 on.
    assert all(20000 <= port < 32768 for port in used)


def _ports(ports: RayPorts) -> tuple[int, ...]:
    return ports.gcs, ports.client, ports.agent


def test_a_hosts_own_name_may_be_a_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: {"a": "10.0.0.5", "b": "127.0.1.1"}[name])
    lo, eth = (SimpleNamespace(family=socket.AF_INET, address=a) for a in ("127.0.0.1", "10.0.0.7"))
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [lo], "eth0": [eth]})
    assert own_address("a") == "10.0.0.5"
    assert own_address("b") == "10.0.0.7"
    assert interface_of("10.0.0.7") == "eth0"
    with pytest.raises(ConfigError, match=r"no network interface of \S+ has the address 10\.0\.0\.9"):
        interface_of("10.0.0.9")


def test_the_way_to_this_host_is_the_loopback() -> None:
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"
