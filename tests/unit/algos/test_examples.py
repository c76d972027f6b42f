"""Worked examples in docstrings hold, and every public function of megarl.algos and megarl.types has one."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import megarl
import megarl.algos
import megarl.types
from tests.helpers.examples import NAMES

MODULES = [
    info.name
    for package in (megarl.algos, megarl.types)
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
ROOT = Path(megarl.__file__).parents[1]
ELSEWHERE = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("megarl", "megarl_lab")
    for path in sorted((ROOT / package).rglob("*.py"))
    if re.search("^ *>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
    and path.relative_to(ROOT).parts[:2] not in (("megarl", "algos"), ("megarl", "types"))
]
# They take a whole run's configuration.
WITHOUT = {"algorithm_of", "made_up", "rehearse_part"}


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


def test_examples_of_other_packages() -> None:
    assert "megarl_lab.schedules.simulate" in ELSEWHERE
    for name in ELSEWHERE:
        tried = doctest.testmod(importlib.import_module(name))
        assert (tried.failed, tried.attempted > 0) == (0, True), name
