"""Runs programs that nobody vouches for; knows nothing of rewards, and needs nothing but the standard library."""

from megarl.sandbox.options import Isolation, Limits, SandboxOptions
from megarl.sandbox.process import Program, Sandbox
from megarl.sandbox.task import Call, Ending, Evaluate, Execute, Outcome, RunWithInput, Task

__all__ = [
    "Call",
    "Ending",
    "Evaluate",
    "Execute",
    "Isolation",
    "Limits",
    "Outcome",
    "Program",
    "RunWithInput",
    "Sandbox",
    "SandboxOptions",
    "Task",
]
