"""Send metrics to experiment trackers; their packages are optional, and imported only for a project that is set."""

import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.optional import import_optional
from megarl.config.schema import LoggingConfig
from megarl.record.metrics import MetricsRecord
from megarl.texts.unicode import visible


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run as trackers see it. root: its directory. settings: its configuration as nested mappings."""

    project: str
    name: str
    root: Path
    settings: Mapping[str, Any]

    def id(self, tracker: str) -> str:
        """Return the id of the run at a tracker, drawn once and kept in its directory: a resumed run is the same."""
        path = self.root / f"{tracker}_id.txt"
        if not path.exists():
            path.write_text(uuid.uuid4().hex, encoding="utf-8")
        return path.read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSink:
    """A run at a tracker: what logs the metrics of a step, and what ends it."""

    log: Callable[..., Any]
    finish: Callable[[], Any]

    def write(self, record: MetricsRecord) -> None:
        # Data and users' functions name some.
        self.log({visible(name): value for name, value in record.metrics.items()}, step=record.step)

    def close(self) -> None:
        self.finish()


def _wandb(package: Any, run: TrackedRun) -> TrackerSink:
    """Open a Weights & Biases run, which keeps the first record of a step: those of repeated steps are ignored."""
    opened = package.init(
        project=run.project, name=run.name, dir=str(run.root), config=run.settings, id=run.id("wandb"), resume="allow"
    )
    return TrackerSink(log=opened.log, finish=opened.finish)


def _trackio(package: Any, run: TrackedRun) -> TrackerSink:
    """Open a run of trackio, which knows it by its name."""
    opened = package.init(project=run.project, name=run.name, config=run.settings, resume="allow", embed=False)
    return TrackerSink(log=opened.log, finish=package.finish)


def _swanlab(package: Any, run: TrackedRun) -> TrackerSink:
    """Open a run of SwanLab. Only its server continues runs: a resumed run that is tracked on disk is a new one."""
    opened = package.init(
        project=run.project,
        experiment_name=run.name,
        config=run.settings,
        logdir=str(run.root / "swanlab"),
        id=run.id("swanlab")[:21],
        resume="allow",
    )
    return TrackerSink(log=opened.log, finish=package.finish)


def _mlflow(package: Any, run: TrackedRun) -> TrackerSink:
    """Open a run of MLflow; its server draws the id, and a resumed run names it. The settings become its artifact."""
    package.set_experiment(run.project)
    path = run.root / "mlflow_id.txt"
    opened = package.start_run(run_id=path.read_text(encoding="utf-8") if path.exists() else None, run_name=run.name)
    if not path.exists():
        path.write_text(opened.info.run_id, encoding="utf-8")
        package.log_dict(dict(run.settings), "config.json")

    def log(metrics: Mapping[str, float], step: int) -> None:
        # MLflow refuses names with other characters, such as the @ of pass@k, and those that are no plain path.
        names = {name: re.sub(r"[^/\w.\- :]|\.\.", "_", name.replace("@", "_at_")) for name in metrics}
        package.log_metrics({names[name]: value for name, value in metrics.items()}, step=step)

    return TrackerSink(log=log, finish=package.end_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracker:
    """A kind of tracker. setting: the key of `logging` that names a project; package: what pip installs."""

    setting: str
    package: str
    open: Callable[[Any, TrackedRun], TrackerSink]


TRACKERS = (
    Tracker(setting="wandb_project", package="wandb", open=_wandb),
    Tracker(setting="mlflow_experiment", package="mlflow", open=_mlflow),
    Tracker(setting="trackio_project", package="trackio", open=_trackio),
    Tracker(setting="swanlab_project", package="swanlab", open=_swanlab),
)


def require_trackers(cfg: LoggingConfig) -> dict[Tracker, Any]:
    """Import the packages of the trackers that are set; ConfigError with the remedy if one is not installed."""
    return {
        tracker: import_optional(tracker.package, package=tracker.package, key=f"logging.{tracker.setting}")
        for tracker in TRACKERS
        if getattr(cfg, tracker.setting) is not None
    }


def open_trackers(cfg: LoggingConfig, *, name: str, root: Path, settings: Mapping[str, Any]) -> list[TrackerSink]:
    """Open the run at every tracker that is set. Raises ConfigError as `require_trackers` does."""
    return [
        tracker.open(
            package, TrackedRun(project=getattr(cfg, tracker.setting), name=name, root=root, settings=settings)
        )
        for tracker, package in require_trackers(cfg).items()
    ]
