"""Find mistakes of a command line that need no model, before libraries are imported that take seconds."""

from pathlib import Path

from megarl.config.check import TRAINING_CHECKS
from megarl.config.schema import Config
from megarl.data.files import columns_of, require_columns
from megarl.data.records import NAME_COLUMNS, required_columns
from megarl.data.sampler import train_files
from megarl.errors import ConfigError
from megarl.host.directory_lock import DirectoryLock
from megarl.host.writing import free_bytes, room
from megarl.record.metrics import RunPaths
from megarl.record.trackers import require_trackers
from megarl.weights.families import read_model_spec
from megarl.weights.hub import local_model, with_models


def check_settings(config: Config, command: str) -> None:
    """Check settings for a command; those of plugins, only after these have been tried in a process of their own."""
    if not config.algo.plugins:
        TRAINING_CHECKS[command](config)


def check_start(config: Config, command: str, *, overwrite: bool, resumes: bool) -> None:
    """Raise ConfigError or DataError if a run cannot start: its settings, its directory, a package or a file.

    The run reads all of it again, and more of it.
    """
    check_settings(config, command)
    paths = RunPaths.of(config.run)
    with DirectoryLock(paths.root, command):
        pass
    if not (overwrite or resumes):
        paths.require_unused()
    require_trackers(config.logging)
    _require_room(config, paths.root)
    # A resumed run pins the commits of models that it began with.
    if not resumes:
        with_models(config, _has_model, judges=False)
    data = config.data if command == "train" else getattr(config, command.replace("-", "_"))
    required = required_columns(config.data) if command == "train" else ()
    for file in map(Path, (*train_files(data.train), *data.val)):
        require_columns(file, columns_of(file, required), required, NAME_COLUMNS)
    if command == "train":
        from megarl.rewards.custom.load import look_for

        for function in config.rewards.custom.all_functions().values():
            look_for(Path(function.path), function.name)


def _has_model(name: str, key: str) -> str:
    read_model_spec(Path(local_model(name, key, weights=False)), key)
    return name


def _require_room(config: Config, root: Path) -> None:
    """Raise ConfigError for a disk that cannot take the export of the trained model."""
    weights = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    if config.actor.lora is None and config.trainer.total_steps and weights > free_bytes(root):
        raise ConfigError(
            f"run.dir: {room(root)} at {root}, and the trained model alone takes {weights / 2**20:,.0f} MiB; free "
            "space there, or choose another run.dir"
        )
