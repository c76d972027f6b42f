"""Tells whether a change can affect jobs on Slurm: exit status 0 if it can or if nothing says what changed, else 1.

    python tools/affected.py [BASE]        # a commit; by default where the branch left origin/main

These can: the modules of megarl/launch, all that they import as they load, and the files in `ALSO`. A job runs more,
but the same as without Slurm, which tests/e2e has.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALSO = ("slurm/", "tests/slurm/", "tests/conftest.py", "tools/affected.py", "requirements/", ".ci/", "Makefile")


def imported(file: Path) -> set[Path]:
    """The files of the repository that a module imports as it loads, the packages around them included."""
    found = set()
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                path = ROOT.joinpath(*parts[:end])
                found |= {f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()}
    return found


def closure(folder: Path) -> set[str]:
    """The modules of a folder and all that they import, as paths below the repository."""
    waiting, seen = set(folder.rglob("*.py")), set()
    while waiting:
        file = waiting.pop()
        seen.add(file)
        waiting |= imported(file) - seen
    return {str(file.relative_to(ROOT)) for file in seen}


def affects_slurm(changed: Iterable[str]) -> bool:
    modules = closure(ROOT / "megarl/launch")
    return any(file in modules or file.startswith(ALSO) for file in changed)


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    ).stdout.strip()


def changed_since(base: str) -> list[str] | None:
    """None where that commit is unknown, or is the one that is checked out."""
    try:
        start = git("merge-base", base, "HEAD")
        # With the old name of what was renamed.
        return (
            None if start == git("rev-parse", "HEAD") else git("diff", "--name-only", "--no-renames", start).split("\n")
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def main() -> int:
    changed = changed_since(sys.argv[1] if len(sys.argv) > 1 else "origin/main")
    return 0 if changed is None or affects_slurm(changed) else 1


if __name__ == "__main__":
    sys.exit(main())
