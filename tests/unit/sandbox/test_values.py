"""Values on their way out of a sandbox."""

import datetime
import json
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from megarl_sandbox.jail.values import Unknown, ValueFormatError, decode, encode, pack, unpack


def back_from(value: object) -> Any:
    return decode(encode(value), 100)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        2**63,
        -(10**5000),
        0.1,
        float("inf"),
        "é\ud800",
        [1, [2, (3,)]],
        {1: {2, 3}, (4, 5): frozenset({6})},
        b"\x00\xff",
        1 - 2j,
        {},
        (),
        set(),
        deque([1]),
        range(1, 9, 2),
        bytearray(b"a"),
        Decimal("0.10"),
        Fraction(1, 3),
        datetime.date(2024, 2, 29),
        datetime.timedelta(days=-1, seconds=3),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
    ],
    # pytest cannot name a number of so many digits.
    ids=lambda value: type(value).__name__,
)
def test_values_come_back_as_they_are(value: object) -> None:
    back = back_from(value)
    assert back == value
    assert isinstance(value, type(back) | frozenset)


def test_types_stay_apart() -> None:
    assert back_from((1, 2)) != [1, 2]
    assert back_from({1, 2}) != [1, 2]
    assert back_from({"tuple": [1]}) == {"tuple": [1]}


def test_objects_equal_nothing() -> None:
    assert back_from(object()) not in (None, "object", {"unknown": "object"})


class Liar(list):  # type: ignore[type-arg]
    def __eq__(self, other: object) -> bool:
        return True


class Number(int):
    def __eq__(self, other: object) -> bool:
        return True


def test_a_subclass_arrives_as_the_builtin() -> None:
    back = back_from([Liar([1]), Number(3)])
    assert [type(each) for each in back] == [list, int]
    assert back == [[1], 3]


def test_identity_and_cycles_survive() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    (back,), _ = unpack(pack([[ring, ring]], lambda _: ["unknown"])[0], lambda *_: Unknown())
    assert back[0] is back[1]
    assert back[0][1] is back[0]


def nested(inner: object, make: Callable[[object], object]) -> object:
    for _ in range(60):
        inner = make(inner)
    return inner


@pytest.mark.parametrize(
    "value",
    [
        nested(1, lambda x: [x, x]),
        nested(1, lambda x: (x, x)),
        nested(1, lambda x: {"a": x, "b": x}),
        nested(np.zeros(3), lambda x: [x, x]),
        [ring for ring in [[]] if ring.append(ring) is None],
    ],
    ids=["list", "tuple", "dict", "array", "ring"],
)
def test_what_would_expand_is_not_read(value: object) -> None:
    with pytest.raises(ValueFormatError, match="no value"):
        back_from(value)


def test_what_would_be_hashed_for_ever_is_not_read() -> None:
    # The key of a dict that no program could make, but write.
    tuples = [["tuple", ["at", n], ["at", n]] for n in range(2, 62)]
    written = {"roots": [["at", 0]], "nodes": [["dict", ["at", 1], 1], *tuples, ["tuple"]]}
    with pytest.raises(ValueFormatError, match="no value"):
        decode(json.dumps(written).encode(), 100)


def test_shared_values_count_wherever_they_appear_and_arrays_are_lists() -> None:
    row = [1, 2]
    assert decode(encode([row, row]), 7) == [row, row]
    with pytest.raises(ValueFormatError, match="no value"):
        decode(encode([row, row]), 6)
    # An array of texts has room for the longest one in each entry.
    assert decode(encode(np.array([["a", "b"]], dtype="U10")), 4) == [["a", "b"]]


def test_the_state_of_a_container_comes_back() -> None:
    mine = {"a": [1, 2]}
    written, objects = pack([mine], lambda _: ["unknown"])
    (theirs,), known = unpack(json.loads(json.dumps(written)), lambda *_: Unknown())
    inner = mine["a"]
    theirs["a"].append(3)
    theirs["b"] = theirs["a"]
    answer, _ = pack([theirs["b"]], lambda _: ["unknown"], known)
    (value,), _ = unpack(answer, lambda *_: Unknown(), objects)
    assert value is inner
    assert mine == {"a": [1, 2, 3], "b": [1, 2, 3]}


def at(*node: object) -> bytes:
    """One container in place of the value."""
    return json.dumps({"roots": [["at", 0]], "nodes": [list(node)]}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"7 8",
        b"\xff",
        b"{}",
        b"7",
        b'{"roots": [], "nodes": []}',
        b'{"roots": [["int", 7]], "nodes": []}',
        b'{"roots": [["at", 0]], "nodes": []}',
        b'{"roots": [["at", -1]], "nodes": [["list"]]}',
        b'{"roots": [["is", 0]], "nodes": [["list"]]}',
        at("set", ["at", 0]),
        at("dict", 1),
        at("bytes", 7),
        at("tuple", ["at", 0]),
        at("made", "os", "system", "true"),
        at("made", "builtins", "complex", None),
        at("made", "decimal", "Decimal", "nine"),
        at("made", "fractions", "Fraction", 1, 0),
        at("made", "fractions", "Fraction", "1e99999999"),
        at("object", "Node"),
        at("unheard of"),
    ],
)
def test_what_is_no_value(data: bytes) -> None:
    with pytest.raises(ValueFormatError, match="no value"):
        decode(data, 100)


def test_a_deep_message_is_none() -> None:
    with pytest.raises(ValueFormatError, match="no value"):
        decode(b"[" * 10**6, 100)
