"""Read which hosts Slurm gave this job, and choose Ray's ports and addresses."""

import contextlib
import ipaddress
import os
import re
import secrets
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import psutil

from megarl.errors import ConfigError

# Below the range that Linux takes its own ports from.
FIRST_PORT, NUM_PORTS = 20000, 12000
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
# How variables begin that Slurm sets in the processes of a job, and those among them that are settings of its commands.
_OF_JOBS, _OF_USERS = ("SLURM_", "PMI_", "PMIX_"), ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """A group of equal hosts of a job: all hosts, or those of one component of a heterogeneous job."""

    hosts: tuple[str, ...]
    cpus_per_host: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The hosts of a Slurm job: one group per component of a heterogeneous job, otherwise a single group.

    This process runs on the first host of the first group.

    `num_requeues` counts how often the job has been put back into the queue. `lost`: hosts that the job no longer has.
    """

    job_id: int
    groups: tuple[HostGroup, ...]
    num_requeues: int = 0
    lost: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """List the hosts of all groups, in the groups' order."""
        return tuple(host for group in self.groups for host in group.hosts)

    def without_lost(self) -> Self:
        """Return the allocation without the hosts that Slurm holds for down, for failed, or for out of reach."""
        shown = slurm_says("sinfo", "--noheader", "--Node", f"--nodes={','.join(self.hosts)}", "--format=%N %T")
        # An asterisk marks those that do not answer.
        states = dict(line.split()[:2] for line in shown.stdout.splitlines())
        lost = [h for h in self.hosts if (s := states.get(h, "")).startswith(("down", "fail")) or s.endswith("*")]
        groups = tuple(replace(g, hosts=tuple(h for h in g.hosts if h not in lost)) for g in self.groups)
        return replace(self, groups=groups, lost=(*self.lost, *lost))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the allocation from Slurm's environment variables. Raises ConfigError outside of a Slurm job."""
        # A heterogeneous job has each variable once per component.
        suffixes = [f"_HET_GROUP_{i}" for i in range(int(environment.get("SLURM_HET_SIZE", 0)))] or [""]
        groups = []
        try:
            job_id = int(environment["SLURM_JOB_ID"])
            for suffix in suffixes:
                nodes, cpus = (environment[f"SLURM_JOB_{name}{suffix}"] for name in ("NODELIST", "CPUS_PER_NODE"))
                listed = slurm_says("scontrol", "show", "hostnames", nodes)
                if listed.returncode:
                    raise ConfigError(f"cannot list the hosts {nodes} of this job: {listed.stderr.strip()}")
                # `8(x2),4`: two hosts with eight, and one with four.
                fewest = min(int(part.partition("(")[0]) for part in cpus.split(","))
                groups.append(HostGroup(hosts=tuple(listed.stdout.split()), cpus_per_host=fewest))
            return cls(job_id=job_id, groups=tuple(groups), num_requeues=int(environment.get("SLURM_RESTART_COUNT", 0)))
        except KeyError as error:
            raise ConfigError(
                f"{error.args[0]} is not set, so this is no Slurm job; submit one with `megarl slurm submit`, or run "
                f"`megarl train` itself on one host"
            ) from error


def slurm_says(*command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm, with `text` as its input. One that is not there fails as in a shell, with code 127.

    It does not see what Slurm has set for the job in which this process runs: a job that is submitted would get that.
    """
    kept = {name: value for name, value in os.environ.items() if name in _OF_USERS or not name.startswith(_OF_JOBS)}
    try:
        return subprocess.run(
            command, input=text, env=kept, capture_output=True, check=False, encoding="utf-8", errors="replace"
        )
    except OSError as error:
        missing = f"{command[0]}: {error.strerror}; load Slurm's module, or mount its commands into the container"
        return subprocess.CompletedProcess(command, 127, "", missing)


def seconds_of(limit: str) -> int:
    """Convert a time limit of Slurm (minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS) to seconds."""
    found = _TIME.fullmatch(limit)
    if found is None:
        raise ConfigError(f"--time: got {limit!r}, expected Slurm's form, such as 24:00:00 or 2-00:00:00")
    parts = [int(part) for part in found["parts"].split(":")]
    if found["days"] is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return ((int(found["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) == 1:
        return parts[0] * 60
    hours, minutes, seconds = parts if len(parts) == 3 else [0, *parts]
    return (hours * 60 + minutes) * 60 + seconds


def free_ports(count: int) -> list[int]:
    """Draw ports that nothing on this host listens on. Nobody can know them before, to take them or to wait there."""
    drawn: list[int] = []
    for port in secrets.SystemRandom().sample(range(FIRST_PORT, FIRST_PORT + NUM_PORTS), NUM_PORTS):
        if len(drawn) == count:
            break
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            drawn.append(port)
    return drawn


def own_address(hostname: str) -> str:
    """Return the IPv4 address at which other hosts reach this one, which they call `hostname`.

    Some systems resolve a host's own name to a loopback address, or not at all; then return its first other address.
    """
    resolved = "127.0.0.1"
    with contextlib.suppress(OSError):
        resolved = socket.gethostbyname(hostname)
    if not ipaddress.ip_address(resolved).is_loopback:
        return resolved
    addresses = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family == socket.AF_INET]
    return next((a for a in addresses if not ipaddress.ip_address(a).is_loopback), resolved)


def address_towards(address: str, port: int) -> str:
    """Return this host's IPv4 address on the route to another host; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the network interface that has an address of this host. Raises ConfigError if none has."""
    for name, found in psutil.net_if_addrs().items():
        if any(a.address == address for a in found):
            return name
    raise ConfigError(f"no network interface of {socket.gethostname()} has the address {address}")
