"""The tests of the sandbox where users are: for an ordinary user, and in a container whose `/proc` is masked."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.unit.sandbox.test_tiers import MASKED, ROOT

USER_ID = 4321
# What only root of a whole machine can set up, or what sets up such a container itself.
LEFT_OUT = "not test_an_ordinary_user_needs_no_privilege and not test_where_namespaces_are_missing"
FILES = tuple(f"tests/unit/sandbox/test_{name}.py" for name in ("escapes", "lifecycle", "programs", "values"))
# Python and the tests may lie in a home directory, which only its owner enters: others get a way to them here, in
# mounts of this process alone.
WAY = """
import os, stat, sys
from pathlib import Path
from megarl_sandbox.jail import kernel
base, user, *needed = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
kernel.unshare(kernel.CLONE_NEWNS)
kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_PRIVATE)
closed, held = set(), {}
for i, path in enumerate(needed):
    ancestors = [each for each in reversed(Path(path).parents) if not each.stat().st_mode & stat.S_IXOTH]
    if ancestors:
        closed.add(ancestors[0])
        held[path] = Path(base, str(i))
        held[path].mkdir()
        kernel.mount(path, str(held[path]), "none", kernel.MS_BIND | kernel.MS_REC)
for each in closed:
    kernel.mount("tmpfs", str(each), "tmpfs", 0)
    each.chmod(0o755)
for path, place in held.items():
    Path(path).mkdir(parents=True, exist_ok=True)
    kernel.mount(str(place), path, "none", kernel.MS_BIND | kernel.MS_REC)
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
# As a process that was started by this user: its /proc is its own.
os.execv(sys.executable, [sys.executable, "-c", os.environ["MEGARL_TEST_INNER"]])
"""
RUN = """
import os, sys
os.execv(sys.executable, [sys.executable, "-m", "pytest", *os.environ["MEGARL_TEST_ARGUMENTS"].split("|")])
"""


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("host", ["", MASKED], ids=["an ordinary user", "a container with a masked /proc"])
def test_the_sandboxs_tests_pass_there(host: str, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o777)
        arguments = [*FILES, "-q", "-m", "not long and not gpu", "-k", LEFT_OUT, "-p", "no:cacheprovider"]
        arguments += ["-W", "ignore", f"--basetemp={scratch}/run"]
        needed = [sys.base_prefix, sys.prefix, ROOT]
        is_root = os.getuid() == 0
        inner = host + RUN
        done = subprocess.run(
            [sys.executable, "-c", WAY, str(tmp_path), str(USER_ID), *needed]
            if is_root
            else [sys.executable, "-c", inner],
            cwd=ROOT,
            env={
                "PATH": os.environ["PATH"],
                "HOME": "/nonexistent",
                "PYTHONPATH": ROOT,
                "PYTHONDONTWRITEBYTECODE": "1",
                "MEGARL_TEST_INNER": inner,
                "MEGARL_TEST_ARGUMENTS": "|".join(arguments),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
