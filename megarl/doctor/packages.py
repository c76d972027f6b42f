"""Check the installed packages against the requirements in megarl's metadata for this platform."""

import importlib.metadata
import importlib.util
import platform as host
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import megarl
from megarl.doctor.finding import Finding, Severity
from megarl.errors import ConfigError
from megarl.host.device.accelerators import torch_build
from megarl.host.device.platform import TESTED_MEGATRON, platform

if TYPE_CHECKING:
    from packaging.requirements import Requirement

MIN_PYTHON = (3, 11)
# The extras of megarl whose packages a run uses, by platform.
EXTRAS = {"cpu": ("cpu",), "cuda": ("cuda", "apex")}
# A run without these packages loses this.
OPTIONAL = {
    "transformer-engine": "megarl's norm and attention take its place, without fused kernels and grouped experts",
    "apex": "nor is Transformer Engine, so weight gradients are not added up within the matrix products "
    "(gradient_accumulation_fusion)",
}
# Importing Transformer Engine takes about ten seconds; a file system that nodes share makes it slower.
IMPORT_S = 120.0
# The default builds of these load CUDA libraries; if torch has no CUDA, vLLM cannot be imported beside them.
ABSENT_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
# A module of NVIDIA's apex that the unrelated package `apex` on the Python Package Index does not have.
NVIDIA_APEX_MODULE = "multi_tensor_apply"


def check_packages(check_megatron: Callable[[], Sequence[str]]) -> Iterator[Finding]:
    """Check Python, megarl, and every package that it requires on this platform.

    check_megatron: returns what it looked for, and raises ConfigError if megatron-core lacks something that megarl
    needs; called for untested versions.
    """
    is_new = sys.version_info[:2] >= MIN_PYTHON
    yield Finding(
        subject="python",
        found=f"{host.python_version()} ({host.machine()})",
        status=Severity.OK if is_new else Severity.MISSING,
        advice="" if is_new else f"install Python {'.'.join(map(str, MIN_PYTHON))} or newer",
    )
    yield Finding(subject="megarl", found=megarl.__version__)
    try:
        declared = importlib.metadata.requires("megarl") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            subject="requirements",
            found="megarl is not installed, so there is no list of them",
            status=Severity.MISSING,
            advice="run `make install`, or `pip install -e .` in the checkout",
        )
        return
    # Not before: this module must load where nothing is installed.
    from packaging.requirements import Requirement

    for requirement in map(Requirement, declared):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in EXTRAS[platform().name]):
            yield _package(requirement, check_megatron)
    for name in ABSENT_ON_CPU if platform().name == "cpu" else ():
        if (version := installed_version(name)) is not None and not version.endswith("+cpu"):
            yield Finding(
                subject=name,
                found=f"{version}, a build that needs CUDA",
                status=Severity.MISSING,
                advice=f"vLLM does not import beside it: pip uninstall {name}",
            )


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(requirement: "Requirement", check_megatron: Callable[[], Sequence[str]]) -> Finding:
    name = requirement.name
    special: Mapping[str, Callable[[Requirement, str], Finding]] = {
        "torch": _torch,
        "megatron-core": partial(_megatron, check_megatron),
        "transformer-engine": _transformer_engine,
        "apex": _apex,
    }
    version = installed_version(name)
    if version is None and name == "apex" and installed_version("transformer-engine") is not None:
        return Finding(subject=name, found="not installed, nor needed beside Transformer Engine")
    if version is None:
        needed = name not in OPTIONAL
        return Finding(
            subject=name,
            found="not installed" if needed else f"not installed: {OPTIONAL[name]}",
            status=Severity.MISSING if needed else Severity.WARN,
            advice=_install(requirement),
        )
    return special.get(name, _versioned)(requirement, version)


def _versioned(requirement: "Requirement", version: str, detail: str = "") -> Finding:
    fits = requirement.specifier.contains(version, prereleases=True)
    return Finding(
        subject=requirement.name,
        found=f"{version}{detail}",
        status=Severity.OK if fits else Severity.WARN,
        advice="" if fits else f"tested with {requirement.specifier}; {_install(requirement)}",
    )


def _install(requirement: "Requirement") -> str:
    if requirement.name == "apex":
        return f'pip install --no-build-isolation "apex @ {requirement.url}" with APEX_CPP_EXT=1 APEX_CUDA_EXT=1'
    if requirement.name == "transformer-engine":
        return "install it as containers/install.sh does"
    return f'pip install "{requirement.name}{requirement.specifier}"'


def _torch(requirement: "Requirement", version: str) -> Finding:
    build = torch_build()
    if platform().name == "cuda" and build.cuda_version is None:
        return Finding(
            subject="torch",
            found=f"{version}, built without CUDA",
            status=Severity.MISSING,
            advice="install the CUDA build (containers/install.sh), or set MEGARL_DEVICE=cpu",
        )
    target = f"CUDA {build.cuda_version}" if build.cuda_version else "CPU"
    return _versioned(requirement, version, f", built for {target}")


def _megatron(check_megatron: Callable[[], Sequence[str]], requirement: "Requirement", version: str) -> Finding:
    if version in TESTED_MEGATRON:
        return Finding(subject="megatron-core", found=f"{version}, a tested version")
    try:
        checked = check_megatron()
    except ConfigError as error:
        return Finding(subject="megatron-core", found=version, status=Severity.MISSING, advice=str(error))
    return Finding(
        subject="megatron-core",
        found=f"{version}, in which these were looked for and found: {', '.join(checked)}",
        status=Severity.WARN,
        advice=f"tested with {' and '.join(TESTED_MEGATRON)}; {_install(requirement)}",
    )


def _transformer_engine(requirement: "Requirement", version: str) -> Finding:
    """Import it in a process of its own: built for another torch, it may end the process that imports it."""
    child = [sys.executable, "-c", "import transformer_engine.pytorch"]
    try:
        done = subprocess.run(
            child, capture_output=True, timeout=IMPORT_S, check=False, encoding="utf-8", errors="replace"
        )
    except subprocess.TimeoutExpired:
        problem = f"its import did not end within {IMPORT_S:g} s"
    else:
        if done.returncode == 0:
            return _versioned(requirement, version, ", which imports")
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        signal_name = f"signal {-done.returncode}" if done.returncode < 0 else ""
        problem = f"its import fails: {signal_name or last}"
    return Finding(
        subject="transformer-engine",
        found=f"{version}, but {problem}",
        status=Severity.MISSING,
        advice=f"its extension must be built beside this torch: {_install(requirement)}; or do without it: "
        "pip uninstall transformer-engine transformer-engine-torch",
    )


def _apex(requirement: "Requirement", version: str) -> Finding:
    spec = importlib.util.find_spec("apex")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not any((Path(place) / NVIDIA_APEX_MODULE).exists() for place in places):
        return Finding(
            subject="apex",
            found=f"{version}: an unrelated package, not NVIDIA's",
            status=Severity.WARN,
            advice=f"pip uninstall apex; {_install(requirement)}",
        )
    if importlib.util.find_spec("amp_C") is None:
        return Finding(
            subject="apex",
            found=f"{version}, built without its CUDA kernels",
            status=Severity.WARN,
            advice=_install(requirement),
        )
    return Finding(subject="apex", found=f"{version}, NVIDIA's, with CUDA kernels")
