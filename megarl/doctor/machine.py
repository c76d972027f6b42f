"""Check the machine: devices, memory, shared memory, open files, whether programs can be isolated, and what several
nodes need of a host: a network, memory that may be locked, and caches of its own.
"""

import importlib.util
import os
import resource
import shutil
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megarl.doctor.finding import Finding, Severity
from megarl.host.device.accelerators import FP8_RECIPES, Device, torch_build
from megarl.host.device.platform import Platform
from megarl.host.janitor import SHM_DIR, RunScope
from megarl.host.memory import memory_limits
from megarl.host.temp_dir import ADVICE, TempChoice, choose_temp_root
from megarl_sandbox import Isolation, LostError, OptionError, Sandbox

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


GIB = 2**30
# A run of the tiny model (two trainer ranks, one engine) holds 3.4 GiB.
SMALLEST_RUN_GIB = 4.0
# Ray's object store (cluster.object_store_mib) and a small model's weights.
SMALLEST_SHM_GIB = 0.5
# Ray opens a file per worker connection; it recommends this limit.
RECOMMENDED_FILES = 65536
SMALLEST_FILES = 4096


def check_machine(platform: Platform) -> Iterator[Finding]:
    """Check devices, collectives, memory, cores, shared memory and open files; on GPUs also compiler and network."""
    yield devices_finding(platform.name, platform.devices())
    version = torch_build().nccl_version if platform.backend == "nccl" else None
    if platform.backend != "nccl" or version is not None:
        yield Finding(subject="collectives", found=platform.backend if version is None else f"NCCL {version}")
    else:
        yield Finding(
            subject="collectives",
            found="NCCL absent",
            status=Severity.MISSING,
            advice="install the CUDA build of torch (containers/install.sh)",
        )
    free = available_bytes(Path("/proc/meminfo").read_text(encoding="utf-8"))
    yield memory_finding(min([free, *memory_limits()]))
    num_cores = len(os.sched_getaffinity(0))
    yield Finding(
        subject="cores",
        found=str(num_cores),
        status=Severity.OK if num_cores >= 2 else Severity.WARN,
        advice="" if num_cores >= 2 else "trainer and engine take turns on one core; two or more are faster",
    )
    if SHM_DIR.is_dir():
        usage = shutil.disk_usage(SHM_DIR)
        yield shm_finding(usage.total, usage.free)
        yield stale_finding(stale_files(SHM_DIR))
    else:
        yield Finding(subject=str(SHM_DIR), found="absent", status=Severity.MISSING, advice="mount a tmpfs there")
    yield temp_finding(choose_temp_root())
    yield files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE))
    if platform.name == "cuda":
        yield kernels_finding(platform.devices())
        yield compiler_finding(Path(sysconfig.get_path("include")))
        yield from check_network()


def devices_finding(name: str, devices: Sequence[Device]) -> Finding:
    """Report the devices that the platform computes on."""
    if name == "cpu":
        return Finding(subject="devices", found="CPU only (MEGARL_DEVICE=cuda asks for GPUs)")
    if not devices:
        return Finding(
            subject="devices",
            found="nvidia-smi lists none",
            status=Severity.MISSING,
            advice="install the NVIDIA driver, or set MEGARL_DEVICE=cpu",
        )
    kinds = {f"{d.name}, {d.memory_gib:.0f} GiB, driver {d.driver}" for d in devices}
    return Finding(subject="devices", found=f"{len(devices)} × {'; '.join(sorted(kinds))}")


def kernels_finding(devices: Sequence[Device]) -> Finding:
    """Report which recipes of float8 (actor.fp8) all devices compute, and whether DeepEP is there for experts."""
    known = [device.capability for device in devices if device.capability is not None]
    recipes = [name for name, recipe in FP8_RECIPES.items() if known and all(map(recipe.runs_on, known))]
    has_deepep = importlib.util.find_spec("deep_ep") is not None
    return Finding(
        subject="kernels",
        found=f"actor.fp8: {', '.join(recipes) or 'none'}; actor.moe.dispatcher: alltoall"
        f"{', deepep' if has_deepep else ' (DeepEP is not installed)'}",
    )


def available_bytes(meminfo: str) -> int:
    """Return the memory in bytes that new processes may take, from the text of /proc/meminfo."""
    rows = dict(line.split(":", 1) for line in meminfo.splitlines())
    return int(rows["MemAvailable"].split()[0]) << 10


def memory_finding(available: int) -> Finding:
    """Report whether host memory is enough for the smallest run."""
    is_enough = available >= SMALLEST_RUN_GIB * GIB
    return Finding(
        subject="memory",
        found=f"{available / GIB:.1f} GiB available",
        status=Severity.OK if is_enough else Severity.WARN,
        advice="" if is_enough else f"a run of the tiny model takes {SMALLEST_RUN_GIB:g} GiB; end other programs",
    )


def shm_finding(total: int, free: int) -> Finding:
    """Report whether shared memory can hold Ray's object store and the synced weights; sizes in bytes."""
    is_enough = free >= SMALLEST_SHM_GIB * GIB
    return Finding(
        subject=str(SHM_DIR),
        found=f"{free / GIB:.2f} GiB of {total / GIB:.2f} GiB free",
        status=Severity.OK if is_enough else Severity.MISSING,
        advice=""
        if is_enough
        else f"needs {SMALLEST_SHM_GIB:g} GiB and the model's weights: mount -o remount,size=16G {SHM_DIR}, or in a "
        "container --shm-size",
    )


def stale_files(directory: Path) -> list[Path]:
    """Return this user's files in a directory that belong to runs whose processes have all ended."""
    # A link's own owner counts, and its target may be missing.
    own = [path for path in directory.glob("megarl-*-*") if path.lstat().st_uid == os.getuid()]
    run_ids = {path.name.split("-")[1] for path in own}
    dead = {run_id for run_id in run_ids if not RunScope(run_id=run_id).processes()}
    return sorted(path for path in own if path.name.split("-")[1] in dead)


def stale_finding(files: Sequence[Path]) -> Finding:
    """Report the files that ended runs left behind in shared memory."""
    if not files:
        return Finding(subject="stale files", found="none")
    size = sum(file.lstat().st_size for file in files)
    return Finding(
        subject="stale files",
        found=f"{len(files)} of dead runs hold {size / GIB:.2f} GiB",
        status=Severity.WARN,
        advice=f"rm {' '.join(map(str, files))}",
    )


def temp_finding(choice: TempChoice) -> Finding:
    """Report the directory that a run's temporary files will be in, Ray's sockets among them."""
    if choice.root is None:
        found, status = "; ".join(choice.problems), Severity.MISSING
    else:
        found = f"{choice.root}, {shutil.disk_usage(choice.root).free / GIB:.1f} GiB free"
        found += f" (not {'; '.join(choice.problems)})" if choice.problems else ""
        status = Severity.WARN if choice.problems else Severity.OK
    return Finding(
        subject="temporary files", found=found, status=status, advice="" if status is Severity.OK else ADVICE
    )


def files_finding(soft: int, hard: int) -> Finding:
    """Report whether the limit of open files, soft and hard, is high enough."""
    unlimited = soft == resource.RLIM_INFINITY
    is_enough = unlimited or soft >= SMALLEST_FILES
    reachable = RECOMMENDED_FILES if hard == resource.RLIM_INFINITY else min(hard, RECOMMENDED_FILES)
    return Finding(
        subject="open files",
        found="unlimited" if unlimited else f"{soft} (hard limit {hard})",
        status=Severity.OK if is_enough else Severity.WARN,
        advice="" if is_enough else f"Ray needs many on large runs: ulimit -n {reachable}",
    )


def compiler_finding(include: Path) -> Finding:
    """Report whether Triton can compile what starts its kernels, which it does when a run first needs them.

    include: the directory of Python's headers.
    """
    # Where Triton looks, in its order.
    wanted = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    compiler = next(filter(None, map(shutil.which, wanted)), None)
    lacks = [f"no {' or '.join(wanted)}"] if compiler is None else []
    if not (include / "Python.h").is_file():
        lacks.append(f"no {include}/Python.h")
    return Finding(
        subject="C compiler",
        found=", ".join(lacks) or f"{compiler}, with Python's headers",
        status=Severity.MISSING if lacks else Severity.OK,
        advice="Triton's kernels do not start without: apt-get install gcc python3-dev, or name one by CC"
        if lacks
        else "",
    )


def check_sandbox() -> Finding:
    """Check that a program can be isolated; only rewards that run programs need this."""
    try:
        with Sandbox() as sandbox, sandbox.program(""):
            if sandbox.tier is Isolation.NAMESPACES:
                return Finding(subject="code sandbox", found="namespaces (the stronger of two kinds)")
            return Finding(
                subject="code sandbox",
                found="Landlock (the weaker of two kinds: programs see which files exist, and start no processes)",
                advice=f"for namespaces: {'; '.join(sandbox.refusals)}",
            )
    except (OptionError, LostError) as error:
        return Finding(
            subject="code sandbox",
            found="programs cannot be shut in, so rewards from tests of programs refuse to run",
            status=Severity.WARN,
            advice=str(error),
        )
