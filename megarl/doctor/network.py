"""Check what processes of several nodes need of a host: a network, memory that may be locked, and caches of its own."""

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.doctor.finding import Finding, Severity

# File systems that nodes share, as /proc/mounts names them.
SHARED = frozenset(("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse.sshfs", "wekafs", "panfs"))
# Where libraries keep compiled kernels, below the home directory unless a variable says otherwise.
CACHES = {"TRITON_CACHE_DIR": ".triton/cache", "VLLM_CACHE_ROOT": ".cache/vllm"}
# Interfaces that lead to no other host.
_INNER = ("lo", "docker", "virbr", "veth", "br-", "cni", "podman")
_PLUGIN = "load NCCL's plugin aws-ofi-nccl, and see that NCCL_DEBUG=INFO names it; megarl has not been tried on it"


def check_network() -> Iterator[Finding]:
    """Check this host, as one of several on which GPUs work together."""
    yield interfaces_finding(Path("/sys"))
    yield fabric_finding(Path("/sys"), Path("/dev"))
    yield memlock_finding(*resource.getrlimit(resource.RLIMIT_MEMLOCK))
    yield caches_finding(Path("/proc/self/mounts").read_text(encoding="utf-8"), os.environ, Path.home())


def interfaces_finding(sys: Path) -> Finding:
    """Report the interfaces that may lead to other hosts."""
    names = sorted(path.name for path in (sys / "class/net").glob("*") if not path.name.startswith(_INNER))
    names = [name for name in names if _text(sys / "class/net" / name / "operstate") != "down"]
    return Finding(
        subject="interfaces",
        found=", ".join(names) or "none that leads to other hosts",
        advice="a Slurm job takes the one on the route to its first node; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME in "
        "slurm/env.sh name another"
        if len(names) > 1
        else "",
    )


def fabric_finding(sys: Path, dev: Path) -> Finding:
    """Report the devices by which NCCL reaches other hosts without TCP, and whether processes here may open them."""
    devices = sorted((sys / "class/infiniband").glob("*"))
    active = [each.name for each in devices if any("ACTIVE" in _text(port) for port in each.glob("ports/*/state"))]
    fabrics = {
        "EFA": [each.name for each in devices if (each / "device/driver").resolve().name == "efa"],
        "Slingshot": sorted(path.name for path in (sys / "class/cxi").glob("*")),
    }
    if found := {name: own for name, own in fabrics.items() if own}:
        listed = "; ".join(f"{name}: {', '.join(own)}" for name, own in found.items())
        return Finding(subject="fabric", found=f"{listed} (untested)", status=Severity.WARN, advice=_PLUGIN)
    if not devices:
        return Finding(subject="fabric", found="no InfiniBand: NCCL uses TCP between hosts")
    problem, advice = "", ""
    if not list((dev / "infiniband").glob("uverbs*")):
        problem = f", but no {dev}/infiniband/uverbs*"
        advice = "NCCL would use TCP; give the container the devices: docker run --device=/dev/infiniband"
    elif not active:
        problem, advice = ", none of them active", "NCCL would use TCP; see ibstat for the link and the subnet manager"
    return Finding(
        subject="fabric",
        found=f"{', '.join(active or [each.name for each in devices])}{problem}",
        status=Severity.WARN if problem else Severity.OK,
        advice=advice,
    )


def memlock_finding(soft: int, hard: int) -> Finding:
    """Report whether InfiniBand, and copies between host and GPUs, may lock as much memory as they need."""
    if soft == resource.RLIM_INFINITY:
        return Finding(subject="locked memory", found="unlimited")
    remedy = (
        "ulimit -l unlimited"
        if hard == resource.RLIM_INFINITY
        else "let the administrator set LimitMEMLOCK=infinity for slurmd, or docker run --ulimit memlock=-1"
    )
    return Finding(
        subject="locked memory",
        found=f"{soft >> 10} KiB",
        status=Severity.WARN,
        advice=f"NCCL over InfiniBand fails without more (ibv_reg_mr, Cannot allocate memory): {remedy}",
    )


def caches_finding(mounts: str, environment: Mapping[str, str], home: Path) -> Finding:
    """Report caches of compiled kernels on storage that nodes share, where processes of several wait for each other."""
    kinds = dict(line.split()[1:3] for line in mounts.splitlines())
    shared = []
    for variable, usual in CACHES.items():
        path = Path(environment.get(variable, home / usual))
        nearest = next((str(each) for each in (path, *path.parents) if str(each) in kinds), "/")
        if kinds.get(nearest) in SHARED:
            shared.append(f"{variable} ({path}, {kinds[nearest]})")
    return Finding(
        subject="kernel caches",
        found=f"on storage that nodes share: {', '.join(shared)}" if shared else "on this host",
        status=Severity.WARN if shared else Severity.OK,
        advice="jobs of slurm/train.sbatch have them on each node; elsewhere name a local directory" if shared else "",
    )


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""
