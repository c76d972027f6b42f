"""Markers, retention and the driver's state; the ranks' part is played by a fake that writes a file."""

import contextlib
import errno
import os
import shutil
import signal
import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import Config, from_dict
from megarl.config.schema import CheckpointConfig, RunConfig, role_settings
from megarl.errors import DataError, RunStopped, StorageError
from megarl.host.signals import StopRequest
from megarl.record import checkpoints
from megarl.record.checkpoints import (
    Checkpoint,
    CheckpointManager,
    RunState,
    checkpoint_dir,
    complete_steps,
    forget_after,
    last_checkpoint,
    mark_complete,
    read_checkpoint,
    remove_checkpoint,
)
from megarl.record.metrics import MARKER
from megarl.record.scores import steps_to_keep
from megarl.types import AlgoState
from megarl.types.messages import Role

# A third in binary has no short form: the file must keep every bit.
STATE = RunState(
    command="train",
    step=10,
    num_optimizer_steps=20,
    sampler={"dataset_size": 100, "num_batches": 10},
    algo=AlgoState(kl_coef=1 / 3),
    source={},
    score=2 / 3,
    config=Config(run=RunConfig(name="a", seed=7)),
)


@dataclass
class FakeRanks:
    """Writers that are done when the test says so."""

    is_written: bool = True
    waits: list[bool] = field(default_factory=list)
    portable: list[bool] = field(default_factory=list)

    def start_checkpoint(self, directory: Path, *, portable: bool) -> None:
        (directory / "rank").write_text("weights")
        self.portable.append(portable)

    def finish_checkpoint(self, *, wait: bool) -> bool:
        self.waits.append(wait)
        return wait or self.is_written


def write(root: Path, step: int, score: float | None = None) -> Path:
    """A complete checkpoint."""
    path = checkpoint_dir(root, step)
    path.mkdir(parents=True)
    (path / "state.json").write_text(replace(STATE, step=step, score=score).to_json())
    mark_complete(path)
    return path


def after_step(
    manager: CheckpointManager,
    step: int,
    *,
    total: int = 100,
    stop: StopRequest | None = None,
    score: float | None = None,
) -> None:
    state, stop = replace(STATE, step=step, score=score), stop or StopRequest()
    manager.after_step(step, total=total, stop=stop, state=lambda path: state, is_validated=score is not None)


def test_state_comes_back_as_it_was(tmp_path: Path) -> None:
    assert RunState.from_json(STATE.to_json()) == STATE


def test_roles_that_are_laid_out_as_before(tmp_path: Path) -> None:
    """A role without a layout of its own follows the actor's."""

    def saved(**sections: Any) -> Checkpoint:
        return Checkpoint(path=tmp_path, state=replace(STATE, config=from_dict(Config, sections)))

    tp2, dp2 = {"tp": 2}, {"dp": 2}
    shared = saved(actor={"layout": tp2})
    assert shared.same_layout(role_settings(from_dict(Config, {"actor": {"layout": tp2}}))) == set(Role)
    assert shared.same_layout(role_settings(from_dict(Config, {"actor": {"layout": dp2}}))) == set()
    moved = from_dict(Config, {"actor": {"layout": tp2}, "critic": {"layout": dp2}})
    assert shared.same_layout(role_settings(moved)) == {Role.ACTOR, Role.REFERENCE, Role.REWARD, Role.TEACHER}
    # The actor joins the critic, which stays.
    apart = saved(actor={"layout": tp2}, critic={"layout": dp2})
    assert apart.same_layout(role_settings(from_dict(Config, {"actor": {"layout": dp2}}))) == {Role.CRITIC}


def test_a_directory_without_the_marker_is_not_a_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 2)
    torn = write(tmp_path, 4)
    (torn / MARKER).unlink()
    assert complete_steps(tmp_path) == [2]
    last = last_checkpoint(tmp_path)
    assert last is not None
    assert (last.path, last.state.step) == (checkpoint_dir(tmp_path, 2), 2)
    with pytest.raises(DataError, match="step_000004: has no COMPLETE file, so its writing was interrupted"):
        read_checkpoint(torn)


@pytest.mark.parametrize(("always", "expected"), [(False, [False, False, True]), (True, [True, True, True])])
def test_checkpoints_are_portable_at_the_end_or_on_request(tmp_path: Path, always: bool, expected: list[bool]) -> None:
    """One that a signal asks for is not, since Slurm may give it little time."""
    ranks, stop = FakeRanks(), StopRequest()
    manager = CheckpointManager(tmp_path, CheckpointConfig(every_steps=2, keep_last=3, portable=always), ranks)  # type: ignore[arg-type]
    after_step(manager, 2, total=6)
    stop.signum = signal.SIGUSR1
    with pytest.raises(RunStopped):
        after_step(manager, 3, total=6, stop=stop)
    after_step(manager, 6, total=6)
    assert ranks.portable == expected
    assert [read_checkpoint(checkpoint_dir(tmp_path, step)).state.portable for step in (2, 3, 6)] == expected


def test_no_checkpoint(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "nothing") is None


def test_the_last_step_is_a_number_not_a_name(tmp_path: Path) -> None:
    for step in (999999, 1000000):
        write(tmp_path, step)
    last = last_checkpoint(tmp_path)
    assert last is not None
    assert last.state.step == 1000000


def test_an_unreadable_state_names_its_file(tmp_path: Path) -> None:
    path = checkpoint_dir(tmp_path, 2)
    path.mkdir()
    (path / "state.json").write_text('{"step": 2}')
    mark_complete(path)
    with pytest.raises(DataError, match=r"state\.json: cannot be read .* the version of megarl that wrote it"):
        read_checkpoint(path)


def test_the_marker_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the middle of a removal leaves no complete checkpoint."""
    path = write(tmp_path, 2)

    def die(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megarl.record.checkpoints.shutil.rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        remove_checkpoint(path)
    assert path.exists()
    assert complete_steps(tmp_path) == []


@pytest.mark.parametrize(
    ("scores", "keep_last", "keep_best", "kept"),
    [
        ({1: None, 2: None, 3: None}, 1, 0, {3}),
        ({1: None, 2: None, 3: None}, 2, 0, {2, 3}),
        ({1: None}, 5, 5, {1}),
        ({1: 0.1, 2: 0.9, 3: 0.5, 4: 0.2}, 1, 1, {2, 4}),
        ({1: 0.1, 2: 0.9, 3: 0.5, 4: 0.2}, 1, 2, {2, 3, 4}),
        # The best may be the last.
        ({1: 0.1, 2: 0.9}, 1, 1, {2}),
        # Without a score a checkpoint is never the best; of equals the earlier is kept.
        ({1: None, 2: -1.0, 3: None}, 1, 1, {2, 3}),
        ({1: 0.5, 2: 0.5, 3: 0.1}, 1, 1, {1, 3}),
    ],
)
def test_which_steps_are_kept(scores: dict[int, float | None], keep_last: int, keep_best: int, kept: set[int]) -> None:
    assert steps_to_keep(scores, keep_last=keep_last, keep_best=keep_best) == kept


def test_every_second_step_and_the_end(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, CheckpointConfig(every_steps=2, keep_last=9), FakeRanks())
    for step in range(1, 6):
        after_step(manager, step, total=5)
    assert complete_steps(tmp_path) == [2, 4, 5]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        # A step takes 4 minutes, and the ninth is the last one that was asked for.
        ({}, [8]),
        ({"every_minutes": 12}, [3, 6, 9]),
        ({"every_minutes": 12, "every_steps": 4}, [3, 4, 7, 8]),
        # Every second step has a validation.
        ({"every_minutes": 12, "keep_best": 1}, [4, 8]),
        ({"every_minutes": 0}, []),
    ],
)
def test_by_time(settings: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    now = 0.0
    config = CheckpointConfig(**{"keep_last": 9, **settings})
    manager = CheckpointManager(tmp_path / "c", config, FakeRanks(), clock=lambda: now)  # type: ignore[arg-type]
    for step in range(1, 10):
        now += 240
        after_step(manager, step, score=None if step % 2 else 0.5)
    after_step(manager, 10)
    assert [step for step in complete_steps(tmp_path / "c") if step < 10] == steps


def test_a_checkpoint_by_time_needs_room_and_a_signal_does_not_write_one_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    model = tmp_path / "model"
    model.mkdir()
    (model / "a.safetensors").write_bytes(bytes(1000))
    free, role = SimpleNamespace(free=6999), SimpleNamespace(trainable=True, model=SimpleNamespace(path=str(model)))
    ranks = FakeRanks()
    config = CheckpointConfig(every_minutes=1)
    manager = CheckpointManager(tmp_path / "c", config, ranks, [role], clock=lambda: now)  # type: ignore[arg-type]
    monkeypatch.setattr("megarl.record.checkpoints.shutil.disk_usage", lambda _: free)
    for now in (60.0, 120.0):
        after_step(manager, int(now))
    assert complete_steps(tmp_path / "c") == []
    assert capsys.readouterr().out.count("checkpoints by time wait for free space") == 1
    free.free = 7000
    after_step(manager, 2)
    with pytest.raises(RunStopped, match="after step 2 of 100"):
        after_step(manager, 2, stop=StopRequest(signum=signal.SIGUSR1))
    assert complete_steps(tmp_path / "c") == [2]
    assert len(ranks.portable) == 1


def test_zero_means_only_at_the_end(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, CheckpointConfig(), FakeRanks())
    for step in range(1, 4):
        after_step(manager, step, total=3)
    assert complete_steps(tmp_path) == [3]


def test_an_asynchronous_save_is_complete_only_when_it_is_written(tmp_path: Path) -> None:
    ranks = FakeRanks(is_written=False)
    manager = CheckpointManager(tmp_path, CheckpointConfig(every_steps=2), ranks)
    for step in (1, 2, 3):
        after_step(manager, step)
    assert complete_steps(tmp_path) == []
    assert not any(ranks.waits)
    # The next one waits for it; the fake writes at once when waited for.
    after_step(manager, 4)
    assert complete_steps(tmp_path) == [2]
    ranks.is_written = True
    after_step(manager, 5)
    assert complete_steps(tmp_path) == [2, 4]


def test_a_synchronous_save_waits(tmp_path: Path) -> None:
    ranks = FakeRanks(is_written=False)
    manager = CheckpointManager(tmp_path, CheckpointConfig(every_steps=1, async_save=False), ranks)
    after_step(manager, 1)
    assert complete_steps(tmp_path) == [1]


def test_old_and_torn_checkpoints_are_removed_once_a_new_one_is_complete(tmp_path: Path) -> None:
    write(tmp_path, 1, score=0.9)
    write(tmp_path, 2, score=0.1)
    torn = checkpoint_dir(tmp_path, 7)
    torn.mkdir()
    ranks = FakeRanks(is_written=False)
    manager = CheckpointManager(tmp_path, CheckpointConfig(every_steps=1, keep_last=1, keep_best=1), ranks)
    after_step(manager, 3, score=0.5)
    assert complete_steps(tmp_path) == [1, 2]
    ranks.is_written = True
    after_step(manager, 4, score=0.4)
    assert complete_steps(tmp_path) == [1, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000004"]


def test_a_torn_directory_of_the_same_step_is_written_anew(tmp_path: Path) -> None:
    torn = checkpoint_dir(tmp_path, 1)
    torn.mkdir()
    (torn / "old").touch()
    after_step(CheckpointManager(tmp_path, CheckpointConfig(every_steps=1), FakeRanks()), 1)
    assert sorted(path.name for path in torn.iterdir()) == ["COMPLETE", "rank", "state.json"]


def test_a_signal_stops_after_a_complete_checkpoint(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "checkpoints", CheckpointConfig(), FakeRanks(is_written=False))
    stop = StopRequest()
    after_step(manager, 1, stop=stop)
    stop.signum = signal.SIGTERM
    with pytest.raises(RunStopped, match=r"stopped by SIGTERM after step 2 of 100; pass --resume to continue"):
        after_step(manager, 2, stop=stop)
    assert complete_steps(tmp_path / "checkpoints") == [2]


def test_a_signal_during_a_save_is_for_the_next_step(tmp_path: Path) -> None:
    """Nothing would be complete yet."""
    stop = StopRequest()

    class SignalledRanks(FakeRanks):
        def start_checkpoint(self, directory: Path, *, portable: bool) -> None:
            super().start_checkpoint(directory, portable=portable)
            stop.signum = signal.SIGTERM

    manager = CheckpointManager(tmp_path, CheckpointConfig(every_steps=1), SignalledRanks(is_written=False))
    after_step(manager, 1, stop=stop)
    assert complete_steps(tmp_path) == []
    with pytest.raises(RunStopped):
        after_step(manager, 2, stop=stop)
    assert complete_steps(tmp_path) == [1, 2]


def test_a_signal_in_the_last_step_changes_nothing(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, CheckpointConfig(), FakeRanks())
    after_step(manager, 100, stop=StopRequest(signum=signal.SIGTERM))
    assert complete_steps(tmp_path) == [100]


def moved_away(path: Path, archive: Path) -> Path:
    """Move a checkpoint into an archive, and leave a link in its place."""
    archive.mkdir(exist_ok=True)
    path.rename(archive / path.name)
    path.symlink_to(archive / path.name)
    return archive / path.name


def test_what_was_moved_to_an_archive_stays_whole(tmp_path: Path) -> None:
    """Rotation, a resume before it, and the repetition of its step remove the link, and nothing behind it."""
    root = tmp_path / "checkpoints"
    rotated, later, repeated = (moved_away(write(root, step), tmp_path / "archive") for step in (1, 2, 3))
    unmounted = checkpoint_dir(root, 9)
    unmounted.symlink_to(tmp_path / "nowhere")
    forget_after(root, 1)
    assert complete_steps(root) == [1]
    checkpoint_dir(root, 3).symlink_to(repeated)
    manager = CheckpointManager(root, CheckpointConfig(every_steps=1, keep_last=1), FakeRanks())  # type: ignore[arg-type]
    manager.after_step(3, total=9, stop=StopRequest(), state=lambda _: STATE)
    manager.after_step(4, total=4, stop=StopRequest(), state=lambda _: STATE)
    assert complete_steps(root) == [4]
    assert unmounted.is_symlink()
    assert all((path / MARKER).is_file() for path in (rotated, later, repeated))


def rotate(root: Path, *steps: int) -> None:
    manager = CheckpointManager(root, CheckpointConfig(every_steps=1, keep_last=1), FakeRanks())  # type: ignore[arg-type]
    for step in steps:
        manager.after_step(step, total=99, stop=StopRequest(), state=lambda _: STATE)


REMOVING = ("unlink", "open", "scandir", "rmdir")


def meet_removal(monkeypatch: pytest.MonkeyPatch, calls: tuple[str, ...], refuse: Callable[[Any], None]) -> None:
    """Have `refuse` called before each of these calls that removes something of the checkpoint of step 1."""
    for name in calls:
        done = getattr(os, name)

        def called(path: Any, *given: Any, done: Any = done, **more: Any) -> Any:
            # Within a directory that is removed, paths are relative to a descriptor, or descriptors.
            if isinstance(path, int) or more.get("dir_fd") is not None or "step_000001" in str(path):
                refuse(path)
            return done(path, *given, **more)

        monkeypatch.setattr(os, name, called)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ENOTDIR, errno.EBUSY])
@pytest.mark.parametrize("call", REMOVING)
def test_a_removal_that_fails_ends_no_run_and_is_tried_again(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megarl.host.writing._warned", set())
    first = write(tmp_path, 1)

    def refuse(path: Any) -> None:
        raise OSError(code, os.strerror(code), str(path))

    with monkeypatch.context() as patch:
        meet_removal(patch, (call,), refuse)
        rotate(tmp_path, 2, 3)
    assert complete_steps(tmp_path)[-1] == 3
    # Both checkpoints tried it.
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"warning: {first} ")]
    assert told.startswith(f"warning: {first} cannot be removed, and the run goes on without: [Errno {code}]")
    rotate(tmp_path, 4, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]


def test_a_kill_at_any_moment_of_a_rotation_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for moment in range(100):
        root, met = tmp_path / str(moment), list[Any]()
        write(root, 1)

        def kill(path: Any, met: list[Any] = met, moment: int = moment) -> None:
            met.append(path)
            if len(met) > moment:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            meet_removal(patch, REMOVING, kill)
            with contextlib.suppress(KeyboardInterrupt):
                rotate(root, 2)
        last = last_checkpoint(root)
        assert last is not None
        assert last.path == checkpoint_dir(root, 2)
        rotate(root, 3, 4)
        assert [path.name for path in root.iterdir()] == ["step_000004"]
        if len(met) <= moment:
            # The marker, the directory, its list, its two files, and itself.
            assert moment >= 5
            return
    raise AssertionError("a rotation without an end")


def test_what_is_no_checkpoint_but_has_its_name_is_left_alone(tmp_path: Path) -> None:
    """Such as a user's file."""
    (tmp_path / "step_000001").write_text("mine")
    rotate(tmp_path, 2, 3)
    assert (tmp_path / "step_000001").read_text() == "mine"
    assert complete_steps(tmp_path) == [3]


@pytest.mark.parametrize(
    ("place", "call", "code"),
    [
        (os, "fsync", errno.EINVAL),
        (os, "fsync", errno.ENOTSUP),
        (shutil, "disk_usage", errno.ESTALE),
        (shutil, "disk_usage", errno.EACCES),
        (checkpoints, "complete_steps", errno.EACCES),
        (checkpoints, "torn_steps", errno.ESTALE),
    ],
)
def test_storage_that_cannot_tidy_up_or_tell_its_space_ends_no_run(
    place: Any, call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFS and some of FUSE cannot flush directories (fsync(2) has EINVAL for that); others fail for a moment."""
    done = getattr(place, call)

    def refuse(given: Any) -> Any:
        if call == "fsync" and not stat.S_ISDIR(os.fstat(given).st_mode):
            return done(given)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(place, call, refuse)
    now = [0.0]
    config = CheckpointConfig(every_minutes=1, keep_last=1)
    manager = CheckpointManager(tmp_path, config, FakeRanks(), clock=lambda: now[0])  # type: ignore[arg-type]
    for step in (1, 2):
        now[0] += 100
        after_step(manager, step, total=100)
    monkeypatch.undo()
    assert complete_steps(tmp_path)[-1] == 2


def test_files_that_cannot_be_flushed_are_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    manager = CheckpointManager(tmp_path, CheckpointConfig(every_steps=1), FakeRanks())  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="step_000001: Input/output error"):
        after_step(manager, 1, total=100)
    assert complete_steps(tmp_path) == []


@pytest.mark.parametrize("link", ["run", "run/checkpoints", "run/checkpoints/step_000004"])
def test_a_link_to_storage_that_is_away_is_no_reason_to_begin_anew(tmp_path: Path, link: str) -> None:
    root, place = tmp_path / "run" / "checkpoints", tmp_path / link
    write(root, 2)
    if place.exists():
        place.rename(tmp_path / "away")
    place.symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=rf"{place}: is a link to {tmp_path}/gone, which is not there; mount that"):
        last_checkpoint(root)
    # An older one may well be away.
    place.unlink()
    write(root, 6)
    checkpoint_dir(root, 5).symlink_to(tmp_path / "gone")
    last = last_checkpoint(root)
    assert last is not None
    assert last.state.step == 6


def test_a_validation_that_a_signal_put_off_counts_for_keep_best(tmp_path: Path) -> None:
    """Step 1 has its score only once the resumed run has validated it; what its marker lists is not touched."""
    ranks = FakeRanks()
    settings = CheckpointConfig(every_steps=1, keep_last=1, keep_best=1, async_save=False)
    after_step(CheckpointManager(tmp_path, settings, ranks), 1)
    assert read_checkpoint(checkpoint_dir(tmp_path, 1)).state.score is None
    resumed = CheckpointManager(tmp_path, settings, ranks)
    resumed.add_score(1, 0.5)
    for step in (2, 3):
        after_step(resumed, step, score=0.1 * step)
    assert complete_steps(tmp_path) == [1, 3]
    assert read_checkpoint(checkpoint_dir(tmp_path, 1)).state.score == 0.5


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [1, 4]),
        ({"validation": {"every_steps": 2}}, [1, 4]),
        ({"checkpoint": {"best_metric": "val/test_score_greedy"}}, [1, 3, 4]),
        ({"validation": {"temperature": 0.5}}, [1, 3, 4]),
    ],
)
def test_scores_of_different_measures_are_not_compared(
    tmp_path: Path, settings: dict[str, Any], kept: list[int]
) -> None:
    """Step 1 is the best of the first measure, step 3 of what the resumed run compares by."""
    keeping = CheckpointConfig(every_steps=1, keep_last=1, keep_best=1, async_save=False)
    manager = CheckpointManager(tmp_path, keeping, FakeRanks())
    for step, score in ((1, 0.9), (2, 0.1), (3, 0.5), (4, 0.2)):
        config = from_dict(Config, settings if step > 2 else {})
        state = replace(STATE, step=step, score=score, config=config)
        manager.after_step(step, total=100, stop=StopRequest(), state=lambda _, now=state: now, is_validated=True)
    assert complete_steps(tmp_path) == kept


def test_a_late_score_of_a_step_without_a_checkpoint_is_nothing(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, CheckpointConfig(), FakeRanks())
    manager.add_score(1, 0.5)
    assert list(tmp_path.iterdir()) == []
