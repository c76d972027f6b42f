"""Parse a mapping into a frozen dataclass tree, strictly: an unknown key or a wrong type is an error."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from megarl.config.programs import settings_of
from megarl.config.suggest import suggest_keys
from megarl.errors import ConfigError, UnknownKeyError, did_you_mean
from megarl.host.masking import masked
from megarl.host.paths import expanded
from megarl.host.unicode import find_surrogate

T = TypeVar("T")
# A mapping as a run file has it.
Tree: TypeAlias = dict[str, Any]

# YAML 1.1 reads 1e-6 and 1.5e6 (no point, or no sign after the e) as strings.
_EXPONENT_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
# As OmegaConf inserts other settings and variables, in a name or path.
_INTERPOLATION = re.compile(r"\S*\$\{(?:[A-Za-z_][\w.]*:[^{}]*|\.*\w*(?:\.\w+)+)\}\S*")
_MAX_SUGGESTIONS = 3
_TRUE, _FALSE = frozenset({"true", "yes", "1"}), frozenset({"false", "no", "0"})


@functools.cache
def _hints(section: type) -> Mapping[str, Any]:
    """Return the types of a section's fields by name; to evaluate them takes longer than to parse the section."""
    return get_type_hints(section)


def from_dict(cls: type[T], mapping: Mapping[str, object], path: str = "", beside: Sequence[str] = ()) -> T:
    """Build the dataclass tree `cls` from a mapping; keys that are absent keep their defaults.

    `path` is the dotted key of `mapping` itself, for messages, and `beside` are further keys to suggest. Numbers may be
    written 1e-6 or 1e6. An int field accepts a float with an integral value, and a float field accepts an int. Neither
    accepts a bool, NaN or infinity. No text may hold what UTF-8 cannot. Paths are read as `expanded` reads them.
    """
    if found := find_surrogate(mapping, path):
        raise ConfigError(f"{found}; complete or remove it")
    if beside:
        _refuse_unknown_keys(cls, mapping, path, (*_dotted_keys(cls, path), *beside))
    return cast(T, _convert(cls, mapping, path))


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _dotted_keys(cls: type, path: str) -> Iterator[str]:
    for key, hint in _hints(cls).items():
        yield _join(path, key)
        if is_dataclass(hint):
            yield from _dotted_keys(cast(type, hint), _join(path, key))


def _refuse_unknown_keys(cls: type, mapping: object, path: str, known: Iterable[str]) -> None:
    """Raise UnknownKeyError for a key that no section has, with one of `known` that is like it."""
    if not isinstance(mapping, Mapping):
        return  # The conversion reports the wrong type.
    hints = _hints(cls)
    for key, value in mapping.items():
        if key not in hints:
            every = tuple(known)
            names = (dotted.rpartition(".") for dotted in every)
            siblings = dict.fromkeys([*hints, *(name for section, _, name in names if section == path)])
            advice = _advice(str(key), path, list(siblings), every)
            raise UnknownKeyError(f"unknown key '{_join(path, key)}'; {advice}", _join(path, key), value)
        if is_dataclass(hints[key]):
            _refuse_unknown_keys(hints[key], value, _join(path, key), known)


_SPACE = "YAML asks for a space after the colon, as in dp: 2"


def _advice(key: str, path: str, siblings: Sequence[str], known: Sequence[str]) -> str:
    """Return the end of an error message about an unknown key: the most similar keys, or all keys of the section."""
    if "." in key:
        return "dotted keys belong to overrides on the command line; in a file, nest one mapping in the other"
    if ":" in key:
        return _SPACE
    found = suggest_keys(key, path, known)
    if found:
        return f"did you mean {' or '.join(repr(dotted) for dotted in found[:_MAX_SUGGESTIONS])}?"
    return f"{f'{path} has' if path else 'there are'}: {', '.join(siblings)}"


class _WrongTypeError(Exception):
    """The error of a value that does not fit a type hint; `_convert` turns it into a ConfigError with a message."""


def _convert(hint: object, value: object, path: str) -> object:
    try:
        return _parse(hint, value, path)
    except _WrongTypeError:
        got = "null" if value is None else f"{masked(value, path)!r} ({type(value).__name__})"
        raise ConfigError(
            f"{path or 'configuration'}: got {got}, expected {describe_type(hint)}{_remedy(hint, value, path)}"
        ) from None


def _remedy(hint: object, value: object, path: str) -> str:
    """Return what to do about a value that does not fit a type hint, after a semicolon; empty if that is plain."""
    kinds = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    choices = [str(each) for kind in kinds if get_origin(kind) is Literal for each in get_args(kind)]
    if choices:
        return f"; {did_you_mean(str(value), choices).strip() or 'choose one of these'}"
    if isinstance(value, str) and is_dataclass(hint) and ":" in value:
        return f"; {_SPACE}"
    if value is None and is_dataclass(hint):
        return "; give its settings, or leave it out"
    if isinstance(value, str) and get_origin(hint) is tuple:
        return f"; put it in brackets, as in {path}=[{masked(value, path)}]"
    if str in kinds and isinstance(value, int | float):
        return f"; put it in quotes, as in '\"{str(value).lower()}\"'"
    examples = {int: "a whole number, such as 8", float: "a number, such as 1e-6"}
    return next((f"; write {example}" for kind, example in examples.items() if kind in kinds), "")


def _parse(hint: object, value: object, path: str) -> object:
    parser = _parse_section if is_dataclass(hint) else _PARSERS.get(get_origin(hint) or hint)
    if parser is None:  # of a plugin
        raise ConfigError(
            f"{path}: is declared as {hint}, which a run file cannot express; declare a tuple or a Mapping"
        )
    return parser(hint, value, path)


def _parse_section(hint: Any, value: object, path: str) -> object:
    if not isinstance(value, Mapping):
        raise _WrongTypeError
    _refuse_unknown_keys(hint, value, path, _dotted_keys(hint, path))
    hints = _hints(hint)
    for field in fields(hint):
        if field.name not in value and field.default is MISSING and field.default_factory is MISSING:
            keys = f"{f'{path} has' if path else 'there are'}: {', '.join(hints)}"
            raise ConfigError(f"{_join(path, field.name)}: is missing; {keys}")
    settings = {key: _convert(hints[key], item, _join(path, key)) for key, item in value.items()}
    with settings_of(path.rpartition(".")[0]):  # an option's name begins with the section's own
        return hint(**settings)


def _parse_union(hint: object, value: object, path: str) -> object:
    """Parse a value of a union type: a type or null, a section or null, or a plain type or a section."""
    plain = [arg for arg in get_args(hint) if arg is not NoneType and not is_dataclass(arg)]
    for other in get_args(hint):
        if other is NoneType and value is None:
            return None
        if is_dataclass(other) and isinstance(value, Mapping):
            return from_dict(cast(type, other), value, path)
    if not plain:
        raise _WrongTypeError
    return _parse(plain[0], value, path)


def _parse_tuple(hint: object, value: object, path: str) -> object:
    if not isinstance(value, list | tuple):
        raise _WrongTypeError
    args = get_args(hint)
    item_hints = args[:1] * len(value) if Ellipsis in args else args
    if len(value) != len(item_hints):
        raise _WrongTypeError
    pairs = enumerate(zip(item_hints, value, strict=True))
    return tuple(_convert(item_hint, item, f"{path}[{i}]") for i, (item_hint, item) in pairs)


def _parse_mapping(hint: object, value: object, path: str) -> object:
    """Parse a mapping whose keys are names that the user chooses, such as data sources."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _WrongTypeError
    return {name: _convert(get_args(hint)[1], item, _join(path, name)) for name, item in value.items()}


def _parse_json(hint: object, value: object, path: str) -> object:
    """Parse what JSON can express: null, a boolean, a finite number, a text, a list or a mapping of such values."""
    if isinstance(value, list | tuple):
        return [_convert(hint, item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _parse_mapping(Mapping[str, Any], value, path)
    if not isinstance(value, str | int | float | NoneType) or (isinstance(value, float) and not math.isfinite(value)):
        raise _WrongTypeError
    if not isinstance(value, str):
        return value
    _refuse_interpolation(value, path)
    is_number = _EXPONENT_NUMBER.fullmatch(value) and math.isfinite(float(value))
    return float(value) if is_number else value


def _parse_literal(hint: object, value: object, path: str) -> object:
    if value not in get_args(hint):
        raise _WrongTypeError
    return value


def _parse_exact(hint: object, value: object, path: str) -> object:
    if type(value) is not hint:
        raise _WrongTypeError
    if not isinstance(value, str):
        return value
    _refuse_interpolation(value, path)
    return expanded(value, path)


def _refuse_interpolation(text: str, path: str) -> None:
    """Raise ConfigError for a text that expects another setting, or a variable, to be inserted as OmegaConf does."""
    if _INTERPOLATION.fullmatch(text):
        raise ConfigError(
            f"{path}: got {masked(text, path)!r}, but nothing is inserted here; write the value, let the shell insert "
            "it into an override, or write $NAME in a path for a variable"
        )


def parse_bool(value: object) -> bool:
    """Parse a bool, or one of the texts true, yes, 1, false, no, 0 in any case; raise ConfigError for anything else."""
    if isinstance(value, bool):
        return value
    text = value.lower() if isinstance(value, str) else ""
    if text not in _TRUE | _FALSE:
        raise ConfigError(f"got {value!r} ({type(value).__name__}), expected true or false")
    return text in _TRUE


def _parse_bool(hint: object, value: object, path: str) -> bool:
    try:
        return parse_bool(value)
    except ConfigError:
        raise _WrongTypeError from None


def _parse_float(hint: object, value: object, path: str) -> float:
    if isinstance(value, str) and _EXPONENT_NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _WrongTypeError
    return float(value)


def _parse_int(hint: object, value: object, path: str) -> int:
    if type(value) is int:
        return value
    number = _parse_float(hint, value, path)
    if not number.is_integer():
        raise _WrongTypeError
    return int(number)


_PARSERS: Mapping[object, Callable[[object, object, str], object]] = {
    UnionType: _parse_union,
    Union: _parse_union,  # what Literal[...] | None is
    tuple: _parse_tuple,
    Mapping: _parse_mapping,
    Any: _parse_json,
    Literal: _parse_literal,
    bool: _parse_bool,
    str: _parse_exact,
    float: _parse_float,
    int: _parse_int,
}


def describe_type(hint: Any) -> str:
    """Describe in words which values a field of this type accepts, for error messages and docs/configuration.md."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return " or ".join(_alternative(arg) for arg in args)
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin is tuple:
        return f"a list of {'' if Ellipsis in args else f'{len(args)} '}{_item(args[0])}"
    if origin is Mapping:
        return f"a mapping from names to {_alternative(args[1])}"
    names = {bool: "true or false", float: "a finite float", Any: "any JSON value"}
    return "a mapping" if is_dataclass(hint) else names.get(hint) or str(hint.__name__)


def _alternative(hint: object) -> str:
    if hint is NoneType:
        return "null"
    return f"{{{', '.join(_hints(cast(type, hint)))}}}" if is_dataclass(hint) else describe_type(hint)


def _item(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"any of {', '.join(map(repr, get_args(hint)))}"
    has_own_words = is_dataclass(hint) or get_origin(hint) in (UnionType, Union)
    return _alternative(hint) if has_own_words else str(hint.__name__)
