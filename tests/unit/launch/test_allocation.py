"""What a job reads from Slurm's environment, and the ports and addresses that follow."""

import signal
import socket
import subprocess
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megarl.errors import ConfigError
from megarl.launch import allocation, host, job
from megarl.launch.allocation import (
    Allocation,
    HostGroup,
    address_towards,
    free_ports,
    interface_of,
    own_address,
)


def test_outside_of_a_job_the_remedy_is_said() -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_ID is not set, so this is no Slurm job; submit one with"):
        Allocation.from_environment({})


def _scontrol(monkeypatch: pytest.MonkeyPatch, expand: dict[str, str]) -> None:
    """`scontrol show hostnames EXPRESSION`, of this table."""
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: SimpleNamespace(returncode=0, stdout=expand[command[3]])
    )


def test_equal_hosts_are_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    _scontrol(monkeypatch, {"gpu[7-9]": "gpu7\ngpu8\ngpu9\n"})
    environment = {
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NODELIST": "gpu[7-9]",
        # Slurm counts runs of equal hosts.
        "SLURM_JOB_CPUS_PER_NODE": "64(x2),48",
        "SLURM_RESTART_COUNT": "3",
    }
    assert Allocation.from_environment(environment) == Allocation(
        job_id=12, groups=(HostGroup(hosts=("gpu7", "gpu8", "gpu9"), cpus_per_host=48),), num_requeues=3
    )


def test_components_of_a_heterogeneous_job_are_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As sbatch's manual page lists the variables: the plain ones are those of the first component."""
    _scontrol(monkeypatch, {"h[1-2]": "h1\nh2\n", "l5": "l5\n"})
    environment = {
        "SLURM_JOB_ID": "30",
        "SLURM_JOB_NODELIST": "h[1-2]",
        "SLURM_JOB_CPUS_PER_NODE": "96(x2)",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_ID_HET_GROUP_0": "30",
        "SLURM_JOB_ID_HET_GROUP_1": "31",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "h[1-2]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "l5",
        "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "96(x2)",
        "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "32",
    }
    allocation = Allocation.from_environment(environment)
    trainer, engines = (
        HostGroup(hosts=("h1", "h2"), cpus_per_host=96),
        HostGroup(hosts=("l5",), cpus_per_host=32),
    )
    assert allocation == Allocation(job_id=30, groups=(trainer, engines))
    assert allocation.hosts == ("h1", "h2", "l5")


def test_ports_are_drawn_from_those_that_nothing_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a range of eight, two are taken: each draw of six has the others, in an order that nobody can know."""
    monkeypatch.setattr(allocation, "NUM_PORTS", 8)
    monkeypatch.setattr(allocation, "FIRST_PORT", first := _free_range(8))
    with socket.create_server(("127.0.0.1", first + 2)), socket.create_server(("0.0.0.0", first + 5)):
        draws = [free_ports(6) for _ in range(20)]
    assert {frozenset(draw) for draw in draws} == {frozenset(first + i for i in (0, 1, 3, 4, 6, 7))}
    # Twenty equal draws of 720 orders would be a miracle.
    assert len(set(map(tuple, draws))) > 1


def test_ports_are_below_those_that_linux_takes_for_itself() -> None:
    drawn = free_ports(500)
    assert len(set(drawn)) == 500
    assert all(20000 <= port < 32768 for port in drawn)


def test_hosts_meet_at_the_port_that_the_job_has_drawn() -> None:
    arguments = Namespace(head="10.0.0.1:23456", num_cpus=1, object_store_mib=75, node_timeout_s=30.0)
    head, other = (host._ray_command(arguments, address, Path("/t")) for address in ("10.0.0.1", "10.0.0.2"))
    assert {"--head", "--port=23456"} <= set(head)
    assert "--address=10.0.0.1:23456" in other
    ports = dict(word.split("=") for word in head if "port=" in word)
    assert len({ports["--port"], ports["--ray-client-server-port"], ports["--dashboard-agent-listen-port"]}) == 3


def _free_range(count: int) -> int:
    """The first of so many ports in a row that nothing listens on."""
    free = set(free_ports(12000))
    return next(first for first in sorted(free) if free.issuperset(range(first, first + count)))


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


def test_a_host_that_cannot_look_its_own_name_up_has_an_address_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    lo, eth = (SimpleNamespace(family=socket.AF_INET, address=a) for a in ("127.0.0.1", "10.0.0.7"))
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [lo], "eth0": [eth]})
    assert own_address("laptop") == "10.0.0.7"


def test_without_slurms_commands_a_job_says_so_and_goes_on_where_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, some may be missing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_CPUS_PER_NODE": "8(x2)"}
    with pytest.raises(
        ConfigError, match=r"cannot list the hosts a\[1-2\] .*: scontrol: No such file .*; load Slurm's"
    ):
        Allocation.from_environment(given)
    whole = Allocation(job_id=7, groups=(HostGroup(hosts=("a1", "a2"), cpus_per_host=8),))
    assert whole.without_lost() == whole
    assert not job._wants_queue([signal.SIGTERM], 7)
    # The limit comes near before the step ends that a user stops, or that the limit has stopped.
    assert not job._wants_queue([signal.SIGTERM, signal.SIGUSR1], 7)
    assert job._wants_queue([signal.SIGUSR1, signal.SIGTERM], 7)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    with pytest.raises(ConfigError, match="of this job: Unable to contact slurm controller"):
        Allocation.from_environment(given)
