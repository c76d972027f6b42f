"""Which changes need the tests on a real Slurm."""

import subprocess
from pathlib import Path

import pytest

from tools import affected


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("megarl/host/reading.py", True),
        ("slurm/train.sbatch", True),
        ("megarl/algos/kl.py", False),
    ],
)
def test_what_launch_imports_and_what_jobs_are_made_of(file: str, expected: bool) -> None:
    assert affected.affects_slurm([file, "README.md"]) is expected


def test_what_is_unknown_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *arguments], cwd=tmp_path, check=True)

    monkeypatch.setattr(affected, "ROOT", tmp_path)
    assert affected.changed_since("HEAD") is None
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    (tmp_path / "old").write_text("text")
    git("add", "old")
    git("commit", "-q", "-m", "second")
    git("mv", "old", "new")
    git("commit", "-q", "-m", "third")
    assert affected.changed_since("HEAD") is None
    assert affected.changed_since("no-such-branch") is None
    assert affected.changed_since("HEAD~1") == ["new", "old"]
