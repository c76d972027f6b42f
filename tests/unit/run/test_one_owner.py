"""Whatever writes a directory owns it: a second command is refused before it reads, writes or starts anything."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from megarl.config import Config, from_dict
from megarl.convert.engine import ConvertSettings, carry_out
from megarl.errors import ConfigError, RunError
from megarl.host import directory_lock
from megarl.host.directory_lock import DirectoryLock, read_claims
from megarl.launch import job
from megarl.launch.command import JobCommand
from megarl.launch.status import Heartbeat, read_status
from megarl.record.checkpoints import CheckpointManager, complete_steps
from megarl.record.recorder import RunRecorder
from megarl.run import start
from megarl.run.evaluation import run as evaluations
from megarl.run.evaluation.inputs import EvalRequest
from megarl_lab.recipes import quickstart as quickstarts
from megarl_lab.study import queue
from tests.unit.record.test_checkpoints import FakeRanks, after_step


def config(root: Path) -> Config:
    return from_dict(Config, {"run": {"dir": str(root), "name": "a"}, "data": {"train": ["a.parquet"]}})


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def nothing_may_happen(*_: object, **__: object) -> NoReturn:
    pytest.fail("it went on although another process owns the directory")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with files, whose directory the test owns; whatever reads inputs or starts something fails it."""
    monkeypatch.setattr(start, "open_train_inputs", nothing_may_happen)
    monkeypatch.setattr(start, "open_task", nothing_may_happen)
    monkeypatch.setattr(evaluations, "open_eval_inputs", nothing_may_happen)
    monkeypatch.setattr(queue, "plan_study", nothing_may_happen)
    monkeypatch.setattr(quickstarts, "generate", nothing_may_happen)
    monkeypatch.setattr(job, "_attempt", nothing_may_happen)
    monkeypatch.setattr(job, "read_command", lambda *_: JobCommand(argv=(), directory=root, cluster=None))  # type: ignore[arg-type]
    monkeypatch.setattr(job.Allocation, "from_environment", lambda: Namespace(groups=[None], job_id=1))
    monkeypatch.setattr(quickstarts, "RUNS", tmp_path)
    root = tmp_path / "sums-seed0"
    (root / "checkpoints").mkdir(parents=True)
    (root / "metrics.jsonl").write_text("{}\n")
    return root


def in_run(root: Path) -> Config:
    return from_dict(Config, {"run": {"dir": str(root.parent), "name": root.name}})


COMMANDS: dict[str, Callable[[Path], object]] = {
    "train": lambda root: start.train(in_run(root)),
    "train --overwrite": lambda root: start.train(in_run(root), overwrite=True),
    "train --resume": lambda root: start.train(in_run(root), resume="newest"),
    "sft": lambda root: start.train_supervised("sft", in_run(root), overwrite=True),
    "train-reward": lambda root: start.train_supervised("train-reward", in_run(root), resume="newest-whole"),
    "train-preference": lambda root: start.train_supervised("train-preference", in_run(root)),
    "eval": lambda root: evaluations.evaluate(EvalRequest(model=root, data=(), out=root, overwrite=True)),
    "a study": lambda root: queue.run_study(queue.Study(base="", dir=str(root), runs=())),
    "quickstart": lambda root: quickstarts.quickstart(algo="grpo", task="sums", seed=0),
    "a Slurm job": lambda root: job.run_job([], Namespace(command="train"), max_restarts=3),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_second_command_is_refused_before_anything_happens(run: Path, command: str) -> None:
    with DirectoryLock(run, "sft"):
        before = contents(run)
        with pytest.raises(ConfigError, match=r"sums-seed0: is in use by megarl sft on .* wait until it has ended"):
            COMMANDS[command](run)
        assert contents(run).keys() == before.keys()


def test_overwriting_keeps_the_lock(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path / "a", "train") as lock:
        (tmp_path / "a" / "metrics.jsonl").write_text("")
        RunRecorder(config(tmp_path), lock=lock, overwrite=True)
        assert not (tmp_path / "a" / "metrics.jsonl").exists()
        lock.require()


def test_nothing_is_written_once_the_run_is_another_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thing that a driver writes, asked for after it was suspended and taken for dead."""
    monkeypatch.setattr(directory_lock, "BEAT_S", 1000.0)
    lock = DirectoryLock(tmp_path / "a", "train")
    lock.__enter__()
    recorder = RunRecorder(config(tmp_path), lock=lock)
    paths = recorder.paths
    log = recorder.metrics()
    manager = CheckpointManager(
        paths.checkpoints, config(tmp_path).checkpoint, FakeRanks(), require_owned=recorder.require_owned
    )  # type: ignore[arg-type]
    settings = replace(config(tmp_path).checkpoint, every_steps=1)
    asynchronous = CheckpointManager(
        paths.checkpoints, settings, FakeRanks(is_written=False), require_owned=recorder.require_owned
    )  # type: ignore[arg-type]
    after_step(asynchronous, 1)
    with Heartbeat(paths.status, "train", lambda: None, is_owned=lock.is_owned):
        read_claims(paths.lock)[0].file.unlink()
        before = contents(paths.root)
        for write in (
            lambda: log.log(1, {"x": 1.0}),
            lambda: recorder.timeline(1, [], {}),
            recorder.require_owned,
            lambda: recorder.owned(paths.validation)(1),
            lambda: after_step(manager, 100),
            lambda: after_step(asynchronous, 2),
        ):
            with pytest.raises(RunError, match="writes nothing more"):
                write()
    assert contents(paths.root) == before
    assert read_status(paths.root).state == "running"
    assert complete_steps(paths.checkpoints) == []


def test_a_second_conversion_is_refused(tmp_path: Path) -> None:
    settings = ConvertSettings(out=tmp_path / "out", num_workers=1, overwrite=True)
    with DirectoryLock(tmp_path / "out", "convert", place=tmp_path / "out.lock"):
        with pytest.raises(ConfigError, match="out: is in use by megarl convert on"):
            carry_out(None, None, (), settings, nothing_may_happen, "")  # type: ignore[arg-type]
        assert not (tmp_path / "out.partial").exists()
    assert list(tmp_path.iterdir()) == []
