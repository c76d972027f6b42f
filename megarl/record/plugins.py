"""Record the plugins (`algo.plugins`) that a run computes with, so that it continues with the same ones."""

import json
from collections.abc import Sequence
from pathlib import Path

from megarl.config.plugins import active_plugins, read_plugin
from megarl.errors import ConfigError
from megarl.host.reading import RESTORE, read_object
from megarl.host.writing import replacing
from megarl.record.metrics import RunPaths


def record_of(paths: RunPaths) -> Path:
    """Return the file that lists the plugins of a run: by title, where each came from and its SHA-256."""
    return paths.root / "plugins.json"


def copy_of(paths: RunPaths, title: str) -> Path:
    """Return the copy of a run's plugin."""
    return paths.root / "plugins" / f"{title.removesuffix('.py')}.py"


def write_plugins(paths: RunPaths) -> None:
    """Write the path and SHA-256 of each plugin of this process into the run's directory, and a copy of it."""
    plugins = active_plugins()
    if not plugins:
        return
    for plugin in plugins:
        copy = copy_of(paths, plugin.title)
        copy.parent.mkdir(exist_ok=True)
        with replacing(copy) as file:
            file.write_bytes(plugin.source)
    record = {plugin.title: {"path": plugin.path, "sha256": plugin.sha256} for plugin in plugins}
    with replacing(record_of(paths)) as file:
        file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def require_same_plugins(paths: RunPaths, names: Sequence[str]) -> None:
    """Raise ConfigError if a plugin has changed since the run recorded it; none is run to find out.

    names: the plugins as the configuration names them. One that the run did not have is another setting.
    """
    record = record_of(paths)
    recorded = read_object(record, remedy=RESTORE) if record.is_file() else {}
    for plugin in map(read_plugin, names):
        before = recorded.get(plugin.title)
        if before is not None and plugin.sha256 != before["sha256"]:
            raise ConfigError(
                f"{plugin.path}: has changed since {paths.root} was begun: got the SHA-256 {plugin.sha256}, expected "
                f"{before['sha256']}; restore it from {copy_of(paths, plugin.title)}, or start a new run with another "
                "run.name"
            )
