"""The check of what ranks wrote together."""

import pytest

from megarl.errors import WeightSyncError
from megarl.train.export import check_complete

NUM_ELEMENTS = {"a": 6, "b": 4}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"a": 6}, r"did not write 1 tensors completely .*b \(0/4\)"),
        ({"a": 6, "b": 8}, r"b \(8/4\)"),
        ({"a": 6, "b": 4, "c": 1}, r"c \(1/0\)"),
    ],
    ids=["missing", "twice", "unknown"],
)
def test_check_complete(written: dict[str, int], message: str) -> None:
    check_complete(NUM_ELEMENTS, NUM_ELEMENTS)
    with pytest.raises(WeightSyncError, match=message):
        check_complete(NUM_ELEMENTS, written)
