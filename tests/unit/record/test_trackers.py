"""Metrics reach trackers: a stand-in for one of the optional packages, and (long) all real ones, offline."""

import errno
import itertools
import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from megarl.config import Config
from megarl.config.mixture import RemoteConfig
from megarl.config.rewards import RewardsConfig
from megarl.config.schema import LoggingConfig, RunConfig
from megarl.errors import ConfigError, DataError, RunStopped
from megarl.host import writing
from megarl.host.exit_codes import outcome_of
from megarl.record import trackers
from megarl.record.metrics import MetricsRecord, read_metrics
from megarl.record.recorder import RunRecorder


class FakeRun:
    """Records what a sink asks of wandb; `outage` calls of `log` fail before one is taken."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.exit_code: int | None = None
        self.outage = 0
        self.summary: dict[str, int] = {}

    def init(self, **arguments: Any) -> "FakeRun":
        self.arguments = arguments
        return self

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        if self.outage:
            self.outage -= 1
            raise ConnectionError("503: the server's pool is\nexhausted")
        self.logged.append((step, metrics))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


def config(tmp_path: Path, project: str | None) -> Config:
    logging = LoggingConfig(tensorboard=False, wandb_project=project)
    return replace(Config(), run=RunConfig(name="r", dir=str(tmp_path)), logging=logging)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    fake, module = FakeRun(), ModuleType("wandb")
    module.init = fake.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return fake


def test_metrics_reach_the_project(tmp_path: Path, fake: FakeRun) -> None:
    with RunRecorder(config(tmp_path, "p")).metrics() as log:
        log.log(3, {"actor/loss": 0.5})
    time_s = json.loads((tmp_path / "r" / "metrics.jsonl").read_text())["time_s"]
    arguments = fake.arguments
    assert (arguments["project"], arguments["name"], arguments["dir"]) == ("p", "r", str(tmp_path / "r"))
    assert arguments["config"]["logging"]["wandb_project"] == "p"
    assert fake.logged == [(3, {"actor/loss": 0.5, "_timestamp": time_s})]
    assert fake.exit_code == 0


def test_secrets_stay_here(tmp_path: Path, fake: FakeRun) -> None:
    remote = RemoteConfig(urls=("https://user:s3cret@host/score?token=s3cret",))
    settings = replace(config(tmp_path, "p"), rewards=RewardsConfig(remote=remote))
    with RunRecorder(settings).metrics():
        pass
    assert fake.arguments["config"]["rewards"]["remote"]["urls"] == (
        "https://***masked***@host/score?token=***masked***",
    )
    assert "s3cret" not in str(fake.arguments)


def test_a_resumed_run_continues_the_same_one(tmp_path: Path, fake: FakeRun) -> None:
    settings = config(tmp_path, "p")

    def run_id(**how: Any) -> str:
        with RunRecorder(settings, **how).metrics():
            pass
        assert fake.arguments["resume"] == "allow"
        return fake.arguments["id"]

    first = run_id()
    assert first
    assert run_id(resumed_step=3) == first
    assert fake.summary == {"resumed_step": 3}
    assert run_id(overwrite=True) != first


def test_without_the_package_nothing_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes its import fail
    with RunRecorder(config(tmp_path, None)).metrics():
        pass
    with pytest.raises(
        ConfigError, match=r"logging\.wandb_project: needs the package wandb, .*; run pip install wandb"
    ):
        RunRecorder(config(tmp_path, "p"), overwrite=True)
    assert (tmp_path / "r" / "config.yaml").is_file()


def test_an_outage_ends_no_run_and_loses_no_record(
    tmp_path: Path, fake: FakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "RETRY_S", 0.01)
    monkeypatch.setattr(writing, "_warned", set())
    fake.outage = 3
    with RunRecorder(config(tmp_path, "p")).metrics() as log:
        for step in range(1, 6):
            log.log(step, {"actor/loss": 0.5})
        # Until the service is back: after the run's end, there is one more try only.
        for _ in range(3000):
            if not fake.outage:
                break
            threading.Event().wait(0.01)
    assert [step for step, _ in fake.logged] == [1, 2, 3, 4, 5]
    assert fake.exit_code == 0
    # One warning for three failures.
    assert capsys.readouterr().out.splitlines() == [
        "warning: metrics of wandb cannot be written, and the run goes on without: 503: the server's pool is exhausted"
    ]


@pytest.mark.parametrize("call", ["init", "log", "finish"])
@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_a_service_that_never_answers_does_not_keep_a_run(
    call: str,
    fault: str,
    tmp_path: Path,
    fake: FakeRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(trackers, "RETRY_S", 0.01)
    monkeypatch.setattr(trackers, "CLOSE_S", 0.2)
    released = threading.Event()

    def refuse(*_: Any, **__: Any) -> None:
        if fault == "hangs":
            released.wait(60)
        raise TimeoutError

    monkeypatch.setattr(sys.modules["wandb"] if call == "init" else fake, call, refuse)
    with RunRecorder(config(tmp_path, "p")).metrics() as log:
        log.log(1, {"actor/loss": 0.5})
        log.log(2, {"actor/loss": 0.5})
    released.set()
    left = 0 if call == "finish" else 2
    assert f"warning: wandb has not confirmed {left} records and the end of the run;" in capsys.readouterr().out
    assert [record.step for record in read_metrics(tmp_path / "r" / "metrics.jsonl")] == [1, 2]


# By tracker: where its package is asked to open a run, to log and to end the run.
CALLS = {
    "wandb": ("init", "init.return_value.log", "init.return_value.finish"),
    "mlflow": ("start_run", "log_metrics", "end_run"),
    "trackio": ("init", "init.return_value.log", "finish"),
    "swanlab": ("init", "init.return_value.log", "init.return_value.finish"),
}
FAULTS = {"503": ConnectionError("503"), "hangs": None, "full disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}
SAMPLE = {("mlflow", 0, "full disk"), ("trackio", 1, "503"), ("swanlab", 2, "hangs")}


@pytest.mark.parametrize(
    ("tracker", "moment", "fault"),
    [
        pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.long)
        for case in itertools.product(CALLS, range(3), FAULTS)
    ],
)
def test_no_fault_of_a_tracker_ends_a_run(
    tracker: str, moment: int, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full disks are met as the tracker opens, writes and closes its files."""
    for name, seconds in {"RETRY_S": 0.01, "LAST_RETRY_S": 0.01, "CLOSE_S": 0.2}.items():
        monkeypatch.setattr(trackers, name, seconds)
    package, released = MagicMock(), threading.Event()
    package.active_run.return_value = None
    package.start_run.return_value.info.run_id = "drawn"
    refused = FAULTS[fault] or (lambda *_, **__: released.wait(60))
    package.configure_mock(**{f"{CALLS[tracker][moment]}.side_effect": refused})
    monkeypatch.setitem(sys.modules, tracker, package)
    (setting,) = [each.setting for each in trackers.TRACKERS if each.package == tracker]
    run = RunConfig(name="r", dir=str(tmp_path))
    with RunRecorder(
        replace(Config(), run=run, logging=LoggingConfig(tensorboard=False, **{setting: "p"}))
    ).metrics() as log:
        log.log(1, {"actor/loss": 0.5})
        log.log(2, {"actor/loss": 0.25})
    released.set()
    assert [record.step for record in read_metrics(tmp_path / "r" / "metrics.jsonl")] == [1, 2]


# What ends a run → the state that status files have, and wandb's, MLflow's and SwanLab's words for it.
ENDS: list[tuple[BaseException | None, str, int, str, str]] = [
    (None, "finished", 0, "FINISHED", "success"),
    (RuntimeError("boom"), "failed", 1, "FAILED", "crashed"),
    (DataError("row 3"), "failed", 1, "FAILED", "crashed"),
    (RunStopped("by SIGTERM"), "stopped", 85, "KILLED", "aborted"),
    (SystemExit(143), "stopped", 143, "KILLED", "aborted"),
    (KeyboardInterrupt(), "stopped", 130, "KILLED", "aborted"),
]


@pytest.mark.parametrize(("error", "state", "exit_code", "mlflow", "swanlab"), ENDS)
def test_every_tracker_hears_how_the_run_ended(
    error: BaseException | None, state: str, exit_code: int, mlflow: str, swanlab: str, tmp_path: Path
) -> None:
    run = trackers.TrackedRun(project="p", name="r", root=tmp_path, settings={}, resumed_step=4)
    outcome = outcome_of(error)
    assert (outcome.state, outcome.exit_code) == (state, exit_code)
    # Prometheus is told nothing: it asks.
    services = [tracker for tracker in trackers.TRACKERS if tracker.package != "prometheus_client"]
    packages = {tracker.package: MagicMock() for tracker in services}
    packages["mlflow"].active_run.return_value = None
    packages["mlflow"].start_run.return_value.info.run_id = "drawn"
    for tracker in services:
        opened = tracker.open(packages[tracker.package], run)
        opened.log({"val/pass@8": 0.5}, 7, 1700000000.25)
        opened.finish(outcome)
    packages["wandb"].init.return_value.finish.assert_called_once_with(exit_code=exit_code)
    message = str(error) if state == "failed" else None
    packages["swanlab"].init.return_value.finish.assert_called_once_with(state=swanlab, error=message)
    packages["mlflow"].end_run.assert_called_once_with(status=mlflow)
    packages["mlflow"].set_tag.assert_called_once_with("resumed_step", "4")
    packages["mlflow"].log_metrics.assert_called_once_with({"val/pass_at_8": 0.5}, step=7, timestamp=1700000000250)
    packages["trackio"].finish.assert_called_once_with()


class FakeMlflow:
    """MLflow's rules for runs: a thread has one at a time, which is forgotten at its end. Call `fails` is refused once,
    after it has done its work here, as if its answer were lost.
    """

    def __init__(self, fails: str) -> None:
        self.fails, self.active, self.status = fails, None, "RUNNING"
        self.logged: list[int] = []
        self.tags: dict[str, str] = {}

    def _answer(self, call: str) -> None:
        if self.fails == call:
            self.fails = ""
            raise ConnectionError("503")

    def set_experiment(self, _name: str) -> None:
        self._answer("set_experiment")

    def active_run(self) -> Any:
        return self.active

    def start_run(self, *, run_id: str | None, run_name: str) -> Any:
        if self.active is not None:
            raise RuntimeError("Run with UUID drawn is already active.")
        self._answer("start_run")
        self.active = SimpleNamespace(info=SimpleNamespace(run_id=run_id or "drawn"))
        return self.active

    def log_dict(self, _settings: object, _name: str) -> None:
        self._answer("log_dict")

    def set_tag(self, name: str, value: str) -> None:
        self._answer("set_tag")
        self.tags[name] = value

    def log_metrics(self, _metrics: object, *, step: int, timestamp: int) -> None:
        self._answer("log_metrics")
        self.logged.append(step)

    def end_run(self, status: str) -> None:
        if self.active is not None:
            self.active = None
            self._answer("end_run")
            self.status = status

    def MlflowClient(self) -> Any:  # noqa: N802
        return SimpleNamespace(set_terminated=lambda _run_id, status: setattr(self, "status", status))


@pytest.mark.parametrize("fails", ["set_experiment", "start_run", "log_dict", "set_tag", "log_metrics", "end_run"])
def test_one_lost_answer_of_mlflow_loses_nothing(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "RETRY_S", 0.01)
    monkeypatch.setattr(trackers, "LAST_RETRY_S", 0.01)
    package = FakeMlflow(fails)
    run = trackers.TrackedRun(project="p", name="r", root=tmp_path, settings={}, resumed_step=4)
    sink = trackers.TrackerSink("mlflow", lambda: trackers._mlflow(package, run))
    for step in (5, 6):
        sink.write(MetricsRecord(step=step, time_s=1.0, metrics={"actor/loss": 0.5}))
    sink.close(outcome_of(None))
    assert (package.logged, package.status, package.tags) == ([5, 6], "FINISHED", {"resumed_step": "4"})


# Two sessions of one run: its start, and its continuation after step 1.
SESSIONS = """
import sys
from pathlib import Path
from megarl.config.load import from_dict
from megarl.config import Config
from megarl.record.recorder import RunRecorder
logging = {"tensorboard": False, "wandb_project": "p", "mlflow_experiment": "p", "trackio_project": "p"}
config = from_dict(Config, {"run": {"name": "r", "dir": sys.argv[1]}, "logging": {**logging, "swanlab_project": "p"}})
for step, resumed in ((1, None), (2, 1)):
    with RunRecorder(config, resumed_step=resumed).metrics() as log:
        log.log(step, {"actor/loss": 0.5 * step, "val/pass@8": 1.0})
import mlflow
(run,) = mlflow.search_runs(experiment_names=["p"], output_format="list")
print(run.info.status, run.data.tags["resumed_step"])
for name in ("actor/loss", "val/pass_at_8"):
    print([(m.step, m.value) for m in mlflow.MlflowClient().get_metric_history(run.info.run_id, name)])
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_real_trackers_offline_have_what_was_logged(tmp_path: Path) -> None:
    """Installed beside the environment, since none of them is a dependency."""
    packages = ["wandb", "mlflow-skinny", "trackio", "swanlab"]
    site, runs = tmp_path / "site", tmp_path / "runs"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", site, *packages], check=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), str(Path(__file__).parents[3])]),
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": (tmp_path / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", SESSIONS, str(runs)]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert printed.returncode == 0, printed.stderr
    assert "FINISHED 1" in printed.stdout.splitlines()
    assert "[(1, 0.5), (2, 1.0)]" in printed.stdout.splitlines()
    assert "[(1, 1.0), (2, 1.0)]" in printed.stdout.splitlines()
    with sqlite3.connect(tmp_path / "trackio" / "p.db") as trackio:
        logged = trackio.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert [(name, step, json.loads(values)["actor/loss"]) for name, step, values in logged] == [
        ("r", 1, 0.5),
        ("r", 2, 1.0),
    ]
    assert len(list((runs / "r").glob("wandb/offline-run-*/run-*.wandb"))) == 2
    assert len(list((runs / "r").glob("swanlab/run-*/*.swanlab"))) == 2


def fetched(port: int, key: str | None = None) -> tuple[int, str]:
    """What /metrics answers once somebody listens: status and text."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.02)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def until(port: int, part: str, key: str | None = None) -> str:
    while part not in (text := fetched(port, key)[1]):
        time.sleep(0.02)
    return text


def test_prometheus_fetches_the_last_step_until_the_run_ends(tmp_path: Path, port: int) -> None:
    settings = replace(config(tmp_path, None), logging=LoggingConfig(tensorboard=False, prometheus_port=port))
    with RunRecorder(settings).metrics() as log:
        log.log(1, {"timing_s/gen": 2.5})
        log.log(2, {"timing_s/gen": 1.5, "memory/rss_gib/engine_0": 0.25})
        text = until(port, 'megarl_step{run="r"} 2.0')
        assert 'megarl_timing_s_gen{run="r"} 1.5' in text
        assert 'megarl_memory_rss_gib_engine_0{run="r"} 0.25' in text
        with pytest.raises(OSError, match="refused"), socket.create_connection((other_address(), port), timeout=5):
            pass
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def other_address() -> str:
    """An address of this host that is not that of 127.0.0.1."""
    return "127.0.0.2"


def test_with_a_key_only_who_sends_it_is_answered(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logging = LoggingConfig(tensorboard=False, prometheus_port=port, prometheus_key_env="SCRAPE_KEY")
    settings = replace(config(tmp_path, None), logging=logging)
    with pytest.raises(ConfigError, match="prometheus_key_env: SCRAPE_KEY is not set; export the key"):
        RunRecorder(settings)
    monkeypatch.setenv("SCRAPE_KEY", "s3cret")
    with RunRecorder(settings).metrics() as log:
        log.log(1, {"x": 1.0})
        assert 'megarl_x{run="r"} 1.0' in until(port, "megarl_step", "s3cret")
        assert [fetched(port)[0], fetched(port, "s3cre")[0]] == [401, 401]
        with socket.create_connection((other_address(), port), timeout=5):
            pass


def test_a_port_that_is_taken_ends_no_run(
    tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "LAST_RETRY_S", 0.01)
    logging = LoggingConfig(tensorboard=False, prometheus_port=port)
    with (
        socket.create_server(("127.0.0.1", port)),
        RunRecorder(replace(config(tmp_path, None), logging=logging)).metrics() as log,
    ):
        log.log(1, {"x": 1.0})
    assert len(read_metrics(tmp_path / "r" / "metrics.jsonl")) == 1
    assert "prometheus_client has not confirmed 1 records" in capsys.readouterr().out
