"""Metrics to Weights & Biases. The wandb package is optional, and imported only where a run asks for it."""

import importlib
import uuid
from collections.abc import Mapping
from types import ModuleType

from megarl.errors import ConfigError
from megarl.record.metrics import MetricsRecord, RunPaths


def require_wandb() -> ModuleType:
    """The wandb package; ConfigError with the remedy where it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "logging.wandb_project: is set, but the wandb package is not installed; "
            "run `pip install wandb`, or set logging.wandb_project=null"
        ) from error


class WandbSink:
    """Sends records to a Weights & Biases run; how to reach it (WANDB_API_KEY, WANDB_MODE) is wandb's own setting.

    The run's id lies in the run directory, so that a resumed run continues the same one. wandb keeps what it has: of
    steps that come again it leaves out the second.
    """

    def __init__(self, project: str, name: str, paths: RunPaths, settings: Mapping[str, object]) -> None:
        if not paths.wandb_id.exists():
            paths.wandb_id.write_text(uuid.uuid4().hex)
        self._run = require_wandb().init(
            project=project,
            name=name,
            dir=str(paths.root),
            config=dict(settings),
            id=paths.wandb_id.read_text(),
            resume="allow",
        )

    def write(self, record: MetricsRecord) -> None:
        self._run.log(dict(record.metrics), step=record.step)

    def close(self) -> None:
        self._run.finish()
