"""Run one task, or the test code of one, in a child process that first confines itself."""

import _sitebuiltins
import ast
import atexit
import builtins
import itertools
import json
import linecache
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from megarl_sandbox import wire
from megarl_sandbox.jail import values
from megarl_sandbox.jail.channel import Channel
from megarl_sandbox.jail.remote import Peer
from megarl_sandbox.jail.rights import MIB, Bounds, give_up_rights
from megarl_sandbox.jail.serve import Server
from megarl_sandbox.jail.testing import Suite, run_suite
from megarl_sandbox.jail.usual import USUAL

# Descriptors after input, output and errors. Cells come through the one after the answer; a program that is tested has
# a reader and a writer in place of an answer.
_ANSWER = 3
_CELLS = 4
_READER = 4
_WRITER = 5
_CONNECTION = 6
# The exit code of test code whose program ended before it.
PROGRAM_ENDED = 3
_NAME = "program.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """The child of one task, and what it runs with.

    streams: its descriptors, which get the numbers 0, 1, … keeper: the process that started it, and that it ends with.
    """

    source: str
    task: Mapping[str, Any]
    streams: Sequence[int]
    directory: str
    import_paths: Sequence[str]
    bounds: Bounds
    keeper: int

    def run_program(self) -> NoReturn:
        """Run the program, and end this process as the interpreter would end after a script."""
        self._settle()
        # Without the `site` module there are none, and scripts use them.
        for name in ("exit", "quit"):
            setattr(builtins, name, _sitebuiltins.Quitter(name, "end of input"))
        sys.argv = [_NAME]
        give_up_rights(self.bounds, self.directory, self.keeper)
        os._exit(_exit_code(partial(self._perform, self.task)))

    def run_tests(self) -> NoReturn:
        """Run test code against the program in the other process, and write the verdict."""
        self._settle()
        with socket.socket(fileno=_CONNECTION) as connection:
            task, _ = wire.receive(connection)
        give_up_rights(self.bounds, self.directory, self.keeper)
        # A program may send this, and it is not to be an exception of the test.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        channel = Channel(_READER, _WRITER, limit=self.bounds.memory_mib * MIB // 8)
        passed, message, has_peer = run_suite(Suite(**task), partial(Peer, channel))
        _write(json.dumps({"passed": passed, "message": message}).encode())
        os._exit(0 if has_peer else PROGRAM_ENDED)

    def _settle(self) -> None:
        os.setsid()
        _keep_only(self.streams)
        os.chdir(self.directory)
        sys.path.extend(self.import_paths)

    def _perform(self, task: Mapping[str, Any]) -> None:
        """Perform the task, and write its answer if it has one."""
        if task["kind"] in ("RunWithInput", "Cell"):
            module = ModuleType("__main__")
            _execute(self.source, module)
            if task["kind"] == "Cell":
                # The interpreter's own hook finds no lines of cells.
                sys.excepthook = traceback.print_exception
                cells = Channel(_CELLS, _ANSWER, limit=self.bounds.memory_mib * MIB // 8)
                for number in itertools.count(1):
                    run = partial(_run_cell, cells.receive()["code"], f"cell {number}", module)
                    _write(bytes([_exit_code(run, is_last=False)]))
            return
        module = ModuleType("program")
        module.__dict__.update(USUAL)
        names = module.__dict__
        if task["kind"] == "Call":
            _execute(self.source, module)
            name = task["function"]
            # A usual name such as `merge` may be that of a method.
            is_own = name in names and names[name] is not USUAL.get(name)
            function = names[name] if is_own or "Solution" not in names else getattr(names["Solution"](), name)
            _write(values.encode(function(*task["arguments"])))
            return
        exec(compile(task["setup"], "setup", "exec", dont_inherit=True), names)
        by_value = [name for name, value in names.items() if getattr(value, "__module__", "") == "program"]
        _execute(self.source, module)
        Server(names, by_value, Channel(_READER - 1, _WRITER - 1, limit=self.bounds.memory_mib * MIB)).serve()


def _run_cell(code: str, name: str, module: ModuleType) -> None:
    """Run a cell in this module, and print what its last statement evaluates to."""
    # Tracebacks quote from here.
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
    tree: Any = compile(code, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    exec(compile(tree, name, "exec", dont_inherit=True), module.__dict__)
    exec(compile(ast.Interactive(body=last), name, "single", dont_inherit=True), module.__dict__)


def _exit_code(perform: Callable[[], None], *, is_last: bool = True) -> int:
    """Perform the task, or a cell, and return the exit code; is_last: run the program's exit handlers.

    The interpreter itself is not shut down, which would take six times as long.
    """
    code = 0
    try:
        perform()
    except SystemExit as error:
        if isinstance(error.code, int):
            code = error.code & 0xFF
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            code = 1
    except BaseException as error:  # what a program raises is its own matter, and ends here
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    if is_last:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        # Nobody got what it still had to say.
        code = code or 120
    return code


def _keep_only(streams: Sequence[int]) -> None:
    """Move these streams to file descriptors 0, 1, …, and close all other descriptors."""
    spare = []
    for stream in streams:
        # Out of the way first, so that none is overwritten before its turn.
        while stream < len(streams):
            stream = os.dup(stream)
        spare.append(os.dup(stream))
    for number, stream in enumerate(spare):
        os.dup2(stream, number)
    os.closerange(len(streams), 2**31 - 1)


def _write(answer: bytes) -> None:
    left = memoryview(answer)
    while left:
        left = left[os.write(_ANSWER, left) :]


def _execute(source: str, module: ModuleType) -> None:
    """Run the program as this module; under `__main__`, its `if __name__ == "__main__"` block runs too."""
    sys.modules[module.__name__] = module
    exec(compile(source, _NAME, "exec", dont_inherit=True), module.__dict__)
