"""Import optional packages, which megarl needs only if a setting asks for them."""

from importlib import import_module
from types import ModuleType

from megarl.errors import ConfigError


def import_optional(name: str, *, package: str, key: str) -> ModuleType:
    """Import a module of an optional package. Raises ConfigError, which says what needs it and how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{key}: needs the package {package}, which does not import ({error}); run pip install {package}"
        ) from error
