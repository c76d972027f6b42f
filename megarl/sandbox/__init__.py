"""Run untrusted programs in a sandbox that knows nothing of rewards and needs only the standard library."""

from megarl.sandbox.options import Isolation, Limits, SandboxOptions
from megarl.sandbox.process import Program, Sandbox
from megarl.sandbox.task import Call, Check, Ending, Outcome, ProgramTask, RunWithInput

__all__ = [
    "Call",
    "Check",
    "Ending",
    "Isolation",
    "Limits",
    "Outcome",
    "Program",
    "ProgramTask",
    "RunWithInput",
    "Sandbox",
    "SandboxOptions",
]
