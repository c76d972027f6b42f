"""Load a function from a user's Python file."""

import inspect
import symtable
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import decode_source
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError
from megarl.host.reading import require_file
from megarl.host.user_code import mistake, run_file

RewardFunction = Callable[..., Any]


@cache
def load_function(path: Path, name: str) -> RewardFunction:
    """Load a function of a Python file; the file is executed at most once per process.

    Raises ConfigError if the file cannot be loaded, or has no such function; the message names file and line.
    """
    _require_python(path)
    file, module_name = str(path.absolute()), f"megarl_reward_{path.stem}"
    loaded = sys.modules.get(module_name)
    if loaded is None or loaded.__file__ != file:
        loaded = run_file(path, module_name)
    function = getattr(loaded, name, None)
    if not callable(function):
        raise _lacks(path, name, (each for each, value in vars(loaded).items() if inspect.isfunction(value)))
    found: RewardFunction = function
    return found


def look_for(path: Path, name: str) -> None:
    """Raise ConfigError if a file is no Python or evidently has no such function, without running anything of it."""
    _require_python(path)
    try:
        source = decode_source(path.read_bytes())
        symbols = symtable.symtable(source, str(path.absolute()), "exec").get_symbols()
    except (SyntaxError, ValueError) as error:
        raise mistake(path, error) from error
    # These may bring any name along.
    if "import *" not in source and "globals" not in source and not any(each.get_name() == name for each in symbols):
        raise _lacks(path, name, (each.get_name() for each in symbols if each.is_namespace()))


def _require_python(path: Path) -> None:
    require_file(path, "a Python file with a reward function", remedy="set its path", error=ConfigError)
    if path.suffix != ".py":
        raise ConfigError(f"{path}: expected a Python file, its name ending in .py; rename it, or set another path")


def _lacks(path: Path, name: str, others: Iterable[str]) -> ConfigError:
    public = ", ".join(each for each in others if each[0] != "_") or "none"
    return ConfigError(f"{path}: has no function {name!r}, only {public}; set its name")


def first_line(function: RewardFunction) -> int:
    """Return the line of its file in which a function begins; 1 for a callable object."""
    return function.__code__.co_firstlineno if inspect.isfunction(function) else 1
