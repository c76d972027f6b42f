"""Metrics reach trackers: a stand-in for one of the optional packages, and (long) all real ones, offline."""

import json
import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megarl.config import Config
from megarl.config.mixture import RemoteConfig
from megarl.config.rewards import RewardsConfig
from megarl.config.schema import LoggingConfig, RunConfig
from megarl.errors import ConfigError
from megarl.record.recorder import RunRecorder


class FakeRun:
    """Records what a sink asks of wandb."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.is_finished = False

    def init(self, **arguments: Any) -> "FakeRun":
        self.arguments = arguments
        return self

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.is_finished = True


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
        assert not fake.is_finished
    arguments = fake.arguments
    assert (arguments["project"], arguments["name"], arguments["dir"]) == ("p", "r", str(tmp_path / "r"))
    assert arguments["config"]["logging"]["wandb_project"] == "p"
    assert fake.logged == [(3, {"actor/loss": 0.5})]


def test_secrets_stay_here(tmp_path: Path, fake: FakeRun) -> None:
    remote = RemoteConfig(urls=("https://user:s3cret@host/score?token=s3cret",))
    settings = replace(config(tmp_path, "p"), rewards=RewardsConfig(remote=remote))
    with RunRecorder(settings).metrics():
        assert fake.arguments["config"]["rewards"]["remote"]["urls"] == (
            "https://***masked***@host/score?token=***masked***",
        )
    assert "s3cret" not in str(fake.arguments)
    assert fake.is_finished


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
