"""Write graphs of plain Python values as JSON and read them back, so that two processes can exchange them.

Only builtin data crosses by value, whatever class it claims to be of: None, booleans, numbers, text, bytes, ranges,
lists, tuples, sets, dicts, deques, dates, Decimal, Fraction. Values are rebuilt from real builtins, so nothing that a
program defines (an `__eq__` that always agrees) comes along. Identity and cycles survive, and the state of a container
can be sent back to the process that owns it.
"""

import builtins
import importlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_LARGEST_PLAIN_INT = 2**63
_EMPTY: dict[str, type[Any]] = {"list": list, "set": set, "dict": dict, "deque": deque, "bytearray": bytearray}
_PLAIN: dict[type[Any], Callable[[Any], Any]] = {int: int.__int__, str: str.__str__, float: float.__float__}
# Values that are written as the arguments of their class.
_ARGUMENTS: dict[tuple[str, str], Callable[[Any], list[Any]]] = {
    ("builtins", "range"): lambda value: [value.start, value.stop, value.step],
    ("builtins", "complex"): lambda value: [value.real, value.imag],
    ("decimal", "Decimal"): lambda value: [str(value)],
    ("fractions", "Fraction"): lambda value: [value.numerator, value.denominator],
    ("datetime", "date"): lambda value: [value.year, value.month, value.day],
    ("datetime", "time"): lambda value: [value.hour, value.minute, value.second, value.microsecond],
    ("datetime", "timedelta"): lambda value: [value.days, value.seconds, value.microseconds],
    ("datetime", "datetime"): lambda value: [*value.timetuple()[:6], value.microsecond],
}
_ABSENT = object()


class ValueFormatError(ValueError):
    """The error of data that describe no value, which only a cheating program can have written."""


class Unknown:
    """A stand-in for an object of a class that cannot be written; equals nothing."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


Describe = Callable[[Any], list[Any]]
Restore = Callable[[str, list[Any]], Any]


def encode(value: Any) -> bytes:
    """Write one value that `decode` can read; objects of other classes than builtin ones become unknown."""
    return json.dumps(pack([value], lambda _: ["unknown"])[0]).encode()


def decode(data: bytes, most: int) -> Any:
    """Read a value that `encode` wrote, with lists for arrays. ValueFormatError for any other bytes, and for more than
    `most` values, of which a shared one counts wherever it appears: only then is the size of what is read bounded.
    """
    try:
        written = json.loads(data)
        if _expanded_size(written) > most:
            raise ValueFormatError(f"more than {most} values")
        return unpack(written, lambda kind, words: words[1] if kind == "array" else {"unknown": Unknown}[kind]())[0][0]
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueFormatError(f"no value: {data[:80]!r}") from error


def pack(roots: Sequence[Any], describe: Describe, shared: Sequence[Any] = ()) -> tuple[dict[str, Any], list[Any]]:
    """Serialize values; return them as JSON data, and the containers and objects in them in the order of their numbers.

    describe: encodes an object that is not builtin data, as [kind, details …]. The attributes of an
        ["object", class, attributes] are serialized, too.
    shared: containers that the other side already has, numbered from 0; their contents are sent again.
    """
    objects = list(shared)
    numbers = {id(known): number for number, known in enumerate(objects)}

    def encode_value(value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
            return encode_value(value.tolist())
        # Subclasses of the plain types, which may have methods of their own, lose them.
        for base in (int, str, float):
            if isinstance(value, base):
                value = _PLAIN[base](value)
                break
        if type(value) is int:
            # Python refuses to write long numbers in decimal.
            return value if abs(value) < _LARGEST_PLAIN_INT else ["int", hex(value)]
        if type(value) in (str, float):
            return value
        number = numbers.get(id(value))
        if number is None:
            number = numbers[id(value)] = len(objects)
            # Objects are kept, so that no other gets the same id.
            objects.append(value)
        return ["at", number]

    written: dict[str, Any] = {"roots": [encode_value(root) for root in roots], "nodes": []}
    # `objects` grows while nodes are written.
    for value in objects:
        written["nodes"].append(_node(value, encode_value, describe))
    return written, objects


def unpack(written: Any, restore: Restore, shared: Sequence[Any] = ()) -> tuple[list[Any], list[Any]]:
    """Read what `pack` wrote: return its roots, and the containers and objects that it numbers.

    restore: returns the object of a kind that is not builtin data, given the words of its description; attributes of an
        "object" are set afterwards.
    shared: the containers that this side already has, which get the contents that were sent.
    """
    nodes = written["nodes"]
    built = [*shared, *[_ABSENT] * (len(nodes) - len(shared))]
    for number in range(len(shared), len(nodes)):
        kind = nodes[number][0]
        if kind in _EMPTY:
            built[number] = _EMPTY[kind]()
        elif kind == "object":
            built[number] = restore(kind, [nodes[number][1]])

    def value(word: Any) -> Any:
        if type(word) is not list:
            return word
        tag, content = word
        if tag == "int":
            return int(content, 16)
        if tag != "at" or content < 0:
            raise ValueFormatError(f"unknown word {word!r}")
        if built[content] is _ABSENT:
            built[content] = _constant(nodes[content], value, restore)
        return built[content]

    for number, node in enumerate(nodes):
        value(["at", number])
        if node is not None and (node[0] in _EMPTY or node[0] == "object"):
            _fill(built[number], node, value)
    return [value(root) for root in written["roots"]], built


def _expanded_size(written: Any) -> int:
    """Count the values in what `pack` wrote as if nothing were shared. RecursionError if one contains itself."""
    sizes: dict[int, int] = {}

    def size(word: Any) -> int:
        if type(word) is not list or word[0] != "at":
            return 1
        number = word[1]
        if number not in sizes:
            node = written["nodes"][number]
            sizes[number] = size(node[2]) if node[0] == "array" else 1 + sum(map(size, node[1:]))
        return sizes[number]

    return sum(map(size, written["roots"]))


def is_builtin_class(value: Any) -> bool:
    """Return whether a value is a class that both sides know by its name alone."""
    return isinstance(value, type) and bool(vars(builtins).get(value.__name__) is value)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes, also those in slots."""
    slots = [name for kind in type(value).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _names(slots: str | Iterable[str]) -> list[str]:
    return [slots] if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]


def _node(value: Any, encode_value: Callable[[Any], Any], describe: Describe) -> list[Any]:
    """Encode a container or object as a node; `encode_value` writes what it holds."""
    for kind in (list, tuple, set, frozenset, deque):
        if isinstance(value, kind):
            return [kind.__name__, *map(encode_value, value)]
    if isinstance(value, dict):
        return ["dict", *(encode_value(each) for pair in value.items() for each in pair)]
    if isinstance(value, bytes | bytearray):
        return ["bytearray" if isinstance(value, bytearray) else "bytes", value.decode("latin-1")]
    name = type(value).__module__, type(value).__name__
    if name in _ARGUMENTS:
        return ["made", *name, *_ARGUMENTS[name](value)]
    if name[0] == "numpy" and hasattr(value, "tolist"):
        return ["array", value.dtype.str, encode_value(value.tolist())]
    described = describe(value)
    if described[0] == "object":
        kind, name_of_class, attributes = described
        return [kind, name_of_class, *(encode_value(each) for pair in attributes.items() for each in pair)]
    return described


def _constant(node: list[Any], value: Callable[[Any], Any], restore: Restore) -> Any:
    """Build what cannot change after it was made."""
    kind, *words = node
    if kind in ("tuple", "frozenset"):
        return (tuple if kind == "tuple" else frozenset)(map(value, words))
    if kind == "bytes":
        return words[0].encode("latin-1")
    if kind == "made":
        module, name, *arguments = words
        if (module, name) not in _ARGUMENTS:
            raise ValueFormatError(f"unknown class {module}.{name}")
        # Text makes decimals alone: Fraction("1e99999999") would take hours.
        allowed = (str,) if name == "Decimal" else (int, float)
        if not all(type(argument) in allowed for argument in arguments):
            raise ValueFormatError(f"arguments of {name}: got {arguments!r:.80}")
        return getattr(importlib.import_module(module), name)(*arguments)
    if kind == "array":
        return restore(kind, [str(words[0]), value(words[1])])
    return restore(kind, words)


def array(dtype: str, content: Any) -> Any:
    """Build an array of numpy, or a list where numpy is absent or the entries are objects."""
    if dtype[1:2] not in ("b", "i", "u", "f", "c", "U", "M", "m"):
        return content
    try:
        return importlib.import_module("numpy").array(content, dtype=dtype)
    except ImportError:
        return content


def _fill(target: Any, node: list[Any], value: Callable[[Any], Any]) -> None:
    """Give a container or object the state that `pack` wrote of it."""
    kind, *words = node
    if kind == "bytearray":
        target[:] = words[0].encode("latin-1")
        return
    if kind == "object":
        words = words[1:]
        for name, word in zip(words[::2], words[1::2], strict=True):
            if name.startswith("__"):
                raise ValueFormatError(f"attribute {name} cannot be set")
            object.__setattr__(target, name, value(word))
        return
    if not isinstance(target, _EMPTY[kind]):
        raise ValueFormatError(f"a {type(target).__name__} cannot take the state of a {kind}")
    content = [value(word) for word in words]
    if kind == "list":
        target[:] = content
        return
    target.clear()
    if kind == "dict":
        target.update(zip(content[::2], content[1::2], strict=True))
    elif kind == "set":
        target.update(content)
    else:
        target.extend(content)
