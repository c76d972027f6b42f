"""The list of tests that wait for `make test-wide` names tests that exist."""

from pathlib import Path

import pytest

from tests.helpers.wide import WIDE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("beginning", WIDE)
def test_every_line_is_the_beginning_of_a_test(beginning: str) -> None:
    file, _, name = beginning.partition("::")
    assert f"def {name.partition('[')[0] or 'test_'}" in (ROOT / file).read_text(encoding="utf-8")
