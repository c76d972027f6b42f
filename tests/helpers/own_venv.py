"""Make virtual environments of their own for packages that megarl's must not have, or not in these versions."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_with(name: str, *requirements: str) -> Path:
    """Return the Python of the environment `.venv-NAME`, which is made anew where it has other requirements.

    uv, which lies beside this Python, takes a tenth of pip's time.
    """
    venv = ROOT / f".venv-{name}"
    python, stamp, uv = venv / "bin" / "python", venv / "requirements.txt", str(Path(sys.executable).with_name("uv"))
    wanted = "\n".join(requirements)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(venv)], check=True)
        subprocess.run([uv, "pip", "install", "-q", "--python", str(python), *requirements], check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return python
