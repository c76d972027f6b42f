"""Let plugins and scripts import renamed modules and parts by their old names."""

import importlib
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

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
