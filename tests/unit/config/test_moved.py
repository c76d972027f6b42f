"""Plugins of earlier versions import modules and parts by the names of their time."""

import importlib

import pytest

import megarl.config.plugins  # noqa: F401 - has the names found
from megarl.config.plugins import MODULES, PARTS


def test_a_plugin_of_an_earlier_version_registers_its_transport() -> None:
    from megarl.sync.wire.table import register_wire  # type: ignore[import-not-found]
    from megarl.sync.wire.wires import Wire  # type: ignore[import-not-found]

    from megarl.sync.transport.table import register_transport
    from megarl.sync.transport.transports import Transport

    assert register_wire is register_transport
    assert Wire is Transport


@pytest.mark.parametrize("old", MODULES)
def test_every_module_that_has_moved_is_found(old: str) -> None:
    with pytest.raises(AttributeError):
        importlib.import_module(old).nobody_has_this_name  # noqa: B018


def test_old_names_of_parts_are_not_used_for_others() -> None:
    new = [vars(importlib.import_module(name)) for name in MODULES.values()]
    assert not [old for old in PARTS for module in new if old in module]


def test_other_modules_are_missing_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("megarl.sync.wires")
