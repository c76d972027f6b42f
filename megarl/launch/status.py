"""Report what a run is doing: the driver keeps RUN/status.json, and `megarl status` reads it from elsewhere.

The failures of a job are in a file beside its logs, which outlives the process and survives requeueing.
"""

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from tqdm import tqdm

from megarl.errors import DataError
from megarl.host.directory_lock import BEAT_S, LOST_S, has_died
from megarl.host.exit_codes import EXIT_STOPPED, outcome_of
from megarl.host.reading import reading
from megarl.host.streams import print_lines
from megarl.host.writing import dispensable, replacing
from megarl.record.json_lines import append_lines, open_lines, read_lines
from megarl.record.metrics import RunPaths, last_metrics

# Steps whose mean duration predicts the rest.
ETA_STEPS = 10
SHOWN_METRICS = {
    "reward": "critic/rule_score/mean",
    "loss": "actor/loss",
    "gradient norm": "actor/grad_norm",
    "tokens/s": "perf/tokens_per_s",
    "canary, nats": "canary/max_abs_diff",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a run as its driver last wrote it.

    state: running, finished, stopped (by a signal), failed. phase, phase_since: what the driver waits for, and since
    when. Times are in seconds since 1970.
    """

    command: str
    state: str
    host: str
    pid: int
    job_id: str | None
    started: float
    written: float
    phase: str | None = None
    phase_since: float | None = None
    error: str | None = None


class Heartbeat:
    """A thread that writes RUN/status.json every `BEAT_S` while a command runs, and at its end."""

    def __init__(
        self,
        path: Path,
        command: str,
        phase: Callable[[], tuple[str, float] | None],
        *,
        is_owned: Callable[[], bool] = lambda: True,
    ) -> None:
        """Prepare the status of a command that has just started.

        phase: returns what the driver waits for now, and since when (seconds since 1970); None if it is not waiting.
        is_owned: returns whether the run is still that of this process; the status is not written once it is not.
        """
        self._path, self._phase, self._is_owned, now = path, phase, is_owned, time.time()
        self._status = RunStatus(
            command=command,
            state="running",
            host=socket.gethostname(),
            pid=os.getpid(),
            job_id=os.environ.get("SLURM_JOB_ID"),
            started=now,
            written=now,
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self._write(self._status)
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._ended.set()
        self._thread.join()
        outcome = outcome_of(error)
        self._write(replace(self._status, state=outcome.state, written=time.time(), error=outcome.error))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            phase, since = self._phase() or (None, None)
            self._write(replace(self._status, written=time.time(), phase=phase, phase_since=since))

    def _write(self, status: RunStatus) -> None:
        """Replace the status file in one operation, so that a reader never sees half of it."""
        if not self._is_owned():
            return
        with dispensable(self._path.name), replacing(self._path) as partial:
            partial.write_text(json.dumps(asdict(status)), encoding="utf-8")


def read_status(root: Path) -> RunStatus:
    """Read the status of the run in a directory. Raises DataError if there is none."""
    path = RunPaths(root).status
    if not os.path.lexists(path):
        raise DataError(f"{root} holds no run (there is no {path.name}); give the directory run.dir/run.name")
    with reading(path, "the status of a run", remedy="the run writes it again within seconds"):
        return RunStatus(**json.loads(path.read_bytes()))


def describe_status(root: Path, *, now: float) -> dict[str, object]:
    """Return what `megarl status` prints, by name; unknown values are left out. `now`: seconds since 1970."""
    status, paths = read_status(root), RunPaths(root)
    state = status.state
    if state == "running" and has_died(paths.lock):
        state = "lost: its process has ended"
    elif state == "running" and now - status.written > LOST_S:
        state = f"lost: no sign of life for {tqdm.format_interval(now - status.written)}"
    seen: dict[str, object] = {
        "state": state,
        "command": status.command,
        "driver": f"{status.host}, process {status.pid}" + (f", job {status.job_id}" if status.job_id else ""),
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.started)),
    }
    if status.state == "running" and status.phase is not None and status.phase_since is not None:
        seen["phase"] = f"{status.phase}, for {tqdm.format_interval(status.written - status.phase_since)}"
    if status.error is not None:
        seen["error"] = status.error
    is_logged = paths.metrics.exists()
    records = last_metrics(paths.metrics, "perf/tokens_per_s", ETA_STEPS + 1) if is_logged else []
    if records:
        config = paths.saved_tree()
        section = config["trainer"] if status.command == "train" else config[status.command.replace("-", "_")]
        total = int(section["total_steps"])
        last, recent = records[-1], records
        seen["step"] = f"{last.step} of {total}"
        if status.state == "running" and len(recent) > 1 and last.step < total:
            step_s = (recent[-1].time_s - recent[0].time_s) / (recent[-1].step - recent[0].step)
            # A clock may have been set back.
            if step_s > 0:
                seen["time left"] = tqdm.format_interval(step_s * (total - last.step))
        for name, key in SHOWN_METRICS.items():
            # The canary looks at some syncs only.
            if (value := next((r.metrics[key] for r in reversed(records) if key in r.metrics), None)) is not None:
                seen[name] = float(f"{value:.4g}")
    for directory in sorted(paths.logs.glob("slurm-*")):
        attempts = AttemptLog(directory).read()
        ends = ", ".join(f"{a.reason} ({a.exit_code})" for a in attempts)
        seen[f"job {directory.name.removeprefix('slurm-')}"] = f"{len(attempts)} attempt(s) ended: {ends}"
    return seen


def print_status(root: Path, *, as_json: bool) -> None:
    """Print a run's status as a line per name, or as JSON."""
    seen = describe_status(root, now=time.time())
    if as_json:
        print(json.dumps(seen, indent=1))
        return
    width = max(map(len, seen))
    print_lines(*(f"{name:{width}}  {value}" for name, value in seen.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the run: when (seconds since 1970), the driver's exit code, and why it ended."""

    started: float
    ended: float
    exit_code: int
    reason: str


class AttemptLog:
    """The file LOGS/attempts.jsonl, which lists the attempts of a job."""

    def __init__(self, logs: Path) -> None:
        self._path = logs / "attempts.jsonl"

    def add(self, started: float, exit_code: int, reason: str) -> None:
        """Append the attempt that has just ended."""
        attempt = Attempt(started=started, ended=time.time(), exit_code=exit_code, reason=reason)
        with open_lines(self._path) as file:
            append_lines(file, [asdict(attempt)])

    def read(self) -> list[Attempt]:
        """Return all attempts, the oldest first."""
        return read_lines(
            self._path, lambda fields: Attempt(**fields), expected="an attempt of the job", missing_ok=True
        )

    def num_failures(self) -> int:
        """Count the attempts that failed; an attempt that ended because of a signal does not count."""
        return sum(attempt.reason == FAILED for attempt in self.read())

    def num_fruitless(self) -> int:
        """Count the latest attempts in a row that a signal ended before they had written a checkpoint."""
        fruitless = itertools.takewhile(
            lambda attempt: attempt.reason == STOPPED and attempt.exit_code != EXIT_STOPPED, reversed(self.read())
        )
        return sum(1 for _ in fruitless)


FAILED = "failed"
STOPPED = "stopped"
FINISHED = "finished"
