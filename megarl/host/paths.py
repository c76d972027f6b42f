"""Read the paths of settings and arguments as a shell reads a word."""

import os
import re
from argparse import Namespace
from pathlib import Path

from megarl.errors import ConfigError

_HOME = re.compile(r"~[\w.-]*/")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


def expanded(text: str, key: str) -> str:
    """Replace `~`, `$NAME` and `${NAME}` in a text that is a path: one with a slash and without blanks, or a variable
    alone; any other text, and a URL, is returned as it is.

    Raises ConfigError if the variable is not set or there is no such user; `key` names the setting or argument.
    """
    is_path = "/" in text or (_VARIABLE.fullmatch(text) and text.isupper())
    if not is_path or "://" in text or any(char.isspace() for char in text):
        return text

    def value_of(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in os.environ:
            raise ConfigError(f"{key}: got {text!r}, but the variable {name} is not set; export it, or write the path")
        return os.environ[name]

    path = _VARIABLE.sub(value_of, text)
    if _HOME.match(path):
        path = os.path.expanduser(path)
        if path.startswith("~"):
            raise ConfigError(f"{key}: got {text!r}, but there is no such user here; write the path")
    return path


def expand_arguments(arguments: Namespace) -> Namespace:
    """Expand `~` and variables in arguments, where no shell has, and return them; overrides are read as settings."""
    for name, value in vars(arguments).items():
        if isinstance(value, str | Path):
            setattr(arguments, name, type(value)(expanded(str(value), name)))
        elif isinstance(value, list) and name != "overrides":
            expand = [type(each)(expanded(str(each), name)) if isinstance(each, Path) else each for each in value]
            setattr(arguments, name, expand)
    return arguments
