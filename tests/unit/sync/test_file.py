"""Files of several hosts become one, bit for bit, whoever wrote what."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.sync.wire import file as transport
from megarl.sync.wire.file import HostFile, SharedFile
from megarl.weights.safetensors_map import TensorSpec, map_tensors

SPECS = {
    "a": TensorSpec(shape=(6, 5), dtype=torch.float32),
    "b": TensorSpec(shape=(7,), dtype=torch.bfloat16),
}
TIMEOUT_S = 30.0
# Bits that arithmetic on floats would not keep: NaN with a payload, negative zero, a subnormal, infinity.
ODD = torch.tensor([0x7FC12345, -0x80000000, 1, 0x7F800000, -1], dtype=torch.int32).view(torch.float32)


def on_all(files: Sequence[HostFile], call: Callable[[HostFile, int], Any]) -> None:
    """Call every host at once, as the driver does."""
    with ThreadPoolExecutor(len(files)) as pool:
        for future in [pool.submit(call, file, i) for i, file in enumerate(files)]:
            future.result(timeout=TIMEOUT_S)


def open_hosts(directory: Path, num_hosts: int, *, over_devices: bool = False) -> tuple[list[HostFile], list[Path]]:
    files, paths = [HostFile() for _ in range(num_hosts)], [directory / f"host{i}" for i in range(num_hosts)]
    on_all(files, lambda file, i: file.create(str(paths[i]), SPECS))
    port = files[0].offer("127.0.0.1")
    on_all(files, lambda file, i: file.join("127.0.0.1", port, i, num_hosts, TIMEOUT_S, over_devices=over_devices))
    return files, paths


@pytest.mark.parametrize("over_devices", [False, True], ids=["gloo", "the platform's group"])
def test_slices_of_several_hosts_reach_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over_devices: bool) -> None:
    # Several buckets, whose borders lie inside of elements.
    monkeypatch.setattr(transport, "BUCKET_BYTES", 7)
    files, paths = open_hosts(tmp_path, 3, over_devices=over_devices)
    for step in (1, 2):
        expected_a = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        expected_a[4] = ODD
        expected_b = torch.randn(7, generator=torch.Generator().manual_seed(-step)).to(torch.bfloat16)
        on_all(files, lambda file, _: file.clear())
        # The first two hosts have ranks, which own columns and rows; the third has engines only.
        first, second = (map_tensors(path, writable=True) for path in paths[:2])
        first["a"][:, :2] = expected_a[:, :2]
        second["a"][:, 2:] = expected_a[:, 2:]
        second["b"][:] = expected_b
        on_all(files, lambda file, _: file.deliver())
        for path in paths:
            got = map_tensors(path)
            assert torch.equal(got["a"].view(torch.int32), expected_a.view(torch.int32))
            assert torch.equal(got["b"].view(torch.int16), expected_b.view(torch.int16))
    on_all(files, lambda file, _: file.remove())
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_is_gone_fails_the_others_and_they_begin_again(tmp_path: Path) -> None:
    """None waits until the time is up, and a file that nobody removed is no obstacle."""
    *files, gone = open_hosts(tmp_path, 3)[0]
    gone._group = None

    def fail(file: HostFile, _: int) -> None:
        with pytest.raises(WeightSyncError, match="the group of all hosts broke: "):
            file.deliver()
        file.remove()

    began = time.monotonic()
    on_all(files, fail)
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert [path.name for path in tmp_path.iterdir()] == ["host2"]
    files, paths = open_hosts(tmp_path, 3)
    on_all(files, lambda file, _: file.clear())
    map_tensors(paths[0], writable=True)["b"].fill_(3)
    on_all(files, lambda file, _: file.deliver())
    assert [map_tensors(path)["b"].tolist() for path in paths] == [[3] * 7] * 3


def test_what_was_summed_on_a_device_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device is stood in for by a group that sees copies of the buckets only."""
    monkeypatch.setattr(transport, "BUCKET_BYTES", 7)
    (file,), (path,) = open_hosts(tmp_path, 1)
    map_tensors(path, writable=True)["b"].fill_(3)

    class Device:
        @staticmethod
        def allreduce(buckets: list[torch.Tensor]) -> SimpleNamespace:
            (bucket,) = buckets
            # 3 is 0x4040 in bfloat16; twice that is 0x8080, −1.18e-38.
            bucket.add_(bucket.clone())
            return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(torch.Tensor, "to", lambda bucket, _: bucket.clone())
    file._group = Device()  # type: ignore[assignment]
    file.deliver()
    assert map_tensors(path)["b"].view(torch.int16).tolist() == [-0x7F80] * 7


def test_one_host_needs_no_transfer(tmp_path: Path) -> None:
    shared = SharedFile(tmp_path / "weights")
    shared.create(SPECS)
    map_tensors(tmp_path / "weights", writable=True)["b"].fill_(3)
    shared.deliver()
    # Ranks overwrite everything, so nothing is cleared between syncs.
    shared.clear()
    assert map_tensors(tmp_path / "weights")["b"].tolist() == [3] * 7
    shared.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_system_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport.shutil, "disk_usage", lambda _: SimpleNamespace(free=133))
    with pytest.raises(WeightSyncError, match=rf"weight sync needs .* GiB in {tmp_path}, .* GiB are free; enlarge it"):
        SharedFile(tmp_path / "weights").create(SPECS)
    assert list(tmp_path.iterdir()) == []
    # 6 × 5 × 4 B and 7 × 2 B.
    monkeypatch.setattr(transport.shutil, "disk_usage", lambda _: SimpleNamespace(free=134))
    SharedFile(tmp_path / "weights").create(SPECS)
