"""What hosts have for work over several of them, described in files: interfaces, fabrics, locked memory, caches."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.doctor.finding import Severity
from megarl.doctor.machine import caches_finding, fabric_finding, interfaces_finding, memlock_finding

OK, WARN = Severity.OK, Severity.WARN


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Makes files with these texts below a directory, which it returns."""

    def make(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("states", "found", "advises"),
    [
        ({"lo": "unknown", "eth0": "up", "docker0": "down", "veth1a": "up"}, "eth0", False),
        ({"eth0": "up", "ib0": "up", "eth1": "down"}, "eth0, ib0", True),
        ({"lo": "unknown"}, "none that leads to other hosts", False),
    ],
)
def test_interfaces(write: Callable[..., Path], states: dict[str, str], found: str, advises: bool) -> None:
    finding = interfaces_finding(write({f"class/net/{name}/operstate": state for name, state in states.items()}))
    assert (finding.found, "slurm/env.sh" in finding.advice) == (found, advises)


ACTIVE, DOWN = "4: ACTIVE", "1: DOWN"
HCA = {"class/infiniband/mlx5_0/ports/1/state": ACTIVE, "class/infiniband/mlx5_1/ports/1/state": DOWN}
OPEN = {"infiniband/uverbs0": ""}


@pytest.mark.parametrize(
    ("files", "found", "status", "advice"),
    [
        (HCA | OPEN, "mlx5_0", OK, ""),
        (HCA, "mlx5_0, but no {}/infiniband/uverbs*", WARN, "--device=/dev/infiniband"),
        ({"class/infiniband/mlx5_1/ports/1/state": DOWN} | OPEN, "mlx5_1, none of them active", WARN, "ibstat"),
        ({"class/net/eth0/operstate": "up"}, "no InfiniBand: NCCL uses TCP between hosts", OK, ""),
        ({"class/cxi/cxi0/device/vendor": "0x17db"}, "Slingshot: cxi0 (untested)", WARN, "aws-ofi-nccl"),
    ],
)
def test_fabrics(write: Callable[..., Path], files: dict[str, str], found: str, status: Severity, advice: str) -> None:
    root = write(files)
    finding = fabric_finding(root, root)
    assert (finding.found, finding.status) == (found.format(root), status)
    assert advice in finding.advice


def test_efa_is_told_by_its_driver(write: Callable[..., Path]) -> None:
    root = write({"class/infiniband/rdmap0/ports/1/state": ACTIVE, "drivers/efa/module": "", **OPEN})
    (root / "class/infiniband/rdmap0/device").mkdir()
    (root / "class/infiniband/rdmap0/device/driver").symlink_to(root / "drivers/efa")
    finding = fabric_finding(root, root)
    assert (finding.found, finding.status) == ("EFA: rdmap0 (untested)", WARN)


@pytest.mark.parametrize(
    ("soft", "hard", "found", "advice"),
    [
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "unlimited", ""),
        (65536, resource.RLIM_INFINITY, "64 KiB", "ulimit -l unlimited"),
        (8 << 20, 8 << 20, "8192 KiB", "LimitMEMLOCK=infinity"),
    ],
)
def test_locked_memory(soft: int, hard: int, found: str, advice: str) -> None:
    finding = memlock_finding(soft, hard)
    assert (finding.found, finding.status) == (found, WARN if advice else OK)
    assert advice in finding.advice


MOUNTS = "/dev/sda1 / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\ntmpfs /home/a/local tmpfs rw 0 0\n"


@pytest.mark.parametrize(
    ("environment", "shared"),
    [
        ({}, ["TRITON_CACHE_DIR (/home/a/.triton/cache, nfs4)", "VLLM_CACHE_ROOT (/home/a/.cache/vllm, nfs4)"]),
        ({"TRITON_CACHE_DIR": "/tmp/t"}, ["VLLM_CACHE_ROOT (/home/a/.cache/vllm, nfs4)"]),
        ({"TRITON_CACHE_DIR": "/tmp/t", "VLLM_CACHE_ROOT": "/home/a/local/vllm"}, []),
    ],
)
def test_caches(environment: dict[str, str], shared: list[str]) -> None:
    """The longest mount point counts: a disk may be mounted below a home directory that is shared."""
    finding = caches_finding(MOUNTS, environment, Path("/home/a"))
    found = f"on storage that nodes share: {', '.join(shared)}" if shared else "on this host"
    assert (finding.found, finding.status) == (found, WARN if shared else OK)
