"""Devices, memory, shared memory, open files; and the command's output and exit code."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megarl import cli
from megarl.doctor import render
from megarl.doctor.finding import Finding, Severity
from megarl.doctor.machine import (
    available_bytes,
    check_machine,
    compiler_finding,
    devices_finding,
    files_finding,
    kernels_finding,
    memory_finding,
    shm_finding,
    stale_files,
    stale_finding,
)
from megarl.host.device import accelerators
from megarl.host.device.accelerators import Device, peak_tflops
from megarl.host.device.platform import CpuPlatform, CudaPlatform
from megarl.host.janitor import RUN_ID_VARIABLE
from tests.helpers.second_user import UID, needs_second_user

GIB = 2**30
H100 = Device(name="NVIDIA H100 80GB HBM3", memory_gib=79.6, driver="580.1")


def test_devices() -> None:
    assert devices_finding("cpu", []).status is Severity.OK
    assert devices_finding("cuda", []).status is Severity.MISSING
    assert devices_finding("cuda", [H100] * 8).found == "8 × NVIDIA H100 80GB HBM3, 80 GiB, driver 580.1"


def test_a_listing_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "NVIDIA H100 80GB HBM3, 81559, 570.86.15, 9.0\nNVIDIA, odd name, 40960, 570.86.15, 12.0\n\n"
    answer = subprocess.CompletedProcess([], 0, stdout=listing)
    monkeypatch.setattr(accelerators.subprocess, "run", lambda *_, **__: answer)
    assert accelerators.nvidia_devices() == [
        Device(name="NVIDIA H100 80GB HBM3", memory_gib=81559 / 1024, driver="570.86.15", capability=9.0),
        Device(name="NVIDIA, odd name", memory_gib=40.0, driver="570.86.15", capability=12.0),
    ]


@pytest.mark.parametrize(
    ("capabilities", "recipes"),
    [([9.0], "blockwise"), ([10.3], "blockwise, mxfp8"), ([10.0, 9.0], "blockwise"), ([8.0], "none"), ([], "none")],
)
def test_kernels_that_all_devices_have(capabilities: list[float], recipes: str) -> None:
    devices = [replace(H100, capability=each) for each in capabilities]
    expected = f"actor.fp8: {recipes}; actor.moe.dispatcher: alltoall (DeepEP is not installed)"
    assert kernels_finding(devices).found == expected


def test_known_peaks() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4
    assert peak_tflops("NVIDIA H100 PCIe", "bfloat16") == 756.0
    assert peak_tflops("NVIDIA H100 80GB HBM3", "float32") is None
    assert peak_tflops("Some CPU", "bfloat16") is None


def test_memory_and_shared_memory() -> None:
    assert available_bytes("MemTotal:  8000 kB\nMemAvailable:    3000 kB\nHugePages_Total: 0\n") == 3000 * 1024
    assert memory_finding(4 * GIB).status is Severity.OK
    assert memory_finding(4 * GIB - 1).status is Severity.WARN
    assert shm_finding(GIB, GIB // 2).status is Severity.OK
    small = shm_finding(64 << 20, 64 << 20)
    assert (small.status, small.found) == (Severity.MISSING, "0.06 GiB of 0.06 GiB free")


def test_open_files() -> None:
    assert files_finding(4096, 4096).status is Severity.OK
    assert files_finding(resource.RLIM_INFINITY, resource.RLIM_INFINITY).found == "unlimited"
    few = files_finding(1024, 30000)
    assert (few.status, few.advice) == (Severity.WARN, "Ray needs many on large runs: ulimit -n 30000")


def test_files_of_dead_runs(tmp_path: Path) -> None:
    for name in ("megarl-11111111-weights", "megarl-22222222-weights", "other"):
        (tmp_path / name).write_bytes(b"12345678")
    environment = {**os.environ, RUN_ID_VARIABLE: "22222222"}
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as alive:
        assert alive.stdout is not None
        alive.stdout.readline()
        stale = stale_files(tmp_path)
        assert stale == [tmp_path / "megarl-11111111-weights"]
        assert stale_finding(stale).advice == f"rm {tmp_path}/megarl-11111111-weights"
        alive.communicate(b"")
    assert len(stale_files(tmp_path)) == 2
    assert stale_finding([]).status is Severity.OK


@needs_second_user
def test_what_others_leave_in_shared_memory_is_not_the_users(tmp_path: Path) -> None:
    """A link to nothing, and one to a file of the user."""
    (tmp_path / "own").touch()
    for name, target in (("megarl-1-nothing", "/nowhere"), ("megarl-1-own", tmp_path / "own")):
        (tmp_path / name).symlink_to(target)
        os.chown(tmp_path / name, UID, UID, follow_symlinks=False)
    assert stale_files(tmp_path) == []


def test_every_part_of_the_machine_is_looked_at() -> None:
    subjects = [finding.subject for finding in check_machine(CpuPlatform())]
    files = ["/dev/shm", "stale files", "temporary files", "open files"]
    assert subjects == ["devices", "collectives", "memory", "cores", *files]
    assert [finding.subject for finding in check_machine(CudaPlatform())] == [
        *subjects,
        *("kernels", "C compiler", "interfaces", "fabric", "locked memory", "kernel caches"),
    ]


def test_the_c_compiler_is_looked_for_as_triton_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's CC alone if it is set, else gcc, else clang (triton/runtime/build.py); and Python's headers."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    neither = compiler_finding(tmp_path)
    assert (neither.status, neither.found) == (Severity.MISSING, f"no gcc or clang, no {tmp_path}/Python.h")
    assert "python3-dev" in neither.advice
    (tmp_path / "Python.h").touch()
    for name in ("clang", "gcc"):
        (tmp_path / name).touch(mode=0o755)
        assert compiler_finding(tmp_path).found == f"{tmp_path}/{name}, with Python's headers"
        assert compiler_finding(tmp_path).status is Severity.OK
    monkeypatch.setenv("CC", "cc-13")
    assert compiler_finding(tmp_path).found == "no cc-13"


FINE = Finding(subject="a", found="1")
POOR = Finding(subject="bb", found="2", status=Severity.WARN, advice="get more")
GONE = Finding(subject="c", found="none", status=Severity.MISSING, advice="get one")


def test_table() -> None:
    assert "\n".join(render.to_lines([FINE, POOR], render.CAN_START)) == (
        "ok      a   1\nwarn    bb  2\n            → get more\na run can start here: 1 ok, 1 warn"
    )
    assert render.to_lines([GONE], render.CAN_START)[-1] == "a run cannot start here: 1 missing"


@pytest.mark.parametrize(("findings", "code"), [([FINE, POOR], 0), ([FINE, GONE], 1)])
def test_exit_code_and_json(
    findings: list[Finding], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render, "check_packages", lambda _: findings)
    monkeypatch.setattr(render, "check_machine", lambda _: [])
    if code:
        with pytest.raises(SystemExit) as caught:
            cli.main(["doctor", "--json"])
        assert caught.value.code == code
    else:
        cli.main(["doctor", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["can_start"] is (code == 0)
    assert printed["findings"][1] == {
        "subject": findings[1].subject,
        "found": findings[1].found,
        "status": findings[1].status.value,
        "advice": findings[1].advice,
    }
