"""Look up by name the functions that a configuration chooses from, and refuse settings that nothing would read."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from megarl.errors import ConfigError

T = TypeVar("T")


def unknown_name(kind: str, name: str, known: Iterable[str], *, key: str) -> ConfigError:
    """Return the error that lists the possible values of `key`, with the nearest name to `name` first."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ConfigError(f"{key}: unknown {kind} {name!r}; {hint}expected one of: {', '.join(names)}")


class Registry(Generic[T]):
    """A table of functions or other values by name. It refuses duplicates; for an unknown name it lists the known
    ones.
    """

    def __init__(self, kind: str, *, key: str) -> None:
        """Make an empty registry.

        kind: what the entries are, for messages. key: the setting that chooses an entry, for messages.
        """
        self._kind = kind
        self._key = key
        self._entries: dict[str, T] = {}

    def register(self, name: str, *aliases: str) -> Callable[[T], T]:
        """Return a decorator that stores its target under `name` and `aliases` and returns it unchanged."""

        def add(entry: T) -> T:
            taken = [n for n in (name, *aliases) if n in self._entries]
            if taken:
                raise ValueError(f"{self._kind} {taken[0]!r} is already registered; choose another name")
            self._entries.update(dict.fromkeys((name, *aliases), entry))
            return entry

        return add

    def get(self, name: str) -> T:
        """Return the entry called `name`. Raises ConfigError if there is none."""
        if name not in self._entries:
            raise unknown_name(self._kind, name, self, key=self._key)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))


def refuse_unused(
    key: str, cfg: Any, names: Iterable[str], situation: str, remedy: str, *, harmless: tuple[object, ...] = ()
) -> None:
    """Raise ConfigError if a setting that nothing would read has a value other than its default.

    A run must be what its configuration says, so a setting without effect is an error. names: the fields of the
    dataclass `cfg` that are not read. key: where `cfg` is in the configuration. situation: what does not read them.
    harmless: values that are allowed because they only say that something is off.
    """
    default = type(cfg)()
    for name in names:
        value, unset = getattr(cfg, name), getattr(default, name)
        if value != unset and value not in harmless:
            # As in a configuration file.
            words = {None: "null", True: "true", False: "false"}
            got, leave = (
                words[v] if v is None or isinstance(v, bool) else str(list(v) if isinstance(v, tuple) else v)
                for v in (value, unset)
            )
            raise ConfigError(
                f"{key}.{name}: got {got}, which is not read with {situation}; leave it at {leave}, or {remedy}"
            )
