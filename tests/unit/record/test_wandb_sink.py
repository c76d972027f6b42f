"""The Weights & Biases sink, against a stand-in for the optional package."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megarl.config import Config
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
    with pytest.raises(ConfigError, match=r"logging\.wandb_project: is set, but the wandb package is not installed"):
        RunRecorder(config(tmp_path, "p"), overwrite=True)
    assert (tmp_path / "r" / "config.yaml").is_file()
