"""Plugins of earlier versions import modules and parts by the names of their time."""

import importlib

import pytest

import megarl.config.plugins  # noqa: F401 - has the names found
from megarl.config.plugins import MODULES


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
