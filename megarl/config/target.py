"""Describe the machine that a configuration is checked for, this one or another: its packages and devices.

A login node so answers for the nodes of its cluster, which a file of packages describes.
"""

import contextlib
import importlib.metadata
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from megarl.errors import ConfigError
from megarl.host.device.accelerators import Device
from megarl.host.device.platform import assuming, platform
from megarl.host.reading import reading

# It names such a file; it may be set in the settings of a cluster.
TARGET_VARIABLE, CLUSTER_SETTINGS = "MEGARL_TARGET", Path("slurm/env.sh")
_REMEDY = "write it with `pip list --format=freeze` where the run's packages are"
_PINNED = "containers/install.sh"
# It installs these.
_PINS = [Path(__file__).parents[2] / "requirements" / name for name in ("cuda.txt", "cuda-source.txt")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A machine for which settings are checked: cpu or cuda, and versions by distribution; None: those installed.

    devices: its accelerators, if they are known. named: what says so, for plans.
    """

    platform: str
    packages: Mapping[str, str] | None = None
    devices: tuple[Device, ...] = ()
    named: str = field(default="", compare=False)

    def in_words(self) -> str:
        """Write what is computed with, as in `cuda, packages of /venv/packages.txt, NVIDIA H100 (80 GiB)`."""
        devices = sorted({f"{each.name} ({each.memory_gib:.0f} GiB)" for each in self.devices})
        of_packages = [] if self.packages is None else [f"packages of {self.named}", *(devices or ["devices unknown"])]
        return ", ".join([self.platform, *of_packages])


_target: Target | None = None


@contextlib.contextmanager
def checked_for(target: Target | None) -> Iterator[None]:
    """Let settings be checked and derived as on that machine, if any; nothing may be computed in this context."""
    global _target
    before, _target = _target, target or _target
    try:
        with contextlib.nullcontext() if target is None else assuming(target.platform):
            yield
    finally:
        _target = before


def target_in_words() -> str:
    """Write for which machine settings are checked, unless it is this one."""
    return "" if _target is None else _target.in_words()


def _packages() -> Mapping[str, str] | None:
    return None if _target is None else _target.packages


def package_version(distribution: str) -> str | None:
    """Return the version of a distribution where the run computes; None: it is not there."""
    if (packages := _packages()) is not None:
        return packages.get(distribution)
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def has_package(module: str) -> bool:
    """Return whether a package, named as Python imports it, is there where the run computes."""
    if (packages := _packages()) is not None:
        return module.replace("_", "-") in packages
    return find_spec(module) is not None


def known_devices() -> list[Device]:
    """List the accelerators where the run computes; of another machine, those that its file of packages names."""
    return platform().devices() if _target is None or _target.packages is None else list(_target.devices)


def read_packages(file: Path) -> dict[str, str]:
    """Read versions by distribution, from lines such as `torch==2.13.0`. Raises ConfigError for any other line."""
    expected = "a package and its version in each line, such as torch==2.13.0"
    found = {}
    with reading(file, expected, remedy=_REMEDY, error=ConfigError):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if text := re.split(r"(?:^|\s)#|;|\\| --", line)[0].strip():
                name, equals, version = text.partition("==")
                if not equals:
                    raise ConfigError(f"{file}, line {number}: got {text!r:.80}, expected {expected}; {_REMEDY}")
                found[re.sub(r"[-_.]+", "-", name).lower()] = version
    return found


def read_devices(file: Path) -> tuple[Device, ...]:
    """Read accelerators from comments such as `# device: NVIDIA H100 80GB HBM3, 81559, 580.65, 9.0`, of nvidia-smi."""
    found = []
    for text in re.findall(r"^# device: *(.*)$", file.read_text(encoding="utf-8"), re.MULTILINE):
        try:
            name, mib, driver, capability = (cell.strip() for cell in text.split(","))
            found.append(Device(name=name, memory_gib=float(mib) / 1024, driver=driver, capability=float(capability)))
        except ValueError as error:
            raise ConfigError(
                f"{file}: got the device {text!r:.80}, expected its name, MiB, driver and compute capability, such as "
                "NVIDIA H100 80GB HBM3, 81559, 580.65, 9.0; correct or remove the line"
            ) from error
    return tuple(found)


def pinned_packages() -> dict[str, str]:
    """Return what containers/install.sh installs for CUDA, as the files of requirements/ say."""
    return {name: version for file in _PINS for name, version in read_packages(file).items()}


def named_target(setting: str | None, *, gpus: bool | None = None) -> Target | None:
    """Return the machine that `cluster.target` names, else MEGARL_TARGET here or in slurm/env.sh; None: nothing does.

    gpus: whether the run gets GPUs; None: as the build of torch says. Without a file, a machine that has none takes for
    granted that others have what containers/install.sh installs. Raises ConfigError for a file that is none.
    """
    file = setting or os.environ.get(TARGET_VARIABLE) or _set_by_cluster()
    if file is None:
        if gpus is None:
            return None
        # A machine without GPUs says nothing about packages on nodes that have some.
        is_elsewhere = gpus and platform().name != "cuda" and all(map(Path.is_file, _PINS))
        packages = pinned_packages() if is_elsewhere else None
        return Target(platform="cuda" if gpus else "cpu", packages=packages, named=_PINNED)
    packages = read_packages(Path(file))
    if "torch" not in packages:
        raise ConfigError(f"{file}: names no torch, with which a run computes; {_REMEDY}")
    if gpus is None:
        gpus = not packages["torch"].endswith("+cpu")
    return Target(
        platform="cuda" if gpus else "cpu", packages=packages, devices=read_devices(Path(file)), named=str(file)
    )


def _set_by_cluster() -> str | None:
    """Return the file that slurm/env.sh names, if it is there; of its lines, those that set these variables are run."""
    if not CLUSTER_SETTINGS.is_file():
        return None
    text = CLUSTER_SETTINGS.read_text(encoding="utf-8", errors="replace")
    lines = re.findall(rf"^(?:export )?(?:MEGARL_VENV|{TARGET_VARIABLE})=.*$", text, re.MULTILINE)
    script = "\n".join([*lines, f'printf %s "${TARGET_VARIABLE}"'])
    said = subprocess.run(["/bin/bash", "-c", script], capture_output=True, encoding="utf-8", errors="replace")
    return said.stdout if said.stdout and Path(said.stdout).is_file() else None
