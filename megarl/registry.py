"""Look up by name the functions that a configuration chooses from, and refuse settings that nothing would read.

Entry points name what packages install; here a user's file, which no package has, registers functions, too.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar

from megarl.errors import ConfigError, did_you_mean

F = TypeVar("F")
T = TypeVar("T")


def unknown_name(kind: str, name: str, known: Iterable[str], *, key: str) -> ConfigError:
    """Return the error that lists the possible values of `key`, with the nearest name to `name` first."""
    names = sorted(known)
    return ConfigError(
        f"{key}: unknown {kind} {name!r}; {did_you_mean(name, names)}expected one of: {', '.join(names)}"
    )


class RegistrationError(ValueError):
    """A registration that is refused: its name is taken, or what it registers or declares is not of the right form."""


class FunctionRegistry(Generic[F, T]):
    """A table of functions by name, each with what its registration declares about it.

    `register` is a decorator: it stores `entry(function, **declared)`, which `get` returns, and leaves the function as
    it is. It refuses names that are taken and functions that do not take `parameters`; for an unknown name, `get` lists
    the known ones.
    """

    def __init__(self, kind: str, *, key: str, entry: Callable[..., T], parameters: Sequence[str] = ()) -> None:
        """Make an empty registry.

        kind: what the entries are, for messages. key: the setting that chooses an entry, for messages. parameters: what
        the functions are called with, by position; (): anything may be registered.
        """
        self.kind, self.key = kind, key
        self._entry, self._parameters = entry, tuple(parameters)
        named = inspect.signature(entry).parameters.values()
        self._declarable = [each.name for each in named if each.kind is each.KEYWORD_ONLY]
        self._entries: dict[str, T] = {}

    def register(self, name: str, *aliases: str, settings: type | None = None, **declared: object) -> Callable[[F], F]:
        """Return a decorator that stores its target and what is declared about it under `name` and `aliases`.

        settings: a frozen dataclass with defaults. Its target is called with one more argument, an instance with what
        the configuration sets.
        """

        def add(target: F) -> F:
            what, own = f"{self.kind} {name!r}", _own_settings(self, name, settings)
            if self._parameters:
                _require_parameters(what, target, (*self._parameters, *(["settings"] if own else [])))
            for unknown in (each for each in declared if each not in self._declarable):
                known = ", ".join(self._declarable) or "none"
                raise RegistrationError(f"{what}: declares {unknown!r}, expected names among {known}; correct it")
            try:
                entry = self._entry(own.bind(target) if own else target, **declared)
            except (TypeError, ValueError) as error:
                raise RegistrationError(f"{what}: {error}") from error
            registration = Registration(registry=self, names=(name, *aliases), entry=entry, target=target, own=own)
            registration.register_again()
            _note(registration)
            return target

        return add

    def get(self, name: str) -> T:
        """Return the entry called `name`. Raises ConfigError if there is none."""
        if name not in self._entries:
            raise unknown_name(self.kind, name, self, key=self.key)
        return self._entries[name]

    def entries(self) -> dict[str, T]:
        """Return all entries by name, in the order in which they were registered."""
        return dict(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))


class Registry(FunctionRegistry[T, T]):
    """A table of values by name that declare nothing; `get` returns what was registered."""

    def __init__(self, kind: str, *, key: str) -> None:
        super().__init__(kind, key=key, entry=lambda value: value)


class OwnSettings:
    """The settings that a part declares for itself, and their values in force in this process."""

    def __init__(self, declared: type) -> None:
        self.declared, self.value = declared, declared()

    def bind(self, function: Any) -> Any:
        """Return the function with the values in force as its last argument."""

        @functools.wraps(function)
        def call(*arguments: object) -> object:
            return function(*arguments, self.value)

        return call


def _own_settings(registry: FunctionRegistry[Any, Any], name: str, declared: type | None) -> OwnSettings | None:
    if declared is None:
        return None
    what = f"{registry.kind} {name!r}: settings"
    if not registry._parameters:
        raise RegistrationError(f"{what}: got some, but nothing would pass them on; leave them out")
    if not is_dataclass(declared) or not getattr(declared, "__dataclass_params__").frozen:  # noqa: B009 - not typed
        raise RegistrationError(f"{what}: got {declared!r}, expected a class under @dataclass(frozen=True)")
    try:
        return OwnSettings(declared)
    except TypeError as error:
        raise RegistrationError(f"{what}: {error}; give every field a default") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """An entry of a registry, its names, and what was registered; it can be taken out of the registry and put back."""

    registry: FunctionRegistry[Any, Any]
    names: tuple[str, ...]
    entry: Any
    target: object
    own: OwnSettings | None = None

    def register_again(self) -> None:
        """Put the entry into its registry; raise RegistrationError if one of its names is taken."""
        entries = self.registry._entries
        if taken := [name for name in self.names if name in entries]:
            kind = self.registry.kind
            raise RegistrationError(f"{kind} {taken[0]!r} is already registered; choose another name")
        entries.update(dict.fromkeys(self.names, self.entry))

    def undo(self) -> None:
        """Take the entry out of its registry."""
        for name in self.names:
            del self.registry._entries[name]


# Where registrations are noted while the code of a user runs.
_noted: list[Registration] | None = None


@contextlib.contextmanager
def noting() -> Iterator[list[Registration]]:
    """Note what code outside of megarl registers within this context."""
    global _noted
    before, _noted = _noted, []
    try:
        yield _noted
    finally:
        _noted = before


def _note(registration: Registration) -> None:
    """Note a registration, unless it is megarl's own: a module of megarl that the user's code is the first to import
    stays imported.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    if _noted is not None and not str(frame.f_globals.get("__name__")).startswith("megarl."):
        _noted.append(registration)


def _require_parameters(what: str, target: object, parameters: Sequence[str]) -> None:
    expected = f"expected a function that takes ({', '.join(parameters)})"
    if not callable(target):
        raise RegistrationError(f"{what}: got a {type(target).__name__}, {expected}")
    signature = inspect.signature(target)
    try:
        signature.bind(*parameters)
    except TypeError as error:
        name = getattr(target, "__name__", type(target).__name__)
        taken = ", ".join(signature.parameters)
        raise RegistrationError(f"{what}: got {name}({taken}), {expected}; change its parameters") from error


def readers_of(registry: FunctionRegistry[Any, Any]) -> dict[str, list[str]]:
    """Return, for each option that entries of a registry declare, the names of the entries that do."""
    readers: dict[str, list[str]] = {}
    for name, entry in registry.entries().items():
        for option in entry.options:
            readers.setdefault(option, []).append(name)
    return readers


def require_known(declared: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Raise ValueError if a registration declares a name that is not among the known ones."""
    for name in names:
        if name not in known:
            raise ValueError(f"{declared}: got {str(name)!r}, expected names among {', '.join(known)}; correct it")


def require_fields(options: Iterable[str], cls: type[Any]) -> None:
    """Raise ValueError if a registration declares an option that is not a field of the dataclass `cls`."""
    require_known("options", options, [field.name for field in fields(cls)])


def refuse_unused(
    key: str, cfg: object, names: Iterable[str], situation: str, remedy: str, *, harmless: tuple[object, ...] = ()
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
