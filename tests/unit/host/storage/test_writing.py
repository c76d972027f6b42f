"""A storage that refuses: what is said of it, and what is left of the files."""

import errno
import io
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import Config, LoggingConfig, RunConfig
from megarl.errors import RunError, StorageError
from megarl.host import writing as module
from megarl.host.exit_codes import EXIT_FAILED, exit_on_errors, outcome_of
from megarl.host.janitor import RunScope
from megarl.host.ray_environment import keep_worker_logs
from megarl.host.temp_dir import RAY_DIRECTORY, make_temp_dir
from megarl.host.writing import dispensable, replacing, writing
from megarl.launch.status import Heartbeat
from megarl.record.json_lines import append_lines, open_lines, read_lines
from megarl.record.metrics import JsonlSink, MetricsLogger, MetricsRecord, Stage, WarningsSink
from megarl.record.recorder import RunRecorder
from megarl.record.rollouts import RolloutRecord, write_rollouts
from megarl.record.trackers import TensorBoardSink
from megarl.rewards.llm.endpoint import AnswerCache
from megarl.run.start import _reported
from megarl.types import FinishReason, Prompt, Sample, prompt_segment
from megarl.types.judged import FinishedSample, Trouble

LIMIT = 4096


@pytest.fixture
def full() -> Iterator[None]:
    """Files may have 4096 bytes, the rest of a longer one is refused: a quota that is used up, but for its name."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(autouse=True)
def _no_warnings_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_warned", set())


def refuse(code: int) -> None:
    raise OSError(code, os.strerror(code))


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "No space left on device; .* MiB are free; free space there"),
        (errno.EDQUOT, "Disk quota exceeded; .*quota -s"),
        (errno.EROFS, "Read-only file system; .* MiB are free; mount it writable"),
        (errno.EIO, "Input/output error; .* MiB are free; look at the health of this storage"),
        (errno.EACCES, "Permission denied; .*; let this user write there"),
        (errno.ENAMETOOLONG, "File name too long; .*; choose a shorter run.name or run.dir"),
        (errno.EMFILE, "Too many open files; .*; raise the limit of open files"),
        (errno.ESTALE, "Stale file handle; .*; mount this network storage again"),
    ],
)
def test_every_refusal_has_path_room_and_remedy(tmp_path: Path, code: int, remedy: str) -> None:
    path = tmp_path / "none" / "yet" / "file"
    with pytest.raises(StorageError, match=f"^cannot write {path}: {remedy}"), writing(path):
        refuse(code)


def test_a_file_system_without_room_for_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.statvfs(tmp_path)
    fields = [*found]
    # f_files, f_ffree and f_favail: there are inodes, and none is left.
    fields[5:8] = [100, 0, 0]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    with pytest.raises(StorageError, match="no further file can be made: remove some"), writing(tmp_path / "x"):
        refuse(errno.ENOSPC)


@pytest.mark.usefixtures("full")
def test_torch_hides_the_refusal_in_its_own_error(tmp_path: Path) -> None:
    path = tmp_path / "states.pt"

    def save() -> None:
        with writing(path), path.open("wb") as stream:
            torch.save(torch.ones(10_000), stream)

    with pytest.raises(StorageError, match=rf"^cannot write {path}: File too large"):
        save()


def test_other_errors_pass(tmp_path: Path) -> None:
    for error in (RunError("as it is"), StorageError("as it is"), RuntimeError("as it is"), KeyError("as it is")):
        with pytest.raises(type(error), match="as it is"), writing(tmp_path / "x"):
            raise error


def test_a_failed_replacement_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def replace_half() -> None:
        with replacing(path) as partial:
            partial.write_text("half")
            refuse(errno.ENOSPC)

    with pytest.raises(StorageError):
        replace_half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
    with replacing(path) as partial:
        partial.write_text("new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.usefixtures("full")
def test_metrics_never_have_half_a_line(tmp_path: Path) -> None:
    """Also the next records find whole lines, and closing the file does not fail again and hide the cause."""
    path = tmp_path / "metrics.jsonl"
    written = []

    def log_until_full() -> None:
        with MetricsLogger([JsonlSink(path)]) as log:
            for step in range(1, 100):
                log.log(step, {f"metric/{i}": float(i) for i in range(30)})
                written.append(step)

    with pytest.raises(StorageError, match=rf"cannot write {path}: File too large"):
        log_until_full()
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == len(written) > 3
    assert all(line.endswith(b"\n") and json.loads(line) for line in lines)
    assert LIMIT - path.stat().st_size < len(lines[0])


@pytest.mark.usefixtures("full")
def test_several_lines_are_written_or_none(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    with open_lines(path) as file:
        append_lines(file, [{"a": 1}])
        with pytest.raises(StorageError):
            append_lines(file, ({"text": "x" * 100} for _ in range(100)))
        append_lines(file, [{"a": 2}])
    assert read_lines(path, dict, expected="an object") == [{"a": 1}, {"a": 2}]


@pytest.mark.usefixtures("full")
def test_samples_of_rollouts_are_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step_000001.parquet"
    text = "".join(chr(33 + i * i % 89) for i in range(20_000))
    row = RolloutRecord(
        step=1,
        uid="0",
        sample_index=0,
        data_source="x",
        prompt=text,
        response="",
        ground_truth="",
        reward=0.0,
        finish_reason="stop",
        num_prompt_tokens=1,
        num_response_tokens=1,
    )
    with pytest.raises(StorageError, match=r"cannot write .*step_000001\.parquet: "):
        write_rollouts(path, [row])
    assert os.listdir(path.parent) == []


def test_what_a_run_can_do_without_is_left_out_with_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        with dispensable("the report"):
            raise StorageError("cannot write report.html: No space left on device")
    said = capsys.readouterr().out
    assert said == (
        "warning: the report cannot be written, and the run goes on without: cannot write report.html: No space left "
        "on device\n"
    )


def test_the_status_never_hides_why_a_run_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beat = Heartbeat(tmp_path / "status.json", "train", lambda: None)

    def fail() -> None:
        with beat:
            monkeypatch.setattr(Path, "write_text", lambda *_, **__: refuse(errno.ENOSPC))
            raise RunError("the cause")

    with pytest.raises(RunError, match="the cause"):
        fail()
    assert os.listdir(tmp_path) == ["status.json"]
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"


def test_neither_do_logs_that_cannot_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make_temp_dir("0000abcd")
    logs = directory / RAY_DIRECTORY / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_text("x")
    (tmp_path / "file").touch()
    keep_worker_logs(RunScope(run_id="0000abcd"), tmp_path / "file" / "logs")
    shutil.rmtree(directory)
    assert "warning: the workers' logs cannot be written" in capsys.readouterr().out


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_writer_that_names_nothing_ends_in_one_line_too(capsys: pytest.CaptureFixture[str], code: int) -> None:
    with pytest.raises(SystemExit) as leaving, exit_on_errors():
        refuse(code)
    assert leaving.value.code == EXIT_FAILED
    said = capsys.readouterr().err
    assert said.startswith(f"error: {Path.cwd()}: {os.strerror(code)}; ")
    assert said.count("\n") == 1


def test_a_cache_on_a_full_storage_saves_nothing_and_ends_nothing(
    tmp_path: Path, full: None, capsys: pytest.CaptureFixture[str]
) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * LIMIT, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    path = tmp_path / "cache.sqlite"
    cache = AnswerCache(path)
    keys = [cache.key(number) for number in range(20)]
    for key in keys:
        cache.put(key, "x" * 1000)
    answers = [cache.get(key) for key in keys]
    assert answers[0] == "x" * 1000
    assert answers[-1] is None
    path.write_bytes(b"not a database" * 400)
    assert cache.get(keys[-1]) is None
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: the cache {path} cannot be used, and the run goes on without: ")


class Refusing:
    """A storage that refuses everything below a directory at one moment: as files are opened, written, closed or
    renamed.
    """

    def __init__(self, root: Path, moment: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root, self._moment, self._code = str(root), moment, code
        self.num_refused, open_file = 0, io.open

        class File(io.FileIO):
            def write(inner, data: Any) -> int:  # noqa: N805
                self.meet("write", inner.name)
                return super().write(data)

            def close(inner) -> None:  # noqa: N805
                was_open = not inner.closed
                super().close()
                if was_open:
                    self.meet("close", inner.name)

        def opened(path: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, *more: Any) -> Any:
            if not any(letter in mode for letter in "wax+") or not self._is_below(path):
                return open_file(path, mode, buffering, encoding, *more)
            self.meet("open", path)
            raw: Any = File(path, mode.replace("b", "").replace("t", ""))
            # The end of a file is read before more is added, and earlier tests of a process leave warnings to write.
            raw = raw if buffering == 0 else (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            return raw if "b" in mode else io.TextIOWrapper(raw, encoding)

        monkeypatch.setattr(io, "open", opened)
        monkeypatch.setattr("builtins.open", opened)
        for name in ("replace", "rename"):
            rename = getattr(os, name)
            monkeypatch.setattr(os, name, lambda a, b, rename=rename: (self.meet("rename", b), rename(a, b)))

    def _is_below(self, path: Any) -> bool:
        return not isinstance(path, int) and os.fsdecode(path).startswith(self._root)

    def meet(self, moment: str, path: Any) -> None:
        if moment == self._moment and self._is_below(path):
            self.num_refused += 1
            raise OSError(self._code, os.strerror(self._code), str(path))


def small_run(root: Path) -> RunRecorder:
    settings = replace(Config(), run=RunConfig(name="run", dir=str(root)), logging=LoggingConfig(tensorboard=False))
    return RunRecorder(settings)


def one_trouble() -> Trouble:
    prompt = Prompt(uid="0", token_ids=(1,), data_source="x", ground_truth="1")
    sample = Sample(uid="0", sample_index=0, seed=0, segments=(prompt_segment((1,)),), finish_reason=FinishReason.STOP)
    item = FinishedSample(prompt=prompt, sample=sample, prompt_text="", response="")
    return Trouble(item=item, outcome="unanswered", reason="")


def keep_a_status(run: RunRecorder) -> None:
    with Heartbeat(run.paths.status, "train", lambda: None):
        pass


def keep_warnings(run: RunRecorder) -> None:
    from megarl.record.metrics import warnings

    sink = WarningsSink(run.paths.warnings)
    warnings.append("once more")
    sink.write(MetricsRecord(step=1, time_s=1.0, metrics={"a": 1.0}))
    sink.close()


def keep_tensorboard(run: RunRecorder) -> None:
    sink = TensorBoardSink(run.paths.tensorboard)
    sink.write(MetricsRecord(step=1, time_s=1.0, metrics={"a": 1.0}))
    sink.close(outcome_of(None))


def keep_logs(run: RunRecorder) -> None:
    directory = make_temp_dir("0000abce")
    logs = directory / RAY_DIRECTORY / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_text("x")
    try:
        keep_worker_logs(RunScope(run_id="0000abce"), run.paths.logs)
    finally:
        shutil.rmtree(directory)


# What is only for the record, and the moments at which it meets a storage.
RECORDS: dict[str, tuple[Callable[[RunRecorder], object], tuple[str, ...]]] = {
    "status": (keep_a_status, ("open", "write", "close", "rename")),
    "timeline": (lambda run: run.timeline(1, [Stage("step", 0.0, 1.0)], {}), ("open", "write", "close")),
    "problems": (lambda run: run.problems(1, [one_trouble()]), ("open", "write", "close")),
    "warnings": (keep_warnings, ("open", "write", "close")),
    "TensorBoard": (keep_tensorboard, ("open", "write", "close")),
    "logs": (keep_logs, ("open", "close")),
    "report": (_reported, ("open", "write", "close", "rename")),
}
REFUSALS = (errno.ENOSPC, errno.EROFS, errno.EIO, errno.ENOTDIR)
FACED = [(name, moment, code) for name, (_, moments) in RECORDS.items() for moment in moments for code in REFUSALS]
# Each record meets each refusal and each moment at least once, together.
FACED_BY_DEFAULT = {
    ("status", "rename", errno.EIO),
    ("timeline", "close", errno.EIO),
    ("problems", "open", errno.ENOTDIR),
}
FACED_BY_DEFAULT |= {
    ("warnings", "close", errno.ENOSPC),
    ("TensorBoard", "open", errno.EROFS),
    ("logs", "open", errno.ENOSPC),
}
FACED_BY_DEFAULT |= {("report", "rename", errno.EROFS)}


@pytest.mark.parametrize(
    ("record", "moment", "code"),
    [
        pytest.param(
            *case, marks=[] if case in FACED_BY_DEFAULT else pytest.mark.long, id=f"{case[0]}-{case[1]}-{case[2]}"
        )
        for case in FACED
    ],
)
def test_what_is_only_for_the_record_ends_no_run(
    record: str,
    moment: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Disks that are full, read-only or broken, and directories in whose place a file is."""
    run = small_run(tmp_path)
    with run.metrics() as log:
        log.log(1, {"actor/loss": 0.5})
    capsys.readouterr()
    with monkeypatch.context() as faulty:
        storage = Refusing(run.paths.root, moment, code, faulty)
        RECORDS[record][0](run)
    assert storage.num_refused > 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(said) == 1
    assert os.strerror(code) in said[0]
    assert str(run.paths.root) in said[0]


@pytest.mark.parametrize("moment", ["open", "write", "close"])
@pytest.mark.parametrize("sink", [WarningsSink, TensorBoardSink])
def test_what_repeats_the_metrics_ends_nothing_and_is_written_again_later(
    sink: type[WarningsSink | TensorBoardSink], moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is met as the files are opened, written or closed."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    monkeypatch.setattr("megarl.record.metrics.warnings", told := ["first"])
    # pytest keeps output in a file.
    monkeypatch.setattr(sys, "stdout", io.StringIO())

    def fill(now: str) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if moment == now else most, most))

    place = tmp_path / "files"
    try:
        fill("open")
        opened = sink(place)
        fill("write")
        opened.write(MetricsRecord(step=1, time_s=1.0, metrics={"a": 1.0}))
        told.append("second")
        fill("none")
        opened.write(MetricsRecord(step=2, time_s=2.0, metrics={"a": 2.0}))
        fill("close")
        opened.close(outcome_of(None))
    finally:
        fill("none")
    if sink is WarningsSink:
        assert [line["text"] for line in read_lines(place, lambda raw: raw, expected="")] == ["first", "second"]
    else:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(place))
        read.Reload()
        # What a full disk has refused is in metrics.jsonl alone.
        assert [event.step for event in read.Scalars("a")] == ([2] if moment == "write" else [1, 2])


@pytest.mark.parametrize("is_run", [True, False])
def test_a_full_disk_under_its_log_ends_no_run_but_a_command_whose_output_it_is(is_run: bool) -> None:
    within = "losing_lines" if is_run else "contextlib.nullcontext"
    program = (
        "import contextlib\nfrom megarl.host.exit_codes import exit_on_errors\n"
        "from megarl.host.streams import losing_lines, print_lines\n"
        f"with exit_on_errors(), {within}():\n    for _ in range(9000): print_lines('a line')\n"
    )
    command = [sys.executable, "-c", program]
    with open("/dev/full", "w") as log:
        ended = subprocess.run(command, stdout=log, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode == 0, "No space left on device" in ended.stderr) == (is_run, not is_run)
