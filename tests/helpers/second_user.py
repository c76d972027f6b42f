"""Run Python source as another user of this host, as an attacker on a shared node would."""

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

# Debian's `nobody`; any uid without files of its own would do.
UID = 65534
# Modules are imported before the process becomes the other user: the interpreter may lie where only root can read it.
_BECOME = f"""
import importlib, os, sys
for name in sys.argv[1].split(): importlib.import_module(name)
os.chdir("/"); os.setgroups([]); os.setresgid({UID}, {UID}, {UID}); os.setresuid({UID}, {UID}, {UID})
source = sys.argv[2]; del sys.argv[1:3]
exec(compile(source, "attack", "exec"), {{"__name__": "__main__"}})
"""

needs_second_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program as another user")


def as_nobody(
    program: str, *arguments: object, imports: Sequence[str] = (), timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run Python source as another user, without this process's environment, and return what it printed.

    `program` reads `arguments` from `sys.argv[1:]`. Whatever it imports must also be named in `imports`.
    """
    return subprocess.run(
        nobody_command(program, *arguments, imports=imports),
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout_s,
        check=False,
    )


def nobody_command(program: str, *arguments: object, imports: Sequence[str] = ()) -> Sequence[str]:
    """Return the command that `as_nobody` runs, for a test that starts the process itself."""
    return [sys.executable, "-c", _BECOME, " ".join(imports), program, *map(str, arguments)]
