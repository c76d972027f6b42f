"""Check that this machine has the kernels of a package."""

from megarl.config.target import has_package
from megarl.errors import ConfigError
from megarl.host.device.platform import platform

TRANSFORMER_ENGINE = "transformer_engine"


def require_kernels(setting: str, package: str, remedy: str) -> None:
    """Raise ConfigError unless this machine has CUDA and the package; the other arguments are parts of the message."""
    here = platform()
    if here.name != "cuda":
        raise ConfigError(f"{setting}, which needs CUDA, but this is {here.name}; {remedy}")
    if not has_package(package):
        raise ConfigError(f"{setting}, which needs the package {package}, but it is not installed; {remedy}")
