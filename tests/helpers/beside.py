"""Packages that a few tests need, in a directory beside the environment."""

import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[2] / "requirements"


def install_beside(name: str, directory: Path) -> Path:
    """Install the packages of requirements/NAME into a directory, which the environment does not see; return it."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--target", str(directory), "-r", str(REQUIREMENTS / name)], check=True)
    return directory
