"""Columns of equal width."""

from megarl.record.text_table import align


def test_align() -> None:
    rows = [("a", "b", "c"), ("long", "12", "x")]
    assert align(rows) == ["a      b  c", "long  12  x"]
    assert align(rows, left=(1,)) == ["   a  b   c", "long  12  x"]


def test_no_spaces_at_the_end() -> None:
    assert align([("a", "b"), ("c", "long")], left=(0, 1)) == ["a  b", "c  long"]
