"""A virtual environment of its own for verifiers, which needs other versions of packages than megarl does."""

import os
import subprocess
import sys
from pathlib import Path

VERIFIERS = "verifiers==0.4.0"
VENV = Path(__file__).parents[2] / ".venv-verifiers"


def verifiers_command(*, summarize_at_tokens: int | None = None) -> list[str]:
    """The command of the agent that plays a task of verifiers. With its first use the environment is made.

    verifiers' harness makes one for its chat program, too, with uv, which lies beside this Python.
    summarize_at_tokens: the length of a context from which on it is compacted, where the harness looks; None: never.
    """
    python, stamp = VENV / "bin" / "python", VENV / VERIFIERS
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", VERIFIERS], check=True)
        stamp.touch()
    path = f"PATH={Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    agent = str(Path(__file__).with_name("verifiers_agent.py"))
    return ["env", path, str(python), agent, *([] if summarize_at_tokens is None else [str(summarize_at_tokens)])]
