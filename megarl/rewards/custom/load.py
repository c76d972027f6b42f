"""Load a function from a user's Python file."""

import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError
from megarl.host.reading import require_file
from megarl.host.user_code import run_file

RewardFunction = Callable[..., Any]


@cache
def load_function(path: Path, name: str) -> RewardFunction:
    """Load a function of a Python file; the file is executed at most once per process.

    Raises ConfigError if the file cannot be loaded, or has no such function; the message names file and line.
    """
    require_file(path, "a Python file with a reward function", remedy="set its path", error=ConfigError)
    file, module_name = str(path.absolute()), f"megarl_reward_{path.stem}"
    loaded = sys.modules.get(module_name)
    if loaded is None or loaded.__file__ != file:
        if path.suffix != ".py":
            raise ConfigError(f"{path}: expected a Python file, its name ending in .py")
        loaded = run_file(path, module_name)
    function = getattr(loaded, name, None)
    if not callable(function):
        others = [each for each, value in vars(loaded).items() if inspect.isfunction(value) and each[0] != "_"]
        raise ConfigError(f"{path}: has no function {name!r}, only {', '.join(others) or 'none'}; set its name")
    found: RewardFunction = function
    return found


def first_line(function: RewardFunction) -> int:
    """Return the line of its file in which a function begins; 1 for a callable object."""
    return function.__code__.co_firstlineno if inspect.isfunction(function) else 1
