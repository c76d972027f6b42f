"""Values of Hydra's arguments: the expected ones are those of hydra-core 1.3.8's own parser."""

from typing import Any

import pytest

from megarl.errors import ConfigError
from megarl.migrate.hydra_values import option_value

READ: dict[str, Any] = {
    "2026-11-28": "2026-11-28",
    "on": "on",
    "no": "no",
    "1:30": "1:30",
    "0123": "0123",
    "0x10": "0x10",
    "1_000": 1000,
    "1__0": "1__0",
    "+3": 3,
    "-0": 0,
    "1e6": 1e6,
    "1E-5": 1e-5,
    "5.": 5.0,
    ".5": 0.5,
    "-INF": float("-inf"),
    "1e": "1e",
    "1.5.2": "1.5.2",
    "None": "None",
    "NULL": None,
    "TRUE": True,
    "true x": "true x",
    " a b ": "a b",
    "": "",
    "''": "",
    "'007'": "007",
    '"1e-6"': "1e-6",
    "'it\\'s'": "it's",
    '"a\\\\"': "a\\",
    "'a,b'": "a,b",
    "[a, b ,1]": ["a", "b", 1],
    "[[1,2],['a']]": [[1, 2], ["a"]],
    "{a:1}": {"a": 1},
    "{a: 1, b: [x,y]}": {"a": 1, "b": ["x", "y"]},
    "{}": {},
    "a\\,b": "a,b",
    "a\\=b": "a=b",
    "\\a": "\\a",
    "x${data.x}": "x${data.x}",
    "[${a},1]": ["${a}", 1],
    "/a/b-c.d:f%g": "/a/b-c.d:f%g",
    "*x": "*x",
    "@x": "@x",
}
REFUSED = [
    "a,b",
    "true,false",
    "[1,2,]",
    "a#b",
    "a=b",
    "a'b",
    "'a' b",
    "~/x",
    "a[0]",
    "é",
    "choice(a,b)",
    "{a 1}",
    "${}",
]


@pytest.mark.parametrize("text", READ)
def test_a_value_is_read_as_hydra_reads_it(text: str) -> None:
    assert repr(option_value(text)) == repr(READ[text])


@pytest.mark.parametrize("text", REFUSED)
def test_what_hydra_refuses_or_sweeps_over_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        option_value(text)
