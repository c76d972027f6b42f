"""The lists of tests that wait for `make test WIDE=1` and `make test-long` name tests that exist."""

from pathlib import Path

from tests.helpers.wide import LONG, WIDE

ROOT = Path(__file__).parents[2]


def test_every_line_is_the_beginning_of_a_test() -> None:
    for file, _, name in (beginning.partition("::") for beginning in (*WIDE, *LONG)):
        assert f"def {name.partition('[')[0] or 'test_'}" in (ROOT / file).read_text(encoding="utf-8"), name
