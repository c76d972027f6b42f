"""Run untrusted programs in a sandbox that knows nothing of rewards and needs only the standard library."""

from megarl_sandbox.errors import LostError, OptionError
from megarl_sandbox.options import Isolation, Limits, SandboxOptions
from megarl_sandbox.process import Program, Sandbox
from megarl_sandbox.shared import shared_sandbox
from megarl_sandbox.task import Call, Cell, Check, Ending, Outcome, ProgramTask, RunWithInput

__all__ = [
    "Call",
    "Cell",
    "Check",
    "Ending",
    "Isolation",
    "Limits",
    "LostError",
    "OptionError",
    "Outcome",
    "Program",
    "ProgramTask",
    "RunWithInput",
    "Sandbox",
    "SandboxOptions",
    "shared_sandbox",
]
