"""Make virtual environments of their own for packages that megarl's must not have, or not in these versions."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def newer_python() -> str:
    """Return a Python 3.12, which some packages need."""
    found = [*Path("~/.pyenv/versions").expanduser().glob("3.12.*/bin/python3.12"), shutil.which("python3.12")]
    python = next(filter(None, found), None)
    assert python is not None, "there is no Python 3.12, as pyenv installs it or on PATH; install one"
    return str(python)


def python_with(name: str, *requirements: str, python: str = sys.executable) -> Path:
    """Return the Python of the environment `.venv-NAME`, which is made anew where it has other requirements.

    uv, which lies beside this Python, takes a tenth of pip's time. python: what the environment is made of.
    """
    venv = ROOT / f".venv-{name}"
    made, stamp, uv = venv / "bin" / "python", venv / "requirements.txt", str(Path(sys.executable).with_name("uv"))
    wanted = "\n".join(requirements)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        subprocess.run([uv, "venv", "-q", "--clear", "--python", python, str(venv)], check=True)
        subprocess.run([uv, "pip", "install", "-q", "--python", str(made), *requirements], check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return made
