"""Devices and the host: what the processes of a run need to find there."""

import os
import resource
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.device.accelerators import Device, torch_build
from megarl.device.platform import Platform
from megarl.doctor.finding import Finding, Status
from megarl.host.janitor import SHM_DIR, RunScope

GIB = 2**30
# A run of the tiny model (two trainer ranks, one engine) holds 3.4 GiB.
SMALLEST_RUN_GIB = 4.0
# Ray's object store (cluster.object_store_mib) and a small model's weights.
SMALLEST_SHM_GIB = 0.5
# Ray opens a file per worker connection; it recommends this limit.
RECOMMENDED_FILES = 65536
SMALLEST_FILES = 4096
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_machine(platform: Platform) -> Iterator[Finding]:
    """Devices, collectives, memory, cores, shared memory and open files."""
    yield devices_finding(platform.name, platform.devices())
    yield _collectives(platform.backend)
    yield memory_finding(_available_bytes())
    yield cores_finding(len(os.sched_getaffinity(0)))
    if SHM_DIR.is_dir():
        usage = shutil.disk_usage(SHM_DIR)
        yield shm_finding(usage.total, usage.free)
        yield stale_finding(stale_files(SHM_DIR))
    else:
        yield Finding(subject=str(SHM_DIR), found="absent", status=Status.MISSING, advice="mount a tmpfs there")
    yield files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE))


def devices_finding(name: str, devices: Sequence[Device]) -> Finding:
    """What the platform computes on."""
    if name == "cpu":
        return Finding(subject="devices", found="CPU only (MEGARL_DEVICE=cuda asks for GPUs)")
    if not devices:
        return Finding(
            subject="devices",
            found="nvidia-smi lists none",
            status=Status.MISSING,
            advice="install the NVIDIA driver, or set MEGARL_DEVICE=cpu",
        )
    kinds = {f"{d.name}, {d.memory_gib:.0f} GiB, driver {d.driver}" for d in devices}
    return Finding(subject="devices", found=f"{len(devices)} × {'; '.join(sorted(kinds))}")


def _collectives(backend: str) -> Finding:
    if backend != "nccl":
        return Finding(subject="collectives", found=backend)
    version = torch_build().nccl_version
    status = Status.MISSING if version is None else Status.OK
    advice = "install the CUDA build of torch (requirements/cuda.txt)" if version is None else ""
    return Finding(subject="collectives", found=f"NCCL {version or 'absent'}", status=status, advice=advice)


def _available_bytes() -> int:
    """Free memory of the host, or of this container if that is less."""
    free = available_bytes(Path("/proc/meminfo").read_text())
    for file in map(Path, CGROUP_LIMITS):
        if file.is_file() and (limit := file.read_text().strip()).isdigit():
            return min(free, int(limit))
    return free


def available_bytes(meminfo: str) -> int:
    """What new processes may take, from Linux's table of memory in KiB."""
    rows = dict(line.split(":", 1) for line in meminfo.splitlines())
    return int(rows["MemAvailable"].split()[0]) << 10


def memory_finding(available: int) -> Finding:
    """Host memory for the processes of the smallest run."""
    is_enough = available >= SMALLEST_RUN_GIB * GIB
    return Finding(
        subject="memory",
        found=f"{available / GIB:.1f} GiB available",
        status=Status.OK if is_enough else Status.WARN,
        advice="" if is_enough else f"a run of the tiny model takes {SMALLEST_RUN_GIB:g} GiB; end other programs",
    )


def cores_finding(num_cores: int) -> Finding:
    """Cores that this process may use."""
    is_enough = num_cores >= 2
    return Finding(
        subject="cores",
        found=str(num_cores),
        status=Status.OK if is_enough else Status.WARN,
        advice="" if is_enough else "trainer and engine take turns on one core; two or more are faster",
    )


def shm_finding(total: int, free: int) -> Finding:
    """Shared memory for Ray's object store and the synced weights."""
    is_enough = free >= SMALLEST_SHM_GIB * GIB
    return Finding(
        subject=str(SHM_DIR),
        found=f"{free / GIB:.2f} GiB of {total / GIB:.2f} GiB free",
        status=Status.OK if is_enough else Status.MISSING,
        advice=""
        if is_enough
        else f"needs {SMALLEST_SHM_GIB:g} GiB and the model's weights: mount -o remount,size=16G {SHM_DIR}, or in a "
        "container --shm-size",
    )


def stale_files(directory: Path) -> list[Path]:
    """Files of runs that have no process left, among those of this user."""
    own = [path for path in directory.glob("megarl-*-*") if path.stat().st_uid == os.getuid()]
    run_ids = {path.name.split("-")[1] for path in own}
    dead = {run_id for run_id in run_ids if not RunScope(run_id=run_id).processes()}
    return sorted(path for path in own if path.name.split("-")[1] in dead)


def stale_finding(files: Sequence[Path]) -> Finding:
    """What dead runs left in shared memory."""
    if not files:
        return Finding(subject="stale files", found="none")
    size = sum(file.stat().st_size for file in files)
    return Finding(
        subject="stale files",
        found=f"{len(files)} of dead runs hold {size / GIB:.2f} GiB",
        status=Status.WARN,
        advice=f"rm {' '.join(map(str, files))}",
    )


def files_finding(soft: int, hard: int) -> Finding:
    """The limit of open files."""
    unlimited = soft == resource.RLIM_INFINITY
    is_enough = unlimited or soft >= SMALLEST_FILES
    reachable = RECOMMENDED_FILES if hard == resource.RLIM_INFINITY else min(hard, RECOMMENDED_FILES)
    return Finding(
        subject="open files",
        found="unlimited" if unlimited else f"{soft} (hard limit {hard})",
        status=Status.OK if is_enough else Status.WARN,
        advice="" if is_enough else f"Ray needs many on large runs: ulimit -n {reachable}",
    )
