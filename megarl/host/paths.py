"""Read the paths of settings and arguments as a shell reads a word."""

import contextlib
import os
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from megarl.errors import ConfigError, DataError

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
    """Expand `~` and variables in arguments, where no shell has, and return them; settings are read later."""
    for name, value in vars(arguments).items():
        if isinstance(value, str | Path):
            setattr(arguments, name, type(value)(expanded(str(value), name)))
        elif isinstance(value, list) and name not in ("overrides", "given", "argv"):
            setattr(arguments, name, [type(each)(expanded(str(each), name)) for each in value])
    return arguments


@contextlib.contextmanager
def looked_for_here(arguments: Namespace) -> Iterator[None]:
    """Within this context, an error about a relative path of an argument says where it was looked for."""
    try:
        yield
    except (ConfigError, DataError) as error:
        here, text = Path.cwd(), str(error)
        given = [each for value in vars(arguments).values() for each in (value if isinstance(value, list) else [value])]
        lost = [each for each in given if isinstance(each, Path) and not each.exists() and str(each) in text]
        if lost and str(here) not in text:
            error.args = (f"{text} ({lost[0]} is looked for in {here})",)
        raise
