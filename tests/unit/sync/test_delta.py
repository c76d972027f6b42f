"""Differences restore every bit, and say so where they cannot."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megarl.errors import WeightSyncError
from megarl.sync.transport.delta_transport import BLOCK, Bytes, Span, apply, encode

# Float32 bits that comparing values would not tell apart, or keep: zeros of both signs, NaNs with payloads, infinity.
ODD = [0x00000000, 0x80000000, 0x7FC00000, 0x7FC12345, 0xFFC00001, 0x7F800001, 0x7F800000, 0x00000001, 0x3F800000]


def spans_of(lengths: list[tuple[int, int]]) -> list[Span]:
    """Spans of (elements, width) end to end."""
    spans, at = list[Span](), 0
    for i, (count, width) in enumerate(lengths):
        spans.append((f"t{i}", at, at + count * width, width))
        at += count * width
    return spans


def sent(previous: Bytes, current: Bytes, spans: list[Span]) -> Bytes:
    """What a receiver that has `previous` ends with."""
    target, payload = previous.copy(), encode(previous, current, spans)
    if payload is None:
        return current
    assert len(payload) < len(current)
    apply(payload, target, spans)
    return target


@given(
    words=hnp.arrays(np.uint32, st.integers(1, 300), elements=st.sampled_from(ODD)),
    changes=st.dictionaries(st.integers(0, 299), st.sampled_from(ODD), max_size=40),
    split=st.integers(0, 300),
)
def test_odd_bits(words: np.ndarray, changes: dict[int, int], split: int) -> None:
    new = words.copy()
    for place, value in changes.items():
        new[place % len(new)] = value
    first = min(split, len(words))
    spans = spans_of([(first, 4), (len(words) - first, 4)])
    assert sent(words.view(np.uint8), new.view(np.uint8), spans).tobytes() == new.tobytes()


@given(
    lengths=st.lists(st.tuples(st.integers(0, 3 * BLOCK), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=3),
    process_plan=st.sampled_from([0.0, 1e-4, 0.01, 0.03, 0.2, 0.6, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_share_of_any_type(lengths: list[tuple[int, int]], process_plan: float, seed: int) -> None:
    """Few changes are listed, many are in a bitmap, and a message of nothing but changes is sent itself."""
    lengths = sorted(lengths, key=lambda each: -each[1])
    rng, spans = np.random.default_rng(seed), spans_of(lengths)
    previous = rng.integers(0, 256, spans[-1][2], dtype=np.uint8)
    current = previous.copy()
    for _, start, end, width in spans:
        words = current[start:end].view(f"u{width}")
        # Blocks differ in how much of them changes.
        density = process_plan * rng.random(-(-len(words) // BLOCK)).repeat(BLOCK)[: len(words)]
        words[rng.random(len(words)) < density] += 1
    assert sent(previous, current, spans).tobytes() == current.tobytes()
    if process_plan == 1.0 and lengths[0][0]:
        everything = ~previous
        assert encode(previous, everything, spans) is None


def test_sizes() -> None:
    """By hand: 4 bytes of checksum, and of the span 4 more, 4 per block, then 2 + 2 per change or a bitmap."""
    previous = np.zeros(2 * 3 * BLOCK, np.uint8)
    spans = spans_of([(3 * BLOCK, 2)])

    def size(*changed: int) -> int:
        current = previous.copy()
        for block, count in enumerate(changed):
            current.view(np.uint16)[block * BLOCK : block * BLOCK + count] = 7
        payload = encode(previous, current, spans)
        assert payload is not None
        assert sent(previous, current, spans).tobytes() == current.tobytes()
        return len(payload)

    assert size(0, 0, 0) == 4 + 4 + 3 * 4
    assert size(3, 0, 10) == 20 + 13 * 4
    # 4096 places are as long as a bitmap.
    assert size(4096, 0, 0) == 20 + 4096 * 4
    assert size(4097, 1, 0) == 20 + 8192 + 4097 * 2 + 4


def test_one_flipped_bit_anywhere_is_found() -> None:
    rng, spans = np.random.default_rng(0), spans_of([(500, 4), (100, 2)])
    previous = rng.integers(0, 256, 2200, dtype=np.uint8)
    current = previous.copy()
    current[::400] ^= 1
    payload = encode(previous, current, spans)
    assert payload is not None
    for bit in range(8 * len(payload)):
        flipped = payload.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WeightSyncError, match="arrived with other bits than were sent"):
            apply(flipped, previous.copy(), spans)


def test_another_version_is_found_by_the_name_of_its_tensor() -> None:
    spans = spans_of([(500, 4), (100, 2)])
    previous, current = np.zeros(2200, np.uint8), np.zeros(2200, np.uint8)
    current[0] = 1
    payload, other = encode(previous, current, spans), previous.copy()
    assert payload is not None
    other[2100] = 1
    with pytest.raises(WeightSyncError, match=r"1 tensors differ .* applied: \['t1'\]; .* another version"):
        apply(payload, other, spans)
