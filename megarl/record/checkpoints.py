"""Write, read and remove a run's checkpoints: RUN/checkpoints/step_000010, complete once the file COMPLETE is there.

The ranks write models, optimizers and RNG states (`parallel.checkpoint`). The driver adds its own state, flushes all
files to disk, and writes the marker COMPLETE last, which lists the files (`train.manifest`). A directory without the
marker is never read, and removed later. RUN must lie on storage that all hosts of the run share.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeAlias

from megarl.config.load import masked_settings, saved_config
from megarl.config.schema import ActorConfig, CheckpointConfig, Config, role_settings
from megarl.errors import DataError, RunStopped
from megarl.host.signals import StopRequest
from megarl.host.streams import print_lines
from megarl.host.writing import dispensable, free_bytes, fsync, replacing, writing
from megarl.record.manifest import Manifest, damage_of
from megarl.record.metrics import MARKER, STATE_FILE
from megarl.record.scores import LATE_SCORE, score_of, superfluous
from megarl.types import AlgoState, EntropyState
from megarl.types.messages import Role, RoleSpec

# Weights of 2 bytes per parameter, and 12 of the optimizer.
_CHECKPOINT_TO_MODEL = 7

# The commands that write checkpoints, and a user's own loop.
Command: TypeAlias = Literal["train", "sft", "train-reward", "train-preference", "session"]
# Where a run continues: after its last complete checkpoint, which must be whole, or after the last one that is whole.
Resume: TypeAlias = Literal["newest", "newest-whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The driver's state in a checkpoint: all that the driver needs to continue after `step`.

    score: the validation score of this step, if it has one. num_optimizer_steps: steps taken by the actor.
    num_critic_steps: steps taken by the critic. gate_passed: whether engine and trainer were compared before the first
    update. portable: whether optimizer states can be read under any layout. inputs: the files that the run computes
    from, as `megarl.record.inputs` recognises them.
    """

    command: Command
    step: int
    num_optimizer_steps: int
    num_critic_steps: int = 0
    gate_passed: bool = True
    sampler: Mapping[str, Any]
    algo: AlgoState
    source: Mapping[str, object]
    score: float | None
    config: Config
    portable: bool = True
    inputs: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "config": masked_settings(self.config)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        raw = json.loads(text)
        algo = AlgoState(kl_coef=raw["algo"]["kl_coef"], entropy=EntropyState(**raw["algo"]["entropy"]))
        return cls(**raw | {"algo": algo, "config": saved_config(raw["config"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint: its directory, and the driver's state in it."""

    path: Path
    state: RunState

    def same_layout(self, now: Mapping[str, ActorConfig]) -> frozenset[Role]:
        """Return the roles that have the checkpoint's layout now, so that ranks hold the same shards.

        now: what `role_settings` returns.
        """
        before = role_settings(self.state.config)
        return frozenset(role for role in Role if before[role].layout.division == now[role].layout.division)


def checkpoint_dir(root: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint under `root`, which is RUN/checkpoints."""
    return root / f"step_{step:06d}"


def complete_steps(root: Path) -> list[int]:
    """List the steps that have a complete checkpoint, in ascending order."""
    return sorted(step for step, path in _step_dirs(root) if (path / MARKER).exists())


def torn_steps(root: Path) -> list[int]:
    """List the steps whose checkpoint was never completed, or has been removed in part, in ascending order.

    Links do not count: their targets may be on storage that is not mounted now.
    """
    return sorted(step for step, path in _step_dirs(root) if not path.is_symlink() and not (path / MARKER).exists())


def _step_dirs(root: Path) -> list[tuple[int, Path]]:
    """List the directories of checkpoints; other names, such as those of copies made by hand, do not count."""
    names = ((path.name.removeprefix("step_"), path) for path in root.glob("step_*"))
    found = [(int(number), path) for number, path in names if number.isdecimal()]
    return [(step, path) for step, path in found if path == checkpoint_dir(root, step)]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a complete checkpoint. Nothing in it can run code, here or in the ranks that load it.

    Raises DataError if it is incomplete or damaged, holds more than data, or another version of megarl wrote it.
    """
    if not (path / MARKER).is_file():
        raise DataError(f"{path}: has no {MARKER} file, so its writing was interrupted; use another checkpoint")
    if damage := damage_of(path):
        raise DataError(f"{path}: is damaged: {damage}; use another checkpoint, or put a copy of it back")
    from megarl.weights.dist_index import require_plain_data  # with torch, which lists of checkpoints do without

    require_plain_data(path)
    try:
        state = RunState.from_json((path / STATE_FILE).read_text(encoding="utf-8"))
        return Checkpoint(path=path, state=replace(state, score=score_of(path)))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path / STATE_FILE}: cannot be read ({error}); continue with the version of megarl that wrote it"
        ) from error


def last_checkpoint(root: Path, resume: Resume = "newest") -> Checkpoint | None:
    """Read the last complete checkpoint under RUN/checkpoints; return None if there is none.

    Raises:
        DataError: it is damaged, or a link that leads nowhere; the message says how to go on. With newest-whole: so are
            all others.
    """
    damaged: dict[Path, str] = {}
    whole: Path | None = None
    steps = complete_steps(root)
    # Steps on storage that is away for now must not be done again.
    for path in (root.parent, root, *(path for step, path in _step_dirs(root) if not steps or step > steps[-1])):
        if path.is_symlink() and not path.exists():
            raise DataError(
                f"{path}: is a link to {path.readlink()}, which is not there; mount that storage, or remove the link "
                "to continue without"
            )
    for path in (checkpoint_dir(root, step) for step in reversed(steps)):
        if (damage := damage_of(path)) is None:
            whole = path
            break
        damaged[path] = damage
    if damaged and (whole is None or resume == "newest"):
        newest, damage = next(iter(damaged.items()))
        other = "no other checkpoint of this run is whole" if whole is None else f"{whole.name} is whole"
        remedy = (
            "start anew with --overwrite"
            if whole is None
            else f"continue after {whole.name} with --resume=newest-whole, which drops what the run wrote later"
        )
        raise DataError(f"{newest}: is damaged: {damage}; {other}: put a copy of {newest.name} back, or {remedy}")
    print_lines(*(f"{path}: is damaged, and not used: {damage}" for path, damage in damaged.items()))
    if whole is not None and not (whole / MARKER).stat().st_size:
        print_lines(f"warning: {whole / MARKER}: is empty, so nothing tells whether files are damaged; copy it anew")
    return None if whole is None else read_checkpoint(whole)


def forget_after(root: Path, step: int) -> None:
    """Make the checkpoints after a step, which a run is to continue from, incomplete; the run removes them later.

    Only the link is removed to one that lies elsewhere.
    """
    for later in (checkpoint_dir(root, each) for each in complete_steps(root) if each > step):
        (later if later.is_symlink() else later / MARKER).unlink()


class SavedWorkers(Protocol):
    """The ranks as a checkpoint needs them; see `cluster.workers.RoleWorkers`."""

    def start_checkpoint(self, directory: Path, *, portable: bool) -> None: ...

    def finish_checkpoint(self, *, wait: bool) -> bool: ...


class CheckpointManager:
    """A writer of a run's checkpoints, one at a time; it removes those that the configuration does not keep.

    roles: those of the run; the size of the first checkpoint is estimated from the files of trained models.
    require_owned: called before anything is written; raises an error if the run is no longer that of this process.
    clock: returns seconds from any start.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        workers: SavedWorkers,
        roles: Sequence[RoleSpec] = (),
        require_owned: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._config, self._workers, self._require_owned = root, config, workers, require_owned
        self._writing: Path | None = None
        self._is_short = False
        self._clock, self._last_s = clock, clock()
        trained = (Path(role.model.path) for role in roles if role.trainable)
        files = (file for model in trained for file in model.glob("*.safetensors"))
        self._num_bytes = _CHECKPOINT_TO_MODEL * sum(file.stat().st_size for file in files)

    def after_step(
        self,
        step: int,
        *,
        total: int,
        stop: StopRequest,
        state: Callable[[Path], RunState],
        is_validated: bool = False,
    ) -> None:
        """Finish the checkpoint that is being written if all ranks are done, and start a new one if it is due.

        state: returns the driver's state; it may write further files to the checkpoint's directory. is_validated:
        whether it has a score.

        Raises:
            RunStopped: a signal asked for it, and the checkpoint of this step is complete.
        """
        # Read the signal once: one that arrives later is handled after the next step.
        signum, every = stop.signum, self._config.every_steps
        self._finish(wait=signum is not None)
        last = step == total or signum is not None
        due = last or (every and step % every == 0) or self._is_due_by_time(is_validated=is_validated)
        # A signal within the next step finds it complete.
        if due and not (checkpoint_dir(self._root, step) / MARKER).exists():
            self._start(step, state, portable=self._config.portable or step == total)
            self._finish(wait=last or not self._config.async_save)
        if signum is not None and step < total:
            run = self._root.parent
            raise RunStopped(
                f"{run}: stopped by {signum.name} after step {step} of {total}; "
                f"pass --resume to continue (its settings are in {run / 'config.yaml'})"
            )

    def add_score(self, step: int, score: float | None) -> None:
        """Keep the score of a step whose checkpoint was complete before its validation, which a signal had put off."""
        path = checkpoint_dir(self._root, step)
        if score is not None and (path / MARKER).exists():
            with dispensable(str(path / LATE_SCORE)), replacing(path / LATE_SCORE) as file:
                file.write_text(json.dumps({"score": score}), encoding="utf-8")

    def _is_due_by_time(self, *, is_validated: bool) -> bool:
        every_s = 60 * self._config.every_minutes
        if not every_s or self._clock() - self._last_s < every_s or (self._config.keep_best and not is_validated):
            return False
        free = free_bytes(self._root)
        if free < self._num_bytes and not self._is_short:
            self._is_short = True
            print_lines(
                f"warning: {self._root}: checkpoints by time wait for free space: one takes about "
                f"{self._num_bytes / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB are free; free space there"
            )
        return free >= self._num_bytes

    def _start(self, step: int, state: Callable[[Path], RunState], *, portable: bool) -> None:
        self._finish(wait=True)
        self._require_owned()
        path = checkpoint_dir(self._root, step)
        # A run that was killed, or met a full disk, left these: this one needs the space.
        with self._tidying():
            for begun in (checkpoint_dir(self._root, each) for each in torn_steps(self._root) if each != step):
                _tidy_up(begun)
        with writing(path):
            remove_checkpoint(path)
            path.mkdir(parents=True)
            (path / STATE_FILE).write_text(replace(state(path), portable=portable).to_json(), encoding="utf-8")
        self._workers.start_checkpoint(path, portable=portable)
        self._writing, self._last_s = path, self._clock()

    def _finish(self, *, wait: bool) -> None:
        if self._writing is None or not self._workers.finish_checkpoint(wait=wait):
            return
        self._require_owned()
        with writing(self._writing):
            mark_complete(self._writing)
        written, self._writing = self._writing, None
        with self._tidying():
            self._num_bytes = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
            complete = {step: checkpoint_dir(self._root, step) for step in complete_steps(self._root)}
            for path in superfluous(complete, keep_last=self._config.keep_last, keep_best=self._config.keep_best):
                _tidy_up(path)
        if (free := free_bytes(self._root)) < self._num_bytes:
            print_lines(
                f"warning: {self._root}: a checkpoint takes {self._num_bytes / 2**20:,.0f} MiB, and "
                f"{free / 2**20:,.0f} MiB are free: the next one will not fit; free space there before it is due, or "
                "lower checkpoint.keep_last and checkpoint.keep_best",
            )

    def _tidying(self) -> AbstractContextManager[None]:
        """Return a context in which the storage may refuse: the run goes on with its checkpoints as they are."""
        return dispensable(f"{self._root}: what is no longer needed", done="removed")


def _tidy_up(path: Path) -> None:
    """Remove a checkpoint that is not needed; if that fails, the next checkpoint tries it again."""
    with dispensable(str(path), done="removed"):
        remove_checkpoint(path)


def mark_complete(path: Path) -> None:
    """Make everything under `path` durable, then write the marker file that makes the checkpoint complete."""
    for file in [*path.rglob("*"), path]:
        fsync(file)
    partial = path / f"{MARKER}.partial"
    partial.write_text(Manifest.of(path).to_json(), encoding="utf-8")
    fsync(partial)
    partial.replace(path / MARKER)
    fsync(path)
    fsync(path.parent)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, its marker first, so that an interrupted removal leaves nothing that looks complete; of one
    that lies elsewhere, remove the link alone.
    """
    if path.is_symlink():
        path.unlink()
        return
    (path / MARKER).unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)
