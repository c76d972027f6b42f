"""Play tasks of packages that need a Python of their own: verifiers and Harbor lead agents for which megarl answers."""

import functools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from megarl.environments.agent import AgentEnvironment
from megarl.environments.base import PACKAGES
from megarl.errors import ConfigError

_KEY = "environment.entries.*.arguments"


class _PackageEnvironment(AgentEnvironment):
    """An environment whose agent is a program of `programs/`, run by a Python that has the package and not megarl."""

    package: ClassVar[str]
    program: ClassVar[str]

    def __init__(
        self,
        name: str,
        *,
        python: str = sys.executable,
        settings: Mapping[str, object] | None = None,
        parser: str | None = "hermes",
        untrained_models: Sequence[str] = ("side",),
    ) -> None:
        """Make the environment of one sample.

        python: the interpreter of an environment that has the package. settings: the package's own, see `programs/`.
        parser, untrained_models: as for `agent`.
        """
        script = str(Path(__file__).parent / "programs" / self.program)
        command = (python, script, name, json.dumps(settings or {}))
        super().__init__(command=command, parser=parser, untrained_models=untrained_models)
        if not _has_package(python, self.package):
            raise ConfigError(
                f"{_KEY}.python: {python} has no package {self.package}; make a virtual environment, run pip install "
                f"{self.package} there, and name its Python"
            )


@PACKAGES.register("verifiers")
class VerifiersEnvironment(_PackageEnvironment):
    """An environment that runs a taskset of verifiers, with the harness and the runtime that `settings` name."""

    package, program = "verifiers", "verifiers_task.py"


@PACKAGES.register("harbor")
class HarborEnvironment(_PackageEnvironment):
    """An environment that runs trials of Harbor: a directory of tasks, each in the container that it describes."""

    package, program = "harbor", "harbor_trial.py"


@functools.cache
def _has_package(python: str, package: str) -> bool:
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return subprocess.run([python, "-c", look, package], check=False, capture_output=True).returncode == 0
