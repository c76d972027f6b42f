"""Declare the fields of a configuration: the values each accepts and what a change to it affects; and check them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from math import inf
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast, runtime_checkable
from urllib.parse import urlsplit

from megarl.errors import ConfigError
from megarl.host.masking import masked

T = TypeVar("T")

# engines: after a change, the rollout engines may sample differently or receive weights in another way, so a resumed
# run has to pass the mismatch gate (trainer.mismatch_gate_nats) again.
# workers: the processes of a running cluster were started with the value, so a run with another value cannot use them.
Affected: TypeAlias = Literal["engines", "workers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The numbers that a setting accepts: those within all bounds except `never`, and in addition the number `also`.

    `at_least` and `at_most` are inclusive bounds, `above` and `below` exclusive ones. `expected` describes the range
    in error messages.
    """

    expected: str
    at_least: float = -inf
    above: float = -inf
    at_most: float = inf
    below: float = inf
    also: float | None = None
    never: float | None = None

    def holds(self, number: float) -> bool:
        """Return whether a number is in this range; NaN is in no range."""
        within = self.at_least <= number <= self.at_most and self.above < number < self.below
        return (within and number != self.never) or number == self.also


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The texts that a setting accepts: those for which `holds`. `expected` describes them in error messages.

    is_address: whether another program listens there, which has to be up when a run starts.
    """

    expected: str
    holds: Callable[[str], object]
    is_address: bool = False


Allowed: TypeAlias = Range | Text


@runtime_checkable
class Checked(Protocol):
    """A section of the configuration that has rules of its own, besides what its fields accept."""

    def check(self, key: str) -> None:
        """Raise ConfigError unless the section, which stands at the dotted `key`, agrees with itself."""


def _is_url(text: str) -> bool:
    try:
        address = urlsplit(text)
        return address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # such as a port that is not a number
        return False


ANY_NUMBER = Range(expected="any number")
AT_LEAST_0 = Range(expected=">= 0", at_least=0)
AT_LEAST_1 = Range(expected=">= 1", at_least=1)
AT_LEAST_2 = Range(expected=">= 2", at_least=2)
POSITIVE = Range(expected="> 0", above=0)
SHARE = Range(expected="in (0, 1]", above=0, at_most=1)
FRACTION = Range(expected="in [0, 1]", at_least=0, at_most=1)
BELOW_1 = Range(expected="in [0, 1)", at_least=0, below=1)
PROBABILITY = Range(expected="in (0, 1)", above=0, below=1)
URL = Text(expected="http://host:port/path, or https", holds=_is_url, is_address=True)
PYTHON_FILE = Text(expected="a Python file (.py)", holds=lambda text: text.endswith(".py"))


_REQUIRED: Any = MISSING


def setting(
    default: T = _REQUIRED,
    allowed: Allowed | None = None,
    *,
    affects: tuple[Affected, ...] = (),
    needs_trust: bool = False,
) -> T:
    """Declare a field of a configuration class with its default, the numbers or texts that it accepts, what a change of
    it affects, and whether it names what would run, be reached or be less confined on this machine (`needs_trust`).

    If the value is a list, each of its numbers or texts must be accepted. Null always is. Without a default, the field
    must be set.
    """
    metadata = {"allowed": allowed, "affects": affects, "needs_trust": needs_trust}
    return field(default=default, metadata=metadata)


def section(
    factory: Callable[[], T],
    allowed: Allowed | None = None,
    *,
    affects: tuple[Affected, ...] = (),
    needs_trust: bool = False,
) -> T:
    """Declare a nested section of a configuration class; the other arguments, as in `setting`, apply to all of its
    fields.

    A field of the section that declares its own range keeps that range.
    """
    metadata = {"allowed": allowed, "affects": affects, "needs_trust": needs_trust}
    return field(default_factory=factory, metadata=metadata)


def allowed_by(each: Field[object], default: Allowed | None) -> Allowed | None:
    """Return the range or the texts that a field was declared with, or else `default`, those of its section."""
    return each.metadata.get("allowed") or default


def affected(before: T, now: T, by: Affected) -> list[str]:
    """List settings that differ between two configurations and are declared to affect `by`; return their dotted names.

    A section declared with `affects=by` is named as a whole if anything in it differs. In every other section, fields
    declared with `affects=by` are compared one by one. Lists, mappings, and sections of which one is null are compared
    as a whole.
    """
    found: list[str] = []
    for each in fields(cast(Any, before)):
        old, new = getattr(before, each.name), getattr(now, each.name)
        if old == new:
            continue
        if by in each.metadata.get("affects", ()):
            found.append(each.name)
        elif is_dataclass(old) and is_dataclass(new):
            found += [f"{each.name}.{name}" for name in affected(old, new, by)]
    return found


def differences(before: T, now: T, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the dotted key and both values of every setting that differs; each key starts with `path`."""
    for each in fields(cast(Any, before)):
        old, new, key = getattr(before, each.name), getattr(now, each.name), f"{path}{each.name}"
        if is_dataclass(old) and type(old) is type(new):
            yield from differences(old, new, f"{key}.")
        elif old != new:
            yield key, old, new


def needing_trust(config: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of every setting that needs trust and is not at its default."""
    for each in fields(cast(Any, config)):
        value, key = getattr(config, each.name), f"{path}{each.name}"
        if each.metadata.get("needs_trust"):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if value != default:
                yield key, value
            continue
        inner = {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, Mapping) else {key: value}
        for name, item in inner.items():
            if is_dataclass(item):
                yield from needing_trust(item, f"{name}.")


def addresses_of(config: object) -> dict[str, list[str]]:
    """Return the addresses of other programs that a configuration names, by the key of the setting."""
    found: dict[str, list[str]] = {}
    for key, value, allowed in _values(config, "", None):
        if isinstance(allowed, Text) and allowed.is_address and isinstance(value, str):
            found.setdefault(key, []).append(value)
    return found


def check_values(config: object, sections: Collection[str], key: str = "") -> None:
    """Raise ConfigError for the first value that its field does not accept, or the first section that is at odds with
    itself.

    sections: the dotted keys of the sections whose own rules hold, with those within them. key: that of `config`.
    """
    for name, value, allowed in _values(config, key, None):
        if is_dataclass(value):
            # Protocols are slow to ask; sections are few.
            if isinstance(value, Checked) and any(f"{name}.".startswith(f"{section}.") for section in sections):
                value.check(name)
        elif isinstance(allowed, Range) and type(value) in (int, float) and not allowed.holds(value):
            raise ConfigError(f"{name}: got {value}, expected {allowed.expected}")
        elif isinstance(allowed, Text) and isinstance(value, str) and not allowed.holds(value):
            raise ConfigError(f"{name}: got {masked(value, name)!r}, expected {allowed.expected}")


def _values(value: object, key: str, allowed: Allowed | None) -> Iterator[tuple[str, Any, Allowed | None]]:
    """Yield the dotted key, the value and the range or texts of every setting, and each section after what is in it.

    Each number or text of a list has the list's key.
    """
    if is_dataclass(value):
        for each in fields(value):
            name = f"{key}.{each.name}" if key else each.name
            yield from _values(getattr(value, each.name), name, allowed_by(each, allowed))
        yield key, value, None
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _values(item, f"{key}.{name}", allowed)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _values(item, f"{key}[{i}]" if is_dataclass(item) else key, allowed)
    else:
        yield key, value, allowed
