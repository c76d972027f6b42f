"""Read the files that `algo.plugins` names, and register the parts of algorithms that they define.

The driver reads the files once, and sends what it has read along with the work: every process of a run has the parts of
the same text, on whatever host it runs, and after the file has changed.
"""

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from megarl.config.parse import from_dict
from megarl.errors import ConfigError
from megarl.host.reading import reason_of, require_file
from megarl.host.user_code import mistake, note_user_file, run_file
from megarl.registry import Registration, RegistrationError, noting

# By the old name of a module: its new name.
MODULES = {
    "megarl.sync.wire": "megarl.sync.transport",
    "megarl.sync.wire.table": "megarl.sync.transport.table",
    "megarl.sync.wire.wires": "megarl.sync.transport.transports",
}
# By the old name of a part of such a module: its new name.
PARTS = {"Wire": "Transport", "WIRES": "TRANSPORTS", "register_wire": "register_transport"}


class MovedModules(Loader):
    """Finds modules by their old names. They hold nothing: each part is looked up in the module of the new name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module that has moved, and None for all others."""
        if fullname not in MODULES:
            return None
        return spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Import the module of the new name, and have each part looked up there."""
        new = importlib.import_module(MODULES[module.__name__])

        def part_of(name: str) -> object:
            return getattr(new, PARTS.get(name, name))

        module.__dict__["__getattr__"] = part_of


KEY, SETTINGS = "algo.plugins", "algo.settings"
sys.meta_path.append(MovedModules())

# The settings of parts, by a part's name.
PartSettings: TypeAlias = Mapping[str, Mapping[str, Any]]
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A file or module that registers parts of algorithms: its name in `algo.plugins`, its path, and what it holds.

    settings: those of the run for all its parts, which every process of the run is to have.
    """

    name: str
    path: str
    source: bytes
    settings: PartSettings = field(default_factory=dict, compare=False)

    @property
    def is_file(self) -> bool:
        return self.name.endswith(".py")

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source).hexdigest()

    @property
    def title(self) -> str:
        """Return the name that no two plugins of a run share: the file's own name, or the module's."""
        return Path(self.name).name if self.is_file else self.name


# Registrations of the plugins that this process has run, and the plugins whose parts are in force.
_registered: dict[Plugin, list[Registration]] = {}
_active: list[Plugin] = []


def active_plugins() -> tuple[Plugin, ...]:
    """Return the plugins whose parts are in force in this process."""
    return tuple(_active)


def registrations() -> list[Registration]:
    """Return what the plugins have registered that are in force in this process."""
    return [each for plugin in _active for each in _registered[plugin]]


def use_plugins(names: Sequence[str]) -> None:
    """Read the plugins of a configuration, and have their parts in force in this process, and no others.

    Raises ConfigError, which names the file and the line, for what cannot be read, run or registered.
    """
    plugins = [read_plugin(name) for name in names]
    titles = [plugin.title for plugin in plugins]
    if twice := next((title for title in titles if titles.count(title) > 1), None):
        raise ConfigError(f"{KEY}: got {list(names)}, of which two are called {twice}; rename one, or name it once")
    activate(plugins)


def activate(plugins: Sequence[Plugin]) -> None:
    """Have the parts of these plugins in force in this process, and no others; each text is run once."""
    if list(plugins) != _active:
        while _active:
            for registration in _registered[_active.pop()]:
                registration.undo()
        for plugin in plugins:
            if plugin not in _registered:
                _registered[plugin] = _run(plugin)
            else:
                _register_again(plugin)
            _active.append(plugin)
    _active[:] = plugins
    for plugin in plugins:
        for each in _registered[plugin]:
            if each.own:
                given = {key: value for name in each.names for key, value in plugin.settings.get(name, {}).items()}
                each.own.value = from_dict(each.own.declared, given, f"{SETTINGS}.{each.names[0]}")


def _register_again(plugin: Plugin) -> None:
    done: list[Registration] = []
    try:
        for registration in _registered[plugin]:
            registration.register_again()
            done.append(registration)
    except RegistrationError as error:
        for registration in done:
            registration.undo()
        raise ConfigError(f"{plugin.path}: {error}") from error


def read_plugin(name: str) -> Plugin:
    """Read a plugin without running it, but for the packages that its module lies in."""
    if name.endswith(".py"):
        path = Path(name)
        require_file(path, "a Python file that registers parts of an algorithm", remedy=f"set {KEY}", error=ConfigError)
        return Plugin(name=name, path=str(path.absolute()), source=path.read_bytes())
    if not _MODULE.fullmatch(name):
        raise ConfigError(
            f"{KEY}: got {name!r}, expected the path of a Python file, its name ending in .py, or the dotted name of a "
            "module, as in my_package.losses"
        )
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    except Exception as error:  # the package's code may raise anything
        raise ConfigError(
            f"{KEY}: the package of {name} fails: {type(error).__name__}: {reason_of(error)}; correct it"
        ) from error
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise ConfigError(f"{KEY}: there is no module {name} in Python; install it, or add its directory to PYTHONPATH")
    return Plugin(name=name, path=found.origin, source=Path(found.origin).read_bytes())


def _run(plugin: Plugin) -> list[Registration]:
    """Run a plugin, and return what it has registered; if it fails, nothing of it stays registered."""
    path = Path(plugin.path)
    with noting() as noted:
        try:
            if plugin.is_file:
                run_file(path, f"megarl_plugin_{path.stem}", plugin.source)
            else:
                _import(plugin)
        except ConfigError:
            for registration in noted:
                registration.undo()
            raise
    return noted


def _import(plugin: Plugin) -> None:
    here = read_plugin(plugin.name)
    if here.source != plugin.source:
        raise ConfigError(
            f"{here.path}: has the SHA-256 {here.sha256}, but the driver's {plugin.path} has {plugin.sha256}; install "
            f"the same {plugin.name} on all hosts"
        )
    note_user_file(Path(plugin.path))
    try:
        loaded = sys.modules.get(plugin.name)
        if loaded is not None and any(each.name == plugin.name for each in _registered):
            importlib.reload(loaded)  # its file has changed since
        else:
            importlib.import_module(plugin.name)
    except (Exception, SystemExit) as error:
        raise mistake(Path(plugin.path), error) from error
