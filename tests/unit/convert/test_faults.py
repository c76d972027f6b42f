"""Conversions that break off: a full disk, a lost source, a kill at any time. What was begun is no result, and
continues.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.convert import commands, engine, readers
from megarl.convert import plan as plan_module
from megarl.convert.commands import hf_to_mcore, mcore_to_hf
from megarl.convert.engine import STATE, ConversionOutcome, ConvertSettings, Journal, partial_dir
from megarl.convert.models import open_model
from megarl.errors import ConfigError, DataError
from megarl.weights.safetensors_map import preallocate
from tests.helpers.hf_models import make_model
from tests.helpers.waiting import wait_until

CONVERT: dict[str, Callable[..., ConversionOutcome | None]] = {"hf-to-mcore": hf_to_mcore, "mcore-to-hf": mcore_to_hf}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """About a dozen rows in a piece, and several output files; what is durable on a slow disk is tested elsewhere."""
    monkeypatch.setattr(plan_module, "PIECE_BYTES", 2500)
    monkeypatch.setattr(plan_module, "MAX_FILE_BYTES", 200_000)
    monkeypatch.setattr(engine, "fsync", lambda path: None)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What each direction converts: the same model."""
    directory = tmp_path_factory.mktemp("qwen2")
    model = make_model(directory / "hf", "qwen2", tied=False, max_shard_size=100_000)
    hf_to_mcore(model, settings(directory / "dist"))
    return {"hf-to-mcore": model, "mcore-to-hf": directory / "dist"}


@pytest.fixture
def source(sources: dict[str, Path], direction: str, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(sources[direction], tmp_path / "source"))


def settings(out: Path, *, num_workers: int = 1, overwrite: bool = False) -> ConvertSettings:
    return ConvertSettings(out=out, num_workers=num_workers, overwrite=overwrite)


def file_bytes(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def assert_no_result(out: Path) -> None:
    """Nothing is under the name; what was begun is marked as such."""
    assert not out.exists()
    assert not partial_dir(out).exists() or (partial_dir(out) / STATE).is_dir()


def test_a_file_too_large_for_the_disk_is_not_begun(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot reserve \d+\.00 GiB for .*; free space there"):
        preallocate(tmp_path / "file", 1 << 60)
    assert not (tmp_path / "file").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A function that makes a file system of so many KiB, or gives it another size."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    disk = tmp_path / "disk"

    def resize(kib: int) -> Path:
        options = f"size={kib}k" + (",remount" if disk.is_mount() else "")
        disk.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)
        return disk

    yield resize
    if disk.is_mount():
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("direction", ["mcore-to-hf"])
def test_a_full_disk_is_named_and_then_all_goes_on(
    tmp_path: Path, source: Path, direction: str, small_disk: Callable[[int], Path]
) -> None:
    """Of half the room nothing is converted. With room for the tensors but not for more, all is kept."""
    convert = CONVERT[direction]
    whole = convert(source, settings(tmp_path / "whole"))
    assert whole is not None
    num_kib = -(-whole.num_bytes_written // 1024)
    out = small_disk(num_kib // 2) / "out"
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"cannot reserve .* No space left on device; free space there"):
            convert(source, settings(out))
        assert_no_result(out)
    # Pages of 4 KiB: of each output file, of the journal's three, and of the directories none.
    num_files = len([path for path in (tmp_path / "whole").iterdir() if path.suffix in (".distcp", ".safetensors")])
    small_disk(num_kib + 4 * (num_files + 3))
    for _ in range(2):
        with pytest.raises(DataError, match=r"No space left on device.*free space, and run the command again"):
            convert(source, settings(out))
        assert_no_result(out)
    assert len(Journal(partial_dir(out)).done()) == whole.num_pieces
    small_disk(4 * num_kib)
    outcome = convert(source, settings(out))
    assert outcome is not None
    assert outcome.num_kept == whole.num_pieces
    assert file_bytes(out) == file_bytes(tmp_path / "whole")


# Every read takes 20 ms, so that there is a middle.
SLOW = """
import sys, time
from megarl.convert import plan, readers
from megarl.cli import main
plan.PIECE_BYTES, plan.MAX_FILE_BYTES = 2500, 200_000
for kind in (readers.SafetensorsReader, readers.DistReader):
    def slow(self, *arguments, fast=kind.read):
        time.sleep(0.02)
        fast(self, *arguments)
    kind.read = slow
main(sys.argv[1:])
"""


def kill_in_the_middle(direction: str, source: Path, out: Path, num_workers: int) -> int:
    """Start a conversion and kill its first process when some pieces are done; how many."""
    command = ["convert", direction, str(source), "--out", str(out), "--workers", str(num_workers)]
    process = subprocess.Popen([sys.executable, "-c", SLOW, *command], stderr=subprocess.DEVNULL)
    # Starting takes long on a machine that does other things too.
    wait_until(lambda: len(Journal(partial_dir(out)).done()) >= 5, "five pieces", timeout_s=180, process=process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return len(Journal(partial_dir(out)).done())


@pytest.mark.parametrize(
    ("direction", "num_workers"),
    [
        ("hf-to-mcore", 2),
        pytest.param("hf-to-mcore", 1, marks=pytest.mark.long),
        pytest.param("mcore-to-hf", 2, marks=pytest.mark.long),
    ],
)
def test_a_killed_conversion_continues(tmp_path: Path, source: Path, direction: str, num_workers: int) -> None:
    convert, out = CONVERT[direction], tmp_path / "out"
    whole = convert(source, settings(tmp_path / "whole"))
    assert whole is not None
    num_done = kill_in_the_middle(direction, source, out, num_workers)
    assert_no_result(out)
    assert 5 <= num_done < whole.num_pieces
    # What the journal says is done, but a crash of the machine lost.
    name, offset = place_of_piece(direction, source, min(Journal(partial_dir(out)).done()))
    with (partial_dir(out) / name).open("r+b") as file:
        file.seek(offset)
        file.write(b"lost")
    outcome = convert(source, settings(out, num_workers=num_workers))
    assert isinstance(outcome, ConversionOutcome)
    assert outcome.num_kept == num_done - 1
    assert file_bytes(out) == file_bytes(tmp_path / "whole")
    assert not partial_dir(out).exists()


def place_of_piece(direction: str, source: Path, number: int) -> tuple[str, int]:
    """Its file and where it starts there. The first one of a torch_dist checkpoint is at the start."""
    if direction == "hf-to-mcore":
        assert number == 0
        return "__0_0.distcp", 0
    opened = open_model(source)
    piece = plan_module.plan_hf(opened.reader.specs, opened.reader.specs, weight_map=opened.weight_map).pieces[number]
    return piece.file, piece.offset


@pytest.mark.parametrize("direction", ["hf-to-mcore"])
def test_killed_when_all_pieces_are_there_it_still_finishes(
    tmp_path: Path, source: Path, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While what belongs to the tensors is written, and after that: nothing is read again."""
    convert, out = CONVERT[direction], tmp_path / "out"
    whole = convert(source, settings(tmp_path / "whole"))
    assert whole is not None
    for step in ("_write_companions", "_check_written"):
        with monkeypatch.context() as patch:
            patch.setattr(commands, step, kill)
            with pytest.raises(KeyboardInterrupt):
                convert(source, settings(out))
        assert_no_result(out)
    outcome = convert(source, settings(out))
    assert outcome is not None
    assert (outcome.num_kept, outcome.num_bytes_read) == (whole.num_pieces, 0)
    assert file_bytes(out) == file_bytes(tmp_path / "whole")


def kill(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def fail_on_norms(reader: readers.SafetensorsReader, name: str, row: int, out: torch.Tensor) -> None:
    """In place of reading: all is well until the first norm."""
    if "norm" in name:
        raise OSError("a bad disk")


@pytest.mark.parametrize("direction", ["hf-to-mcore"])
def test_another_conversion_is_not_continued(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "dist"
    with monkeypatch.context() as patch:
        patch.setattr(readers.SafetensorsReader, "read", fail_on_norms)
        with pytest.raises(DataError, match="a bad disk"):
            hf_to_mcore(source, settings(out))
    assert len(Journal(partial_dir(out)).done()) > 5
    with pytest.raises(ConfigError, match=r"dist.partial: holds part of another conversion .* --overwrite"):
        hf_to_mcore(source, settings(out), dtype="bfloat16")
    os.utime(min(source.glob("*.safetensors")), (1, 1))
    with pytest.raises(ConfigError, match="another conversion"):
        hf_to_mcore(source, settings(out))
    (partial_dir(out) / "left").touch()
    outcome = hf_to_mcore(source, settings(out, overwrite=True))
    assert outcome is not None
    assert outcome.num_kept == 0
    assert not (out / "left").exists()


@pytest.mark.parametrize("direction", CONVERT)
def test_a_source_that_is_cut_under_way_is_no_result(
    tmp_path: Path, source: Path, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was whole when it was opened; a copy of it, put in its place, is another source."""
    convert, out = CONVERT[direction], tmp_path / "out"
    carry_out = commands.carry_out
    file = max(path for path in source.iterdir() if path.suffix in (".distcp", ".safetensors"))

    def cut(*arguments: Any) -> ConversionOutcome:
        os.truncate(file, file.stat().st_size // 2)
        return carry_out(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(commands, "carry_out", cut)
        with pytest.raises(
            DataError, match=rf"{file.name}: (ends at byte \d+|no tensor at byte).*; copy the checkpoint"
        ):
            convert(source, settings(out))
    assert_no_result(out)
    with pytest.raises((ConfigError, DataError), match=r"copy the (model|checkpoint) again"):
        convert(source, settings(out))
    assert_no_result(out)
