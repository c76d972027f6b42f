"""Run programs of the policy in the sandbox: Python as a tool that keeps its state, and the repair of a program."""

import asyncio
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from megarl.config.programs import open_program, settings_of
from megarl.environments.base import ENVIRONMENTS, Action, Environment, Reply
from megarl.environments.calls import CallThreads
from megarl.environments.parsers import parse_python
from megarl.environments.tools import KEY, ToolEnvironment, ToolError
from megarl.errors import ConfigError
from megarl.types import Message, Prompt
from megarl_sandbox import Cell, Check, Ending, Isolation, Limits, Outcome, Program, SandboxOptions
from megarl_sandbox.process import MARGIN_S

T = TypeVar("T")
# CPU time that all calls of a sample may use together.
CPU_S = 60
# Programs wait in these threads, so they are as many as may run at once in a process.
_THREADS = CallThreads(64)


async def _in_thread(function: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, function, *arguments)


def _options(
    timeout_s: float, limits: Mapping[str, Any] | None, import_paths: Sequence[str], isolation: str
) -> SandboxOptions:
    """Return the options of the sandbox. Raises ConfigError if they are wrong, or if this machine runs no programs."""
    if isolation not in tuple(Isolation):
        raise ConfigError(f"{KEY}.isolation: got {isolation!r}, expected one of {', '.join(Isolation)}")
    with settings_of(KEY):
        chosen = Limits(**{"cpu_s": CPU_S, "wall_s": timeout_s, **(limits or {})})
    options = SandboxOptions(isolation=Isolation(isolation), limits=chosen, import_paths=tuple(import_paths))
    _try_out(options)
    return options


@functools.cache
def _try_out(options: SandboxOptions) -> None:
    with open_program("", options):
        pass


def _excess_of(outcome: Outcome, limits: Limits) -> str:
    """Say why a program was ended, as `took longer than 10 s`."""
    return {
        Ending.EXITED: f"ended the interpreter with exit code {outcome.exit_code}",
        Ending.SIGNALLED: f"was ended by signal {outcome.signal}",
        Ending.CPU_TIME: f"used more than {limits.cpu_s} s of CPU time",
        Ending.WALL_TIME: f"took longer than {limits.wall_s:g} s",
        Ending.MEMORY: f"used more than {limits.memory_mib} MiB of memory",
        Ending.OUTPUT: f"wrote more than {limits.output_mib:g} MiB of output or {limits.files_mib} MiB of files",
    }.get(outcome.ending, "ended its sandbox")


@ENVIRONMENTS.register("python")
class PythonEnvironment(ToolEnvironment):
    """An environment in which the policy runs Python in the sandbox.

    Each sample has an interpreter of its own, which starts with its first call. Names, imports and files last from one
    call to the next. Code that goes over a limit or ends the interpreter costs what it knew, and the policy is told.
    """

    def __init__(
        self,
        *,
        tools: Sequence[str | Callable[..., Any]] = (),
        setup: str = "",
        timeout_s: float = 10.0,
        limits: Mapping[str, object] | None = None,
        import_paths: Sequence[str] = (),
        isolation: str = "auto",
        **arguments: Any,
    ) -> None:
        """Make the environment of one sample.

        tools: further tools. setup: code that an interpreter runs first. timeout_s: of a call. limits: fields of
        `megarl_sandbox.Limits`. import_paths: directories of packages to import besides the standard library.
        isolation: as `rewards.code.isolation`. arguments: those of `ToolEnvironment`.
        """
        # The sandbox keeps the limit of time, but may be late itself.
        super().__init__(tools=[self.python, *tools], timeout_s=timeout_s + MARGIN_S, **arguments)
        self._options, self._setup = _options(timeout_s, limits, import_paths, isolation), setup
        self._program: Program | None = None
        # Lets calls in one by one, in their order.
        self._order = asyncio.Lock()

    async def python(self, code: str) -> str:
        """
        Run Python code. Names, imports and files last from one call to the next.

        Args:
            code: The code. The result is its output and the value of its last line.
        """
        # A call that nobody waits for any more is in the way of the next one until its time is over.
        return await asyncio.shield(self._in_order(self._run_cell, code))

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        """Run the code of earlier turns again, but no other tool."""
        for action in actions:
            for call in [] if action.is_cut else self._parse(action.text):
                if call.name == "python":
                    # They raise again what they raised.
                    with suppress(ToolError, TypeError):
                        await self.python(**call.arguments)
        return True

    async def close(self) -> None:
        if self._program is not None:
            await asyncio.shield(self._in_order(self._program.close))

    async def _in_order(self, function: Callable[..., T], *arguments: Any) -> T:
        async with self._order:
            return await _in_thread(function, *arguments)

    def _run_cell(self, code: str) -> str:
        if self._program is None:
            self._program = open_program(self._setup, self._options)
        outcome = self._program.run(Cell(code=code))
        said = (outcome.stdout + outcome.stderr).decode(errors="replace").rstrip("\n")
        if outcome.succeeded and outcome.ending is Ending.WAITS:
            return said or "(no output)"
        if outcome.ending is Ending.WAITS:
            raise ToolError(said or f"error: exit code {outcome.exit_code}")
        if outcome.ending is Ending.LOST:
            self._program.close()
            self._program = None
        why = _excess_of(outcome, self._options.limits)
        end = f"error: the code {why}; the next call starts a new interpreter, without names and files of this one"
        raise ToolError(f"{said}\n{end}".lstrip("\n"))


@ENVIRONMENTS.register("repair")
class RepairEnvironment(Environment):
    """An environment that tests programs. While a test fails the policy reads why, and may write another program.

    The last block of a turn that is fenced as Python, or else the whole turn, is the program. A row's ground truth is
    the test code, such as assertions about the program's functions (see `megarl_sandbox.Check`); the policy reads the
    text of the assertion that failed. The reward is 1 for a program that passes, which ends the conversation.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 10.0,
        limits: Mapping[str, object] | None = None,
        import_paths: Sequence[str] = (),
        isolation: str = "auto",
    ) -> None:
        """Make the environment of one sample; the arguments are those of `PythonEnvironment`."""
        self._options = _options(timeout_s, limits, import_paths, isolation)

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self._test = prompt.ground_truth
        return ()

    async def reply(self, action: Action) -> Reply:
        blocks = parse_python(action.text)
        failure = await _in_thread(self._failure_of, blocks[-1].arguments["code"] if blocks else action.text)
        if not failure:
            return Reply(done=True, reward=1.0, details={"correct": True})
        return Reply(messages=(Message(role="user", content=failure),), details={"correct": False})

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        await self.start(prompt)
        return True

    def _failure_of(self, source: str) -> str:
        """Run the test, and return in one line why a program fails; nothing if it passes."""
        with open_program(source, self._options) as program:
            outcome = program.run(Check(test=self._test))
        if outcome.succeeded and (verdict := json.loads(outcome.answer))["passed"]:
            return ""
        if outcome.succeeded and not verdict["message"].startswith("BrokenProgram"):
            told = re.fullmatch(r"AssertionError: (.+) \(line \d+ of test\)", verdict["message"], re.DOTALL)
            return told[1] if told else str(verdict["message"])
        last = outcome.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return last if outcome.ending is Ending.EXITED and last else f"it {_excess_of(outcome, self._options.limits)}"
