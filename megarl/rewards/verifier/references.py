"""Functions by name, for processes that are told what to call."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.errors import ConfigError


def resolve(reference: str) -> Callable[..., Any]:
    """What "module:function" or "path/file.py:function" names; ConfigError if there is no such function."""
    module_name, _, name = reference.rpartition(":")
    try:
        function = getattr(load_module(module_name), name, None)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"function {reference!r}: cannot import {module_name!r}: {error!r}") from error
    if not callable(function):
        raise ConfigError(f"function {reference!r}: {module_name!r} has no function {name!r}")
    return function


def load_module(name: str) -> ModuleType:
    """The module called `name`, or the one in the file of that name if it ends in .py."""
    if not name:
        raise ConfigError('a function is named "module:function" or "path/file.py:function"; the module is missing')
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses of the file look their module up.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
