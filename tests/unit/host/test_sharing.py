"""What a run writes is read by whom `run.share` names, whatever the umask of the user."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.host.sharing import Share, adopt_umask, shared_as, shared_with, umask_variable
from tests.helpers.second_user import as_nobody, needs_second_user

# Writes as a run does: by Python, and by a process that this one starts.
WRITE = "import os, sys; os.makedirs(sys.argv[1]); open(sys.argv[1] + '/file', 'w').close()"


@pytest.fixture(autouse=True)
def _users_umask() -> Iterator[None]:
    previous = os.umask(0o022)
    yield
    os.umask(previous)


def modes(root: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"directories": {oct(root.stat().st_mode & 0o777)}, "files": set()}
    for path in root.rglob("*"):
        found["directories" if path.is_dir() else "files"].add(oct(path.stat().st_mode & 0o777))
    return found


@pytest.mark.parametrize(
    ("share", "directory", "file"),
    [(None, "0o700", "0o600"), ("group", "0o750", "0o640"), ("everyone", "0o755", "0o644")],
)
def test_modes_follow_the_setting(share: Share | None, directory: str, file: str, tmp_path: Path) -> None:
    root = tmp_path / "runs" / "run"
    with shared_with(share, root):
        (root / "config.yaml").write_text("")
        subprocess.run([sys.executable, "-c", WRITE, root / "logs"], check=True)
    assert modes(root) == {"directories": {directory}, "files": {file}}
    # Other runs may lie there, of other users too.
    assert oct(root.parent.stat().st_mode & 0o777) == "0o755"
    root.chmod(0o755)
    with shared_with(share, root):
        assert modes(root)["directories"] == {directory}
    with shared_as(root):
        (root / "report.html").write_text("")
    assert modes(root) == {"directories": {directory}, "files": {file}}
    assert os.umask(0o022) == 0o022


def test_workers_adopt_the_umask_that_their_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    expected: dict[Share | None, int] = {None: 0o077, "group": 0o027}
    for share, umask in expected.items():
        for name, value in umask_variable(share).items():
            monkeypatch.setenv(name, value)
        adopt_umask()
        assert os.umask(0o022) == umask


@needs_second_user
def test_another_user_reads_a_run_only_if_it_is_shared(tmp_path: Path) -> None:
    # Directories that pytest makes are closed.
    for path in (tmp_path, *(above for above in tmp_path.parents if above.name.startswith(("pytest-", "fork")))):
        path.chmod(0o755)
    program = "import sys; print(open(sys.argv[1]).read())"
    expected: dict[Share | None, bool] = {None: False, "everyone": True}
    for share, readable in expected.items():
        root = tmp_path / str(share)
        with shared_with(share, root):
            (root / "config.yaml").write_text("settings")
        seen = as_nobody(program, root / "config.yaml")
        assert ("settings" in seen.stdout) is readable
        assert ("PermissionError" in seen.stderr) is not readable
