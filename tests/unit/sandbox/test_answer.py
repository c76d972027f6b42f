"""Values on their way out of a sandbox."""

import pytest

from megarl.sandbox.jail.answer import AnswerError, decode, encode


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
    ],
    # pytest cannot name a number of so many digits.
    ids=lambda value: type(value).__name__,
)
def test_values_come_back_as_they_are(value: object) -> None:
    back = decode(encode(value))
    assert back == value
    assert isinstance(value, type(back) | frozenset)


def test_types_stay_apart() -> None:
    assert decode(encode((1, 2))) != [1, 2]
    assert decode(encode({1, 2})) != [1, 2]
    assert decode(encode({"tuple": [1]})) == {"tuple": [1]}


def test_numbers_of_other_types_are_whole_numbers() -> None:
    class Index:
        def __index__(self) -> int:
            return 7

    assert decode(encode([Index()])) == [7]


def test_objects_equal_nothing() -> None:
    assert decode(encode(object())) not in (None, "object", {"unknown": "object"})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"7 8",
        b"\xff",
        b"{}",
        b'{"list": []}',
        b'{"a": 1, "b": 2}',
        b'{"tuple": 1}',
        b'{"set": [[1]]}',
        b'{"int": "x"}',
        b'{"int": 7}',
        b'{"bytes": 7}',
        b'{"complex": [1, 2, 3]}',
        b'{"dict": [1]}',
    ],
)
def test_what_is_no_answer(data: bytes) -> None:
    with pytest.raises(AnswerError, match="no answer"):
        decode(data)


def test_a_deep_answer_is_none() -> None:
    with pytest.raises(AnswerError, match="no answer"):
        decode(b"[" * 10**6)
