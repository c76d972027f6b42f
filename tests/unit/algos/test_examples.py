"""The worked examples in docstrings of megarl.algos and megarl.types hold, and every public function has one."""

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import megarl.algos
import megarl.types
from tests.helpers.examples import NAMES

MODULES = [
    info.name
    for package in (megarl.algos, megarl.types)
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
# They take a whole run's configuration.
WITHOUT = {"algorithm_of"}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module: ModuleType = importlib.import_module(name)
    flags = doctest.ELLIPSIS
    assert doctest.testmod(module, extraglobs=NAMES, optionflags=flags).failed == 0
    public = [
        (found, function)
        for found, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == name and not found.startswith("_") and found not in WITHOUT
    ]
    assert [found for found, function in public if ">>>" not in (function.__doc__ or "")] == []
