"""requirements/cuda.txt is all that a run on GPUs needs, for every Python that it is for; asks the package index."""

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.unit.test_install import ROOT, applies, declared, environment_of, read_requirements

# What transformer_engine_torch 2.20.2 asks for (install_requirements in its build_tools/pytorch.py), beside its core.
EXTENSION = (
    "torch>=2.1",
    "einops",
    "onnxscript",
    "onnx",
    "packaging",
    "pydantic",
    "nvdlfw-inspect",
    "nvidia-cudnn-frontend>=1.29.0",
)
# For the extension's build without isolation, and for the tests.
TOOLS = ("ninja", "pybind11", "setuptools", "wheel", "pytest", "pytest-timeout", "hypothesis")


def asked(capture: pytest.MonkeyPatch) -> list[str]:
    """What megarl[cuda] asks for, as its setup.py declares it, less the extension, whose own needs are listed here."""
    arguments = declared(capture)
    lines = [*arguments["install_requires"], *arguments["extras_require"]["cuda"]]
    return [*(line.replace("core_cu13,pytorch", "core_cu13") for line in lines), *EXTENSION, *TOOLS]


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", ["3.12"])
def test_resolving_what_megarl_needs_on_gpus_gives_the_lock(
    python: str, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wheels alone, of a glibc that Ubuntu 22.04 and Red Hat 9 have."""
    lock = {str(canonicalize_name(one.name)): one for one in read_requirements("cuda.txt")}
    pins = tmp_path / "pins.txt"
    pins.write_text("\n".join(f"{name}{one.specifier}" for name, one in lock.items()))
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--constraints", str(pins), "--only-binary", ":all:"]
    command += ["--python-version", python, "--python-platform", f"{machine}-manylinux_2_34", "--no-python-downloads"]
    command += ["--no-config", "--no-annotate", "--no-header", "--quiet"]
    done = subprocess.run(command, input="\n".join(asked(monkeypatch)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environment = environment_of(python, machine)
    expected = {f"{name}{one.specifier}" for name, one in lock.items() if applies(one, environment, frozenset())}
    found = {line for line in done.stdout.split("\n") if line}
    assert {str(Requirement(line)) for line in found} == expected


def test_the_pins_are_of_one_cuda_release() -> None:
    """That of torch, for which the image of containers/ has the compiler: apex refuses any other."""
    lock = {str(canonicalize_name(one.name)): one for one in read_requirements("cuda.txt")}
    toolkit, runtime = (
        Version(str(lock[name].specifier).removeprefix("==")) for name in ("cuda-toolkit", "nvidia-cuda-runtime")
    )
    image = (ROOT / "containers/Dockerfile").read_text().partition("FROM nvidia/cuda:")[2].partition("-")[0]
    assert {one.release[:2] for one in (toolkit, runtime, Version(image))} == {(13, 0)}
