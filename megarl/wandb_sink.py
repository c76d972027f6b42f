"""Metrics to Weights & Biases. The wandb package is optional, and imported only where a run asks for it."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from megarl.errors import ConfigError
from megarl.metrics import MetricsRecord


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
    """Sends records to a Weights & Biases run; how to reach it (WANDB_API_KEY, WANDB_MODE) is wandb's own setting."""

    def __init__(self, project: str, name: str, root: Path, settings: Mapping[str, object]) -> None:
        self._run = require_wandb().init(project=project, name=name, dir=str(root), config=dict(settings))

    def write(self, record: MetricsRecord) -> None:
        self._run.log(dict(record.metrics), step=record.step)

    def close(self) -> None:
        self._run.finish()
