"""Encode a program's values as JSON that keeps Python's types apart: a tuple is no list, a set is no list.

The inner side encodes, the outer side decodes and compares, so that a program never sees what is expected of it, and
an object whose `==` always agrees equals nothing.
"""

import json
import operator
from collections.abc import Callable, Mapping
from typing import Any

_LARGEST_PLAIN_INT = 2**63


class AnswerError(ValueError):
    """The error of bytes that encode no value."""


class Unknown:
    """A stand-in for an object of a type that has no encoding; equals nothing."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def encode(value: Any) -> bytes:
    """Write a value as JSON that `decode` can read."""
    return json.dumps(_plain(value)).encode()


def decode(data: bytes) -> Any:
    """Read a value that `encode` wrote. AnswerError for any other bytes, which only a cheating program can have
    written.
    """
    try:
        return _typed(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise AnswerError(f"no answer: {data[:80]!r}") from error


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | str():
            return value
        case int():
            # Python refuses to write long numbers in decimal.
            return int(value) if abs(value) < _LARGEST_PLAIN_INT else {"int": hex(value)}
        case float():
            return float(value)
        case list():
            return [_plain(entry) for entry in value]
        case tuple() | set() | frozenset():
            kind = "tuple" if isinstance(value, tuple) else "set"
            return {kind: [_plain(entry) for entry in value]}
        case dict():
            return {"dict": [[_plain(key), _plain(entry)] for key, entry in value.items()]}
        case complex():
            return {"complex": [value.real, value.imag]}
        case bytes():
            return {"bytes": value.decode("latin-1")}
    if hasattr(type(value), "__index__"):
        return _plain(operator.index(value))
    return {"unknown": type(value).__name__}


_TYPED: Mapping[str, Callable[[Any], Any]] = {
    "int": lambda digits: int(digits, 16),
    "tuple": lambda entries: tuple(map(_typed, entries)),
    "set": lambda entries: set(map(_typed, entries)),
    "dict": lambda entries: {_typed(key): _typed(entry) for key, entry in entries},
    "complex": lambda parts: complex(*parts),
    "bytes": lambda text: text.encode("latin-1"),
    "unknown": lambda name: Unknown(),
}


def _typed(value: Any) -> Any:
    if isinstance(value, list):
        return [_typed(entry) for entry in value]
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        return _TYPED[kind](content)
    return value
