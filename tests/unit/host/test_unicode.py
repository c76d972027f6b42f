"""Texts that UTF-8 cannot hold: found in inputs, mended in what a run writes."""

import json
from typing import Any

import numpy as np
import pytest

from megarl.host.unicode import find_surrogate, plain, readable

HALF = "\ud83d"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("größe 数学 😀 \0", "größe 数学 😀 \0"),
        (f"I am {HALF}", "I am \ufffd"),
        ("\ud83d\ude00", "😀"),  # JSON's two escapes, read one at a time
        ("\ude00\ud83d", "\ufffd\ufffd"),
    ],
)
def test_halves_are_mended(text: str, expected: str) -> None:
    assert readable(text) == expected
    readable(text).encode()


def test_the_first_half_is_found_in_keys_and_values() -> None:
    assert find_surrogate({"a": [1, None, True, "😀"]}, "row") is None
    found = find_surrogate({"a": "x", "b": {"c": ["y", f"z{HALF}"]}, "d": HALF}, "row")
    assert found is not None
    assert found.startswith(r"row.b.c[1] has '\ud83d' at position 1, half of a character")
    found = find_surrogate({"a": {HALF: 1}}, "row")
    assert found is not None
    assert found.startswith(r"a key of row.a has '\ud83d' at position 0")


def test_plain_values_can_be_written() -> None:
    deep: Any = "end"
    for _ in range(5000):
        deep = [deep]
    values = {HALF: HALF, 3: (1, np.int64(2), np.array([1.5])), "set": {4}, "bytes": b"\xff", "deep": deep}
    written = json.dumps(plain(values), ensure_ascii=False).encode()
    read = json.loads(written)
    assert {key: read[key] for key in ("\ufffd", "3", "set", "bytes")} == {
        "\ufffd": "\ufffd",
        "3": [1, 2, [1.5]],
        "set": "{4}",
        "bytes": "b'\\xff'",
    }
