"""Run untrusted programs in a sandbox that knows nothing of rewards and needs only the standard library."""

from megarl.sandbox.options import Isolation, Limits, SandboxOptions
from megarl.sandbox.process import Program, Sandbox
from megarl.sandbox.shared import shared_sandbox
from megarl.sandbox.task import Call, Cell, Check, Ending, Outcome, ProgramTask, RunWithInput

__all__ = [
    "Call",
    "Cell",
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
    "shared_sandbox",
]
