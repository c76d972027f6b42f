"""What is noticed of a damaged checkpoint before anything starts, and how a run goes on from an earlier one."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from megarl.errors import ConfigError, DataError
from megarl.host.directory_lock import DirectoryLock
from megarl.record import manifest
from megarl.record.checkpoints import (
    CheckpointManager,
    checkpoint_dir,
    complete_steps,
    last_checkpoint,
    mark_complete,
    read_checkpoint,
    torn_steps,
)
from megarl.record.inputs import RunInputs
from megarl.record.manifest import Manifest, damage_of
from megarl.record.metrics import MARKER, JsonlSink, MetricsRecord, RunPaths, read_metrics
from megarl.run import start
from megarl.run.resume import find_checkpoint, resume_notes
from tests.unit.record.test_checkpoints import FakeRanks, after_step
from tests.unit.run.test_resume import config, save

SHARD = "actor/__0_0.distcp"


def add_shards(path: Path) -> Path:
    """Make a checkpoint complete, with files like those of ranks."""
    (path / MARKER).unlink(missing_ok=True)
    (path / "actor").mkdir(parents=True)
    (path / SHARD).write_bytes(bytes(range(1, 251)) * 16)
    (path / "actor/.metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata={}, storage_data={})))
    (path / "actor/metadata.json").write_bytes(b"actor/metadata.json")
    torch.save({}, path / "rng_actor_00000.pt")
    mark_complete(path)
    return path


def write(run: Path, step: int) -> Path:
    return add_shards(save(config(run), step=step))


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def fill_with_zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def make_a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def remove_half(file: Path) -> None:
    shutil.rmtree(file.parent)


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    (SHARD, truncate, "got 2000 bytes, expected 4000"),
    (SHARD, Path.unlink, "is missing"),
    (SHARD, fill_with_zeros, "its bytes are not those that were written"),
    (SHARD, flip_a_bit, "its bytes are not those that were written"),
    (SHARD, remove_half, "is missing"),
    ("actor/.metadata", empty, "got 0 bytes, expected "),
    ("actor/metadata.json", truncate, "got 9 bytes, expected 19"),
    ("rng_actor_00000.pt", fill_with_zeros, "its bytes are not those that were written"),
    ("state.json", truncate, "bytes, expected"),
    ("state.json", Path.unlink, "is missing"),
    (MARKER, truncate, "is not what megarl wrote"),
    (MARKER, fill_with_zeros, "is not what megarl wrote"),
    (MARKER, make_a_directory, "Is a directory"),
]


@pytest.mark.parametrize(("name", "spoil", "said"), DAMAGES, ids=[f"{n} {d.__name__}" for n, d, _ in DAMAGES])
def test_damage_is_named_with_what_is_whole_and_how_to_go_on(
    tmp_path: Path, name: str, spoil: Callable[[Path], None], said: str
) -> None:
    """Plain --resume never goes back by itself; the command that may was told to."""
    older, newest = write(tmp_path, 4), write(tmp_path, 6)
    assert damage_of(newest) is None
    spoil(newest / name)
    with pytest.raises(DataError) as caught:
        find_checkpoint(config(tmp_path), "train")
    message = str(caught.value)
    assert message.startswith(f"{newest}: is damaged: ")
    assert f"{name}: " in message
    assert said in message
    assert "step_000004 is whole: put a copy of step_000006 back, or continue after step_000004 with " in message
    assert "--resume=newest-whole, which drops what the run wrote later" in message
    assert "\n" not in message
    assert complete_steps(newest.parent) == [4, 6]

    found = find_checkpoint(config(tmp_path), "train", "newest-whole")
    assert found is not None
    assert (found.path, found.state.step) == (older, 4)


def test_several_damaged_files_and_several_damaged_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write(tmp_path, step) for step in (2, 4, 6)]
    for file in [file for path in paths[1:] for file in path.rglob("*") if file.is_file() and file.name != MARKER]:
        file.unlink()
    with pytest.raises(DataError, match=r"6: is damaged: .*; and 2 more files; step_000002 is whole"):
        last_checkpoint(paths[0].parent)
    found = last_checkpoint(paths[0].parent, "newest-whole")
    assert found is not None
    assert found.path == paths[0]
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(", and not used: ")[0] for line in told] == [f"{p}: is damaged" for p in paths[:0:-1]]


@pytest.mark.parametrize("resume", ["newest", "newest-whole"])
def test_without_a_whole_one_a_run_does_not_start_anew_by_itself(tmp_path: Path, resume: str) -> None:
    path = write(tmp_path, 4)
    (path / SHARD).unlink()
    with pytest.raises(
        DataError, match="no other checkpoint of this run is whole: put a copy of step_000004 back, or start"
    ):
        find_checkpoint(config(tmp_path), "train", resume)  # type: ignore[arg-type]


def test_a_whole_one_that_does_not_fit_the_settings_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, 4)
    (write(tmp_path, 6) / SHARD).unlink()
    with pytest.raises(ConfigError, match=r"step_000004: cannot be continued with other settings: run\.seed"):
        find_checkpoint(config(tmp_path, run={"seed": 1}), "train", "newest-whole")
    assert complete_steps(RunPaths(tmp_path / "a").checkpoints) == [4, 6]


def test_what_came_after_the_whole_one_is_forgotten_and_written_anew(tmp_path: Path) -> None:
    """A run that is killed before its next checkpoint resumes plainly; the damaged one goes with the next complete."""
    older, newest = write(tmp_path, 4), write(tmp_path, 6)
    (newest / SHARD).unlink()
    paths = RunPaths(tmp_path / "a")
    sink = JsonlSink(paths.metrics)
    for step in range(1, 8):
        sink.write(MetricsRecord(step=step, time_s=step, metrics={"x": 1.0}))
    sink.close()
    for directory in ("rollouts", "records", "validation"):
        (paths.root / directory).mkdir()
        for step in (2, 4, 6):
            (paths.root / directory / f"step_{step:06d}.parquet").touch()
    found = find_checkpoint(config(tmp_path), "train", "newest-whole")
    with (
        DirectoryLock(paths.root, "train") as lock,
        start.recorded(config(tmp_path), lock, found, RunInputs({}), overwrite=True, resumes=True),
    ):
        pass
    assert [record.step for record in read_metrics(paths.metrics)] == [1, 2, 3, 4]
    for directory in ("rollouts", "records", "validation"):
        names = sorted(path.name for path in (paths.root / directory).iterdir())
        assert names == ["step_000002.parquet", "step_000004.parquet"]
    plainly = find_checkpoint(config(tmp_path), "train")
    assert plainly is not None
    assert plainly.path == older
    assert resume_notes(plainly, config(tmp_path), RunInputs({}))[1] == f"{newest}: was not completed, and is not used"
    manager = CheckpointManager(
        paths.checkpoints, config(tmp_path, checkpoint={"every_steps": 1}).checkpoint, FakeRanks()
    )  # type: ignore[arg-type]
    after_step(manager, 5)
    assert not newest.exists()
    after_step(manager, 6)
    assert damage_of(newest) is None


def test_a_damaged_older_checkpoint_does_not_end_a_run(tmp_path: Path) -> None:
    """The newest is whole: the run continues, and keeps or removes the older one as it would have."""
    settings = config(tmp_path, checkpoint={"every_steps": 1, "keep_last": 2, "keep_best": 1})
    paths = [write(tmp_path, step) for step in (1, 2)]
    (paths[0] / "state.json").write_text('{"st')
    (paths[1] / "state.json").unlink()
    manager = CheckpointManager(paths[0].parent, settings.checkpoint, FakeRanks())  # type: ignore[arg-type]
    after_step(manager, 3, score=1.0)
    assert complete_steps(paths[0].parent) == [2, 3]


def test_copies_made_by_hand_are_no_checkpoints_and_stay(tmp_path: Path) -> None:
    path = write(tmp_path, 4)
    shutil.copytree(path, path.with_name("step_000004.bak"))
    shutil.copytree(path, path.with_name("step_last"))
    # Without a marker, and of the number of another: nothing of it may be removed, nor of the other.
    (path.parent / "step_4").mkdir()
    assert torn_steps(path.parent) == []
    (path.parent / "step_4").rmdir()
    assert complete_steps(path.parent) == [4]
    settings = config(tmp_path, checkpoint={"keep_last": 1}).checkpoint
    after_step(CheckpointManager(path.parent, settings, FakeRanks()), 100)  # type: ignore[arg-type]
    assert sorted(each.name for each in path.parent.iterdir()) == ["step_000004.bak", "step_000100", "step_last"]


def test_an_evaluation_and_a_conversion_are_told_too(tmp_path: Path) -> None:
    path = write(tmp_path, 4)
    truncate(path / SHARD)
    with pytest.raises(DataError, match=r"step_000004: is damaged: actor/__0_0\.distcp: .*; use another checkpoint"):
        read_checkpoint(path)


def test_markers_of_earlier_versions_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor do those that a user has made; that is told."""
    path = write(tmp_path, 4)
    assert last_checkpoint(path.parent) is not None
    assert capsys.readouterr().out == ""
    (path / MARKER).write_text("")
    assert damage_of(path) is None
    found = last_checkpoint(path.parent)
    assert found is not None
    assert found.state.step == 4
    assert capsys.readouterr().out.startswith(
        f"warning: {path / MARKER}: is empty, so nothing tells whether files are "
    )


def test_of_large_files_the_ends_and_blocks_between_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four blocks of 64 KiB of a file of 1 MiB: from its start, a third, two thirds, and to its end."""
    monkeypatch.setattr(manifest, "_TOTAL_BYTES", 0)
    monkeypatch.setattr(manifest, "_FILE_BYTES", 256 << 10)
    file = tmp_path / "shard"
    file.write_bytes(b"\1" * (1 << 20))
    (tmp_path / MARKER).write_text(Manifest.of(tmp_path).to_json())
    for offset, noticed in ((0, True), (327680, True), (100_000, False), ((1 << 20) - 1, True)):
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(b"\0")
            stream.flush()
            assert (damage_of(tmp_path) is not None) == noticed
            stream.seek(offset)
            stream.write(b"\1")
    # A hole from somewhere to the end, as a loss of power leaves it.
    os.truncate(file, 900_000)
    os.truncate(file, 1 << 20)
    assert damage_of(tmp_path) == "shard: its bytes are not those that were written"


def test_a_finished_run_records_what_its_checkpoint_consists_of(tmp_path: Path) -> None:
    after_step(CheckpointManager(tmp_path, config(tmp_path).checkpoint, FakeRanks()), 100)  # type: ignore[arg-type]
    path = checkpoint_dir(tmp_path, 100)
    assert set(Manifest.of(path).files) == {"rank", "state.json"}
    assert Manifest.of(path).files["rank"][0] == len("weights")
    (path / "rank").write_text("weighty")
    assert damage_of(path) == "rank: its bytes are not those that were written"
