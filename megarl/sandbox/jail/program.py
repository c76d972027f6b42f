"""Run one task in a child process that first confines itself."""

import _sitebuiltins
import atexit
import builtins
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from megarl.sandbox.jail import answer
from megarl.sandbox.jail.rights import Bounds, give_up_rights

_ANSWER = 3
_NAME = "program.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """The child of one task, and what it runs with. `streams`: descriptors of input, output, errors and answer."""

    source: str
    task: Mapping[str, Any]
    streams: Sequence[int]
    directory: str
    import_paths: Sequence[str]
    bounds: Bounds

    def run(self) -> NoReturn:
        """Run the program, and end this process as the interpreter would end after a script."""
        os.setsid()
        _keep_only(self.streams)
        os.chdir(self.directory)
        # Without the `site` module there are none, and scripts use them.
        for name in ("exit", "quit"):
            setattr(builtins, name, _sitebuiltins.Quitter(name, "end of input"))
        sys.argv = [_NAME]
        sys.path.extend(self.import_paths)
        give_up_rights(self.bounds)
        os._exit(_exit_code(self.source, self.task))


def _exit_code(source: str, task: Mapping[str, Any]) -> int:
    """Perform the task, run the program's exit handlers, and return the exit code.

    The interpreter itself is not shut down, which would take six times as long.
    """
    code = 0
    try:
        _perform(source, task)
    except SystemExit as error:
        if isinstance(error.code, int):
            code = error.code & 0xFF
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            code = 1
    except BaseException:  # what a program raises is its own matter, and ends here
        sys.excepthook(*sys.exc_info())
        code = 1
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


def _perform(source: str, task: Mapping[str, Any]) -> None:
    """Perform the task, and write its answer if it has one."""
    if task["kind"] == "RunWithInput":
        _execute(source, "__main__")
        return
    names = _execute(source, "program")
    match task["kind"]:
        case "Call":
            name = task["function"]
            function = names[name] if name in names or "Solution" not in names else getattr(names["Solution"](), name)
            value = function(*task["arguments"])
        case "Evaluate":
            value = eval(compile(task["expression"], "test", "eval", dont_inherit=True), names)
        case "Execute":
            exec(compile(task["statements"], "test", "exec", dont_inherit=True), names)
            value = task["token"]
    left = memoryview(answer.encode(value))
    while left:
        left = left[os.write(_ANSWER, left) :]


def _execute(source: str, name: str) -> dict[str, Any]:
    """Run the program as a module of this name; under `__main__`, its `if __name__ == "__main__"` block runs too."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, _NAME, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__
