"""Named collections of functions: what a configuration chooses from."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from megarl.errors import ConfigError

T = TypeVar("T")


def unknown_name(kind: str, name: str, known: Iterable[str], *, key: str) -> ConfigError:
    """The error that lists what `key` may be, with the nearest name to `name` first."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ConfigError(f"{key}: unknown {kind} {name!r}; {hint}expected one of: {', '.join(names)}")


class Registry(Generic[T]):
    """Functions (or other values) by name. Refuses duplicates; an unknown name lists the known ones."""

    def __init__(self, kind: str, *, key: str) -> None:
        """For messages: `kind` says what is collected, `key` is the setting that chooses from it."""
        self._kind = kind
        self._key = key
        self._entries: dict[str, T] = {}

    def register(self, name: str, *aliases: str) -> Callable[[T], T]:
        """Decorator that stores its target under `name` and `aliases`, and returns it unchanged."""

        def add(entry: T) -> T:
            taken = [n for n in (name, *aliases) if n in self._entries]
            if taken:
                raise ValueError(f"{self._kind} {taken[0]!r} is already registered; choose another name")
            self._entries.update(dict.fromkeys((name, *aliases), entry))
            return entry

        return add

    def get(self, name: str) -> T:
        """The entry called `name`; ConfigError if there is none."""
        if name not in self._entries:
            raise unknown_name(self._kind, name, self, key=self._key)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
