"""What a driver writes while it runs, and how that reads from elsewhere."""

import io
import json
import os
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from megarl.errors import DataError, RunStopped, WorkerError
from megarl.host.directory_lock import DirectoryLock, read_claims
from megarl.launch.status import FAILED, LOST_S, AttemptLog, Heartbeat, describe_status, read_status
from megarl.launch.watch import FollowedMetrics, watch_status
from megarl.record.metrics import RunPaths


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of 40 steps that has done three, two seconds each."""
    sections = {"trainer": 40, "sft": 7, "train_preference": 9, "train_reward": 11}
    texts = [f"{name}: {{total_steps: {steps}}}\n" for name, steps in sections.items()]
    (tmp_path / "config.yaml").write_text("".join(texts))
    lines = [
        {
            "step": step,
            "time_s": 100.0 + 2 * step,
            "metrics": {"perf/tokens_per_s": 9.0, "actor/lr": 0.1, "actor/loss": 1 / 3, "x": 1.0},
        }
        for step in (1, 2, 3)
    ]
    RunPaths(tmp_path).metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def heartbeat(root: Path) -> Heartbeat:
    return Heartbeat(RunPaths(root).status, "train", lambda: ("updating the actor", time.time() - 65))


def test_a_live_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.launch.status.BEAT_S", 0.02)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with heartbeat(root):
        time.sleep(0.2)
        seen = describe_status(root, now=time.time())
    assert seen["state"] == "running"
    assert seen["driver"].endswith(", job 17")
    assert seen["phase"] == "updating the actor, for 01:05"
    # 37 steps of two seconds are left.
    assert (seen["step"], seen["time left"], seen["loss"]) == ("3 of 40", "01:14", 0.3333)


def test_the_last_round_of_the_canary(root: Path) -> None:
    lines = [json.loads(line) for line in RunPaths(root).metrics.read_text().splitlines()]
    lines[0]["metrics"]["canary/max_abs_diff"] = 0.5
    lines[1]["metrics"]["canary/max_abs_diff"] = 3.00001e-6
    RunPaths(root).metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with heartbeat(root):
        assert describe_status(root, now=time.time())["canary, nats"] == 3e-6


def test_ends(root: Path) -> None:
    with heartbeat(root):
        pass
    assert describe_status(root, now=time.time())["state"] == "finished"
    with pytest.raises(RunStopped), heartbeat(root):
        raise RunStopped("stopped by SIGUSR1")
    assert read_status(root).state == "stopped"
    with pytest.raises(WorkerError), heartbeat(root):
        raise WorkerError("updating: trainer rank 1 (node2) died; see RUN/logs")
    seen = describe_status(root, now=time.time())
    assert (seen["state"], seen["error"]) == ("failed", "updating: trainer rank 1 (node2) died; see RUN/logs")
    assert "time left" not in seen


def test_a_driver_that_was_killed_is_lost(root: Path) -> None:
    beat = heartbeat(root)
    beat.__enter__()  # and never left
    seen = describe_status(root, now=read_status(root).written + LOST_S + 31)
    assert seen["state"] == "lost: no sign of life for 01:01"
    beat.__exit__(None, None, None)


def test_a_driver_of_this_host_that_was_killed_is_lost_at_once(root: Path) -> None:
    lock, beat = DirectoryLock(root, "train"), heartbeat(root)
    lock.__enter__()
    beat.__enter__()
    assert describe_status(root, now=time.time())["state"] == "running"
    (mine,) = read_claims(RunPaths(root).lock)
    content = mine.file.read_text()
    # As if this were the claim of a process that has ended.
    mine.file.write_text(content.replace(f'"pid": {os.getpid()}', f'"pid": {2**22 + 1}'))
    assert describe_status(root, now=time.time())["state"] == "lost: its process has ended"
    beat.__exit__(None, None, None)
    lock.__exit__(None, None, None)
    assert describe_status(root, now=time.time())["state"] == "finished"


def test_attempts_of_a_job(root: Path) -> None:
    with heartbeat(root):
        pass
    attempts = AttemptLog(RunPaths(root).logs / "slurm-12")
    attempts.add(1.0, 137, FAILED)
    attempts.add(2.0, 0, "finished")
    assert describe_status(root, now=time.time())["job 12"] == "2 attempt(s) ended: failed (137), finished (0)"
    assert attempts.num_failures() == 1


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no run \(there is no status.json\)"):
        read_status(tmp_path)


@pytest.mark.parametrize(
    ("command", "steps"), [("train", 40), ("sft", 7), ("train-preference", 9), ("train-reward", 11)]
)
def test_every_command_has_its_number_of_steps(root: Path, command: str, steps: int) -> None:
    with Heartbeat(RunPaths(root).status, command, lambda: None):
        pass
    assert describe_status(root, now=time.time())["step"] == f"3 of {steps}"


def test_a_run_is_watched_until_it_ends(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its curves are drawn; two different values are the lowest and the highest bar."""
    monkeypatch.setattr("megarl.launch.watch.REFRESH_S", 0.05)
    lines = RunPaths(root).metrics.read_text().splitlines()
    RunPaths(root).metrics.write_text("\n".join([*lines, lines[-1].replace("9.0", "18.0")]) + "\n")
    screen = io.StringIO()
    with heartbeat(root):
        watching = threading.Thread(target=watch_status, args=(root, Console(file=screen, width=120)))
        watching.start()
        time.sleep(0.3)
        assert watching.is_alive()
    watching.join(timeout=10)
    last = screen.getvalue()
    assert "finished" in last
    assert any(line.startswith("tokens/s") and "▁▁▁█" in line for line in last.splitlines())


def test_no_time_is_left_for_a_clock_that_was_set_back(root: Path) -> None:
    path = RunPaths(root).metrics
    steps = [{"step": step, "time_s": 1000.0 - step, "metrics": {"perf/tokens_per_s": 1.0}} for step in (1, 2)]
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    with heartbeat(root):
        assert "time left" not in describe_status(root, now=time.time())


def test_watching_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is not complete is read when it is; a file that was replaced is read from its start."""
    monkeypatch.setattr("megarl.launch.watch.CHUNK_BYTES", 64)
    path, key = tmp_path / "metrics.jsonl", "canary/max_abs_diff"
    lines = [json.dumps({"step": i, "time_s": 0.0, "metrics": {key: float(i), "other": 1.0}}) + "\n" for i in range(6)]
    followed = FollowedMetrics(path)
    followed.read()
    path.write_text("".join(lines[:3]) + lines[3][:20])
    followed.read()
    assert followed.curves.keys() == {key}
    assert followed.curves[key].values == [0.0, 1.0, 2.0]
    with path.open("r+b") as file:
        # What was read before is not read again.
        file.write(b"x" * 40)
        file.seek(0, os.SEEK_END)
        file.write((lines[3][20:] + lines[4]).encode())
    followed.read()
    assert followed.curves[key].values == [0.0, 1.0, 2.0, 3.0, 4.0]
    (tmp_path / "cut").write_text(lines[5])
    os.replace(tmp_path / "cut", path)
    followed.read()
    assert followed.curves[key].values == [5.0]


@pytest.mark.parametrize("damaged", [b'{"step": 1, "time_s": 0.0, "metrics": {"\xff": 1.0}}', b"{"])
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "time_s": 0.0, "metrics": {"a": 1.0}}\n' + damaged + b"\n")
    with pytest.raises(DataError, match=r"metrics.jsonl line 2: got"):
        FollowedMetrics(path).read()
