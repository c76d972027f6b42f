"""Keep the images that were read last, whichever way they were read."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """A cache of what was asked for last, of at most so many bytes, but of one value at least. One thread may use
    it at a time.

    make: returns the value of a key. size_of: returns a value's size in bytes.
    """

    def __init__(self, most_bytes: int, make: Callable[[str], T], size_of: Callable[[T], int]) -> None:
        self._most_bytes, self._make, self._size_of = most_bytes, make, size_of
        # By key; sizes are added up once, since thousands of small images are kept.
        self._values = OrderedDict[str, tuple[T, int]]()
        self._num_bytes = 0

    def __getitem__(self, key: str) -> T:
        if (known := self._values.pop(key, None)) is None:
            value = self._make(key)
            known = value, self._size_of(value)
            self._num_bytes += known[1]
        self._values[key] = known
        while self._num_bytes > self._most_bytes and len(self._values) > 1:
            self._num_bytes -= self._values.popitem(last=False)[1][1]
        return known[0]
