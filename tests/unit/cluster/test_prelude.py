"""What a run refuses before it begins any process."""

import subprocess
import sys

PROGRAM = """
from megarl.cluster.prelude import Prelude
from megarl.config.schema import ClusterConfig, RunConfig
Prelude(ClusterConfig(), RunConfig())
"""


def test_python_without_assertions_is_named() -> None:
    ended = subprocess.run([sys.executable, "-OO", "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert "ConfigError: PYTHONOPTIMIZE: got 2 (or python -O)" in ended.stderr
