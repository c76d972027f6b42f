"""The agent that plays a task of verifiers, which needs other versions of packages than megarl does."""

import os
import sys
from pathlib import Path

from tests.helpers.own_venv import python_with

VERIFIERS = "verifiers==0.4.0"


def verifiers_command(*, summarize_at_tokens: int | None = None) -> list[str]:
    """The command of the agent that plays a task of verifiers. With its first use the environment is made.

    verifiers' harness makes one for its chat program, too, with uv, which lies beside this Python.
    summarize_at_tokens: the length of a context from which on it is compacted, where the harness looks; None: never.
    """
    python = python_with("verifiers", VERIFIERS)
    path = f"PATH={Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    agent = str(Path(__file__).with_name("verifiers_agent.py"))
    return ["env", path, str(python), agent, *([] if summarize_at_tokens is None else [str(summarize_at_tokens)])]
