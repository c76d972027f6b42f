"""The checks around a weight sync, without processes."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.sync.seam import WeightSync, check_complete, compare_checksums
from megarl.types.messages import StoreResult
from megarl.weights.safetensors_map import TensorSpec, map_tensors

SPECS = {"a": TensorSpec(shape=(2, 3), dtype=torch.float32), "b": TensorSpec(shape=(4,), dtype=torch.bfloat16)}
NUM_ELEMENTS = {"a": 6, "b": 4}


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Fill every tensor with `value` and report `num_elements` and `checksums`."""

    value: float = 2.0
    num_elements: dict[str, int] = field(default_factory=lambda: NUM_ELEMENTS)
    checksums: dict[str, int] = field(default_factory=lambda: {"a": 1, "b": 2})

    def store_weights(self, files: Sequence[Path], *, with_checksums: bool = False) -> StoreResult:
        for tensor in map_tensors(files[0], writable=True).values():
            tensor.fill_(self.value)
        return StoreResult(num_elements=self.num_elements, checksums=self.checksums if with_checksums else {})


@dataclass(frozen=True, kw_only=True)
class TwoEngines:
    """Keep what they loaded; the second reports `checksums` of its own."""

    checksums: dict[str, int] = field(default_factory=lambda: {"a": 1, "b": 2})
    loads: list[tuple[int, dict[str, list[float]]]] = field(default_factory=list)

    def load_weights(self, files: Sequence[Path], *, version: int, with_checksums: bool) -> list[dict[str, int]]:
        self.loads.append((version, {n: t.flatten().tolist() for n, t in map_tensors(files[0]).items()}))
        return [{"a": 1, "b": 2}, self.checksums] if with_checksums else [{}, {}]


def test_push_hands_over_what_the_ranks_wrote(tmp_path: Path) -> None:
    engines = TwoEngines()
    sync = WeightSync(Ranks(), engines, tmp_path / "weights", SPECS)
    assert sync.push(7, verify=True) == {"sync/wire_bytes": 2.0 * (6 * 4 + 4 * 2)}
    sync.push(8, verify=False)
    assert engines.loads == [(version, {"a": [2.0] * 6, "b": [2.0] * 4}) for version in (7, 8)]
    sync.close()
    assert not (tmp_path / "weights").exists()


def test_incomplete_weights_never_reach_the_engines(tmp_path: Path) -> None:
    engines = TwoEngines()
    sync = WeightSync(Ranks(num_elements={"a": 3, "b": 4}), engines, tmp_path / "weights", SPECS)
    with pytest.raises(WeightSyncError, match=r"a \(3/6\)"):
        sync.push(1, verify=False)
    assert engines.loads == []


def test_verify_compares_every_engine(tmp_path: Path) -> None:
    sync = WeightSync(Ranks(), TwoEngines(checksums={"a": 1, "b": 3}), tmp_path / "weights", SPECS)
    sync.push(1, verify=False)
    with pytest.raises(WeightSyncError, match=r"1 tensors differ between trainer and engine after a sync: \['b'\]"):
        sync.push(2, verify=True)


def test_shared_memory_too_small_says_how_much_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 3 GiB on 1.5 GiB."""
    gib = 2**30
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * gib // 2))
    specs = {"w": TensorSpec(shape=(3 * gib // 4,), dtype=torch.float32)}
    with pytest.raises(WeightSyncError, match=r"needs 3\.00 GiB in .*, 1\.50 GiB are free; enlarge it, or remove"):
        WeightSync(Ranks(), TwoEngines(), tmp_path / "weights", specs)
    assert not (tmp_path / "weights").exists()


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


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1}, {"a": 1}),
        ({"a": 1, "b": 2}, {"a": 1, "b": 0}),
    ],
    ids=["not-received", "not-sent", "neither", "changed"],
)
def test_compare_checksums(sent: dict[str, int], received: dict[str, int]) -> None:
    compare_checksums(["a", "b"], {"a": 1, "b": 0}, {"a": 1, "b": 0, "c": 5})
    with pytest.raises(WeightSyncError, match=r"\['b'\]"):
        compare_checksums(["a", "b"], sent, received)
