"""The table of what works where is what checks say, and pages claim nothing that it refuses."""

import functools
from pathlib import Path
from typing import TypeVar

import pytest

from megarl.config.support import (
    NEVER,
    PAGE,
    REFUSED,
    TARGETS,
    WORKS,
    cell,
    features,
    targets,
    with_table,
)

T = TypeVar("T")
ROOT = Path(__file__).parents[3]


@functools.cache
def cells() -> dict[str, dict[str, str]]:
    """By feature and target."""
    return {each.name: {name: cell(each, name, target) for name, target in targets().items()} for each in features()}


def test_the_page_has_the_table() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert page == with_table(page)
    assert all(f"| {each.name}" in page for each in features())


def test_nothing_that_was_run_is_refused() -> None:
    for each in features():
        assert set(each.run) <= TARGETS.keys(), each.name
        assert set(each.slower) <= set(each.run), each.name
        assert REFUSED not in [cells()[each.name][name] for name in each.run], each.name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Transformer Engine computes float8, and no packed rows in float32; CPUs have neither it nor CUDA.
        ("layers in float8", (REFUSED, NEVER, REFUSED)),
        ("float32", (WORKS, REFUSED, WORKS)),
        ("CUDA IPC", (REFUSED, WORKS, WORKS)),
        ("shared prefixes", (WORKS, NEVER, WORKS)),
        ("DeepEP", (REFUSED, NEVER, NEVER)),
    ],
)
def test_cells_that_are_known(name: str, expected: tuple[str, ...]) -> None:
    assert tuple(cells()[name].values()) == expected
