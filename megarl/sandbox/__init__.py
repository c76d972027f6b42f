"""Run untrusted programs in a sandbox that knows nothing of rewards and needs only the standard library."""

from megarl.sandbox.options import Isolation, Limits, SandboxOptions
from megarl.sandbox.process import Program, Sandbox
from megarl.sandbox.task import Call, Ending, Evaluate, Execute, Outcome, ProgramTask, RunWithInput

__all__ = [
    "Call",
    "Ending",
    "Evaluate",
    "Execute",
    "Isolation",
    "Limits",
    "Outcome",
    "Program",
    "ProgramTask",
    "RunWithInput",
    "Sandbox",
    "SandboxOptions",
]
