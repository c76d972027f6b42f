"""Tensors reach every receiver bit for bit, whichever rank sends which part of them."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.sync.wire import collective
from megarl.sync.wire.collective import Meeting, WeightChannel, open_store
from megarl.weights.safetensors_map import TensorSpec
from megarl.weights.slices import Slice

# Types of every width, a tensor of no whole number of words, and one larger than a bucket.
SPECS = {
    "a": TensorSpec(shape=(6, 5), dtype=torch.float32),
    "b": TensorSpec(shape=(7,), dtype=torch.bfloat16),
    "c": TensorSpec(shape=(3,), dtype=torch.float32),
}
BUCKET = 40
TIMEOUT_S = 30.0
# Bits that arithmetic on floats would not keep: NaN with a payload, negative zero, a subnormal, infinity.
ODD = torch.tensor([0x7FC12345, -0x80000000, 1, 0x7F800000, -1], dtype=torch.int32).view(torch.float32)


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of calls that wait for each other."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=30) for future in [pool.submit(call) for call in calls]]


def open_channels(size: int) -> list[WeightChannel]:
    store = open_store("127.0.0.1")

    def member(rank: int) -> WeightChannel:
        meeting = Meeting(address="127.0.0.1", port=store.port, rank=rank, size=size, timeout_s=TIMEOUT_S)
        return WeightChannel(meeting, SPECS, torch.device("cpu"))

    return at_once([lambda rank=rank: member(rank) for rank in range(size)])  # type: ignore[misc]


def tensors(seed: int) -> dict[str, torch.Tensor]:
    made = {
        name: torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed)) for name, spec in SPECS.items()
    }
    made["a"][4] = ODD
    return {name: tensor.to(SPECS[name].dtype) for name, tensor in made.items()}


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("bucket_bytes", [BUCKET, 1 << 20], ids=["several buckets", "one bucket"])
def test_slices_of_several_ranks_reach_all_receivers(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "BUCKET_BYTES", bucket_bytes)
    first, second, *receivers = open_channels(4)
    for seed in (1, 2):
        expected = tensors(seed)
        left, right = (slice(0, 6), slice(0, 2)), (slice(0, 6), slice(2, 5))
        # Columns of one tensor; a whole one; one in two parts. What a rank does not own is not sent.
        mine = [
            Slice(tensor="a", index=left, view=expected["a"][left], owned=True),
            Slice(tensor="b", index=(slice(0, 7),), view=torch.full((7,), 9.0, dtype=torch.bfloat16), owned=False),
            Slice(tensor="c", index=(slice(2, 3),), view=expected["c"][2:], owned=True),
        ]
        theirs = [
            Slice(tensor="a", index=right, view=expected["a"][right], owned=True),
            Slice(tensor="b", index=(slice(0, 7),), view=expected["b"], owned=True),
            Slice(tensor="c", index=(slice(0, 2),), view=expected["c"][:2], owned=True),
        ]
        receiving = [lambda receiver=receiver: dict(receiver.receive()) for receiver in receivers]  # type: ignore[misc]
        _, _, *received = at_once([lambda m=mine: first.send(m), lambda t=theirs: second.send(t), *receiving])  # type: ignore[misc]
        for got in received:
            assert list(got) == list(SPECS)
            assert {name: bits(tensor) for name, tensor in got.items()} == {n: bits(t) for n, t in expected.items()}
            assert all(got[name].dtype is spec.dtype for name, spec in SPECS.items())


def test_who_waits_for_members_that_fail_fails_too() -> None:
    """One member is gone. None waits until the time is up, not even for one that waits for it."""
    *members, gone = open_channels(4)
    del gone._group

    def failure(member: WeightChannel) -> str:
        with pytest.raises(WeightSyncError) as caught:
            dict(member.receive())
        return str(caught.value)

    began = time.monotonic()
    failures = at_once([lambda member=member: failure(member) for member in members])  # type: ignore[misc]
    assert all(text.startswith("the group of trainer ranks and engine workers broke: ") for text in failures)
    assert time.monotonic() - began < TIMEOUT_S / 2


def test_buckets_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "BUCKET_BYTES", BUCKET)
    allocated: list[int] = []
    allocate = collective._allocate

    def noted(*args: Any) -> Any:
        data, views = allocate(*args)
        allocated.append(data.nbytes)
        return data, views

    monkeypatch.setattr(collective, "_allocate", noted)
    (alone,) = open_channels(1)
    alone.send([])
    # 120 bytes alone; then 14 and 12 bytes, each up to a multiple of 8.
    assert allocated == [120, 16 + 16]
