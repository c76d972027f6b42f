"""Texts of a configuration that become names of files, lines of scripts and addresses of hosts."""

import re
from typing import Any

import pytest

from megarl.config import Config
from megarl.config.check import check_eval
from megarl.config.parse import from_dict
from megarl.errors import ConfigError


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("run", {"name": "a\nb"}, r"run.name: got 'a\nb', expected a single directory name of letters, digits, spaces"),
        ("run", {"name": "a\u202eb"}, r"run.name: got 'a\u202eb', expected a single directory name"),
        ("run", {"dir": "runs\x1b[2J"}, r"run.dir: got 'runs\x1b[2J', expected a path without control characters"),
        ("cluster", {"address": "h:1\n"}, r"cluster.address: got 'h:1\n', expected HOST:PORT of a running Ray cluster"),
        ("cluster", {"address": "-h:1"}, "cluster.address: got '-h:1', expected HOST:PORT"),
        ("cluster", {"hosts": ["a", "b]"]}, "cluster.hosts: got 'b]', expected names of hosts, of letters, digits"),
        ("cluster", {"hosts": ["\x1b"]}, r"cluster.hosts: got '\x1b', expected names of hosts"),
    ],
)
def test_texts_that_are_no_names_are_refused(section: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_eval(from_dict(Config, {section: values}))


def test_names_of_all_scripts_and_paths_with_spaces_are_fine() -> None:
    run = {"name": "größe 数学 (2)", "dir": "my runs/50%/it's"}
    cluster = {"address": "10.0.0.1:20000", "hosts": ["node-1", "gpu_2.cluster", "10.0.0.2"]}
    check_eval(from_dict(Config, {"run": run, "cluster": cluster}))
