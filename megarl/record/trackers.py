"""Send metrics to TensorBoard and experiment trackers, whose packages are imported only for a project that is set."""

import hmac
import os
import queue
import re
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.config.optional import import_optional
from megarl.config.schema import LoggingConfig
from megarl.errors import ConfigError
from megarl.host.exit_codes import RunOutcome
from megarl.host.streams import print_lines
from megarl.host.unicode import visible
from megarl.host.writing import dispensable, writing
from megarl.record.metrics import MetricsRecord

# Between two tries of what a tracker has not taken; after this many tries, a record is left out.
RETRY_S, TRIES = 30.0, 120
# The same at the end of a run, which waits this long for its trackers.
LAST_RETRY_S, LAST_TRIES = 5.0, 3
CLOSE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run as trackers see it. root: its directory. settings: its configuration as nested mappings. resumed_step: the
    step after which it continues, so that later steps that a tracker already has are repeated; None at its start.
    """

    project: str
    name: str
    root: Path
    settings: Mapping[str, object]
    resumed_step: int | None

    def setting(self, name: str) -> object:
        """Return a setting of the section `logging`."""
        section = self.settings["logging"]
        assert isinstance(section, Mapping), "a section is a mapping"
        return section[name]

    def id(self, tracker: str) -> str:
        """Return the id of the run at a tracker, drawn once and kept in its directory: a resumed run is the same."""
        path = self.root / f"{tracker}_id.txt"
        if not path.exists():
            path.write_text(uuid.uuid4().hex, encoding="utf-8")
        return path.read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run that a tracker has opened: what logs metrics of a step at a Unix time, and what ends the run."""

    log: Callable[[dict[str, float], int, float], object]
    finish: Callable[[RunOutcome], object]


def is_drawn(count: int) -> bool:
    """Return whether TensorBoard gets the `count`-th value of a metric: after 9,999 only every tenth, and so on."""
    return count % 10 ** max(0, len(str(count)) - 4) == 0


class TensorBoardSink:
    """TensorBoard event files; `purge_step` hides what an earlier run wrote from that step on."""

    def __init__(self, log_dir: Path, *, purge_step: int | None = None) -> None:
        # Imported here: reading metrics and writing a report must not need torch.
        from torch.utils.tensorboard import SummaryWriter

        self._log_dir, self._report, self._open = log_dir, threading.excepthook, partial(SummaryWriter, str(log_dir))
        threading.excepthook = self._report_others
        self._writer: SummaryWriter | None = None
        self._counts = Counter[str]()
        with self._writing():
            self._writer = self._open(purge_step=purge_step)

    def write(self, record: MetricsRecord) -> None:
        with self._writing():
            # One that the storage has refused writes nothing more; another has a file of its own.
            writer = self._writer or self._open()
            self._writer = None
            for name, value in record.metrics.items():
                self._counts[name] += 1
                if is_drawn(self._counts[name]):
                    writer.add_scalar(visible(name), value, record.step, walltime=record.time_s)
            writer.flush()
            self._writer = writer

    def close(self, _outcome: RunOutcome | None = None) -> None:
        with self._writing():
            if self._writer is not None:
                self._writer.close()
        threading.excepthook = self._report

    def _report_others(self, failed: threading.ExceptHookArgs) -> None:
        """Report what ends a thread, unless it is TensorBoard's writer, whose error the next call here raises again."""
        if type(failed.thread).__name__ != "_AsyncWriterThread":
            self._report(failed)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Let the run go on if the storage refuses: metrics.jsonl has the same."""
        with dispensable("TensorBoard's files"), writing(self._log_dir):
            yield


class TrackerSink:
    """A tracker that a thread of its own tells: the trainer never waits for a service, and no error of one ends a run.

    A record that the tracker does not take is sent again every RETRY_S, and a few times more at the end. open_run is
    called again after a part of it has failed. name: for messages.
    """

    def __init__(self, name: str, open_run: Callable[[], OpenedRun]) -> None:
        self._name, self._open = name, open_run
        self._queue: queue.SimpleQueue[MetricsRecord | RunOutcome] = queue.SimpleQueue()
        self._ending, self._is_ended = threading.Event(), False
        self._num_written = self._num_sent = 0
        self._thread = threading.Thread(target=self._deliver, name=name, daemon=True)
        self._thread.start()

    def write(self, record: MetricsRecord) -> None:
        self._num_written += 1
        self._queue.put(record)

    def close(self, outcome: RunOutcome) -> None:
        self._queue.put(outcome)
        self._ending.set()
        self._thread.join(CLOSE_S)
        if not self._is_ended:
            print_lines(
                f"warning: {self._name} has not confirmed {self._num_written - self._num_sent} records and the end of "
                "the run; metrics.jsonl has them all"
            )

    def _deliver(self) -> None:
        """Open the run, and send what was written until the outcome, or a failure after the end, has ended it."""
        run: OpenedRun | None = None
        item: MetricsRecord | RunOutcome | None = None
        tries = last_tries = 0
        while True:
            is_done, tries, last_tries = False, tries + 1, last_tries + self._ending.is_set()
            with dispensable(f"metrics of {self._name}", Exception):
                run = run or self._open()
                if isinstance(item, MetricsRecord):
                    # Data and users' functions name some.
                    run.log({visible(name): value for name, value in item.metrics.items()}, item.step, item.time_s)
                    self._num_sent += 1
                elif item is not None:
                    run.finish(item)
                    self._is_ended = True
                    return
                is_done = True
            if is_done or (tries == TRIES and run is not None):
                item, tries = self._queue.get(), 0
                last_tries *= not is_done
            elif last_tries == LAST_TRIES:
                return
            elif last_tries:
                time.sleep(LAST_RETRY_S)
            else:
                self._ending.wait(RETRY_S)


def _wandb(package: ModuleType, run: TrackedRun) -> OpenedRun:
    """Open a Weights & Biases run, which keeps the first record of a step: those of repeated steps are ignored."""
    opened = package.init(
        project=run.project, name=run.name, dir=str(run.root), config=run.settings, id=run.id("wandb"), resume="allow"
    )
    if run.resumed_step is not None:
        opened.summary["resumed_step"] = run.resumed_step
    return OpenedRun(
        log=lambda metrics, step, time_s: opened.log({**metrics, "_timestamp": time_s}, step=step),
        finish=lambda outcome: opened.finish(exit_code=outcome.exit_code),
    )


def _trackio(package: ModuleType, run: TrackedRun) -> OpenedRun:
    """Open a run of trackio, which knows it by its name, and neither times of records nor how a run ended."""
    opened = package.init(project=run.project, name=run.name, config=run.settings, resume="allow", embed=False)
    return OpenedRun(
        log=lambda metrics, step, _time_s: opened.log(metrics, step=step), finish=lambda _outcome: package.finish()
    )


def _swanlab(package: ModuleType, run: TrackedRun) -> OpenedRun:
    """Open a run of SwanLab. Only its server continues runs: a resumed run that is tracked on disk is a new one."""
    opened = package.init(
        project=run.project,
        experiment_name=run.name,
        config=run.settings,
        logdir=str(run.root / "swanlab"),
        id=run.id("swanlab")[:21],
        resume="allow",
    )
    states = {"finished": "success", "stopped": "aborted", "failed": "crashed"}
    return OpenedRun(
        log=lambda metrics, step, _time_s: opened.log(metrics, step=step),
        finish=lambda outcome: opened.finish(state=states[outcome.state], error=outcome.error),
    )


def _mlflow(package: ModuleType, run: TrackedRun) -> OpenedRun:
    """Open a run of MLflow; its server draws the id, and a resumed run names it. The settings become its artifact, if
    there is a storage for it.
    """
    package.set_experiment(run.project)
    path = run.root / "mlflow_id.txt"
    run_id = path.read_text(encoding="utf-8") if path.exists() else None
    # MLflow keeps the run that a thread has started, and refuses to start another.
    opened = package.active_run() or package.start_run(run_id=run_id, run_name=run.name)
    path.write_text(opened.info.run_id, encoding="utf-8")
    with dispensable("settings at mlflow", Exception):
        package.log_dict(dict(run.settings), "config.json")
    if run.resumed_step is not None:
        package.set_tag("resumed_step", str(run.resumed_step))

    def log(metrics: Mapping[str, float], step: int, time_s: float) -> None:
        # MLflow refuses names with other characters, such as the @ of pass@k, and those that are not plain paths.
        names = {name: re.sub(r"[^/\w.\- :]|\.\.", "_", name.replace("@", "_at_")) for name in metrics}
        named = {names[name]: value for name, value in metrics.items()}
        package.log_metrics(named, step=step, timestamp=int(time_s * 1000))

    states = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

    def finish(outcome: RunOutcome) -> None:
        # MLflow forgets the run even if its server does not answer.
        package.end_run(status=states[outcome.state])
        package.MlflowClient().set_terminated(opened.info.run_id, states[outcome.state])

    return OpenedRun(log=log, finish=finish)


def _prometheus(package: ModuleType, run: TrackedRun) -> OpenedRun:
    """Serve the metrics of the last step under /metrics, as gauges named megarl_NAME with the label `run`."""
    # Nothing else of a driver needs a server.
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from megarl.host.http_server import BoundedServer, trust

    variable = run.setting("prometheus_key_env")
    expected = f"Bearer {os.environ[str(variable)]}" if variable else ""
    registry, gauges = package.CollectorRegistry(), dict[str, Any]()

    def metrics(request: Request) -> Response:
        if expected and not hmac.compare_digest(request.headers.get("authorization", "").encode(), expected.encode()):
            return Response("expected the key of logging.prometheus_key_env\n", 401)
        trust(request)
        return Response(package.generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    def log(values: Mapping[str, float], step: int, time_s: float) -> None:
        for name, value in {**values, "step": step, "time_s": time_s}.items():
            plain = f"megarl_{re.sub('[^a-zA-Z0-9_]', '_', name)}"
            if plain not in gauges:
                gauges[plain] = package.Gauge(plain, name, ["run"], registry=registry).labels(run.name)
            gauges[plain].set(value)

    listener = socket.create_server(("" if variable else "127.0.0.1", int(run.project)))
    server = BoundedServer(Starlette(routes=[Route("/metrics", metrics)]), "prometheus", timeout_graceful_shutdown=1)
    thread = threading.Thread(target=server.run, args=([listener],), name="prometheus server", daemon=True)
    thread.start()

    def finish(_outcome: RunOutcome) -> None:
        server.should_exit = True
        thread.join(CLOSE_S)

    return OpenedRun(log=log, finish=finish)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracker:
    """A kind of tracker. setting: the key of `logging` that names a project, or a port; package: what pip installs."""

    setting: str
    package: str
    open: Callable[[ModuleType, TrackedRun], OpenedRun]


TRACKERS = (
    Tracker(setting="wandb_project", package="wandb", open=_wandb),
    Tracker(setting="mlflow_experiment", package="mlflow", open=_mlflow),
    Tracker(setting="trackio_project", package="trackio", open=_trackio),
    Tracker(setting="swanlab_project", package="swanlab", open=_swanlab),
    Tracker(setting="prometheus_port", package="prometheus_client", open=_prometheus),
)


def require_trackers(cfg: LoggingConfig) -> dict[Tracker, ModuleType]:
    """Import the packages of the trackers that are set; ConfigError with the remedy if one, or a key, is missing."""
    if (name := cfg.prometheus_key_env) and not os.environ.get(name):
        raise ConfigError(f"logging.prometheus_key_env: {name} is not set; export the key, or remove the setting")
    return {
        tracker: import_optional(tracker.package, package=tracker.package, key=f"logging.{tracker.setting}")
        for tracker in TRACKERS
        if getattr(cfg, tracker.setting) is not None
    }


def open_trackers(cfg: LoggingConfig, run_of: Callable[[str], TrackedRun]) -> list[TrackerSink]:
    """Open the run at every tracker that is set. Raises ConfigError as `require_trackers` does.

    run_of: returns the run in a project.
    """
    return [
        TrackerSink(tracker.package, partial(tracker.open, package, run_of(str(getattr(cfg, tracker.setting)))))
        for tracker, package in require_trackers(cfg).items()
    ]
