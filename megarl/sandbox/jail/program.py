"""The child of one task: shuts itself in, then runs the program."""

import _sitebuiltins
import atexit
import builtins
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from megarl.sandbox.jail import answer
from megarl.sandbox.jail.rights import Bounds, give_up_rights

_ANSWER = 3
_NAME = "program.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What the child of one task runs with. `streams`: descriptors of input, output, errors and answer."""

    source: str
    task: Mapping[str, Any]
    streams: Sequence[int]
    directory: str
    import_paths: Sequence[str]
    bounds: Bounds

    def run(self) -> NoReturn:
        """Ends this process as the interpreter would end after a script."""
        os.setsid()
        _keep_only(self.streams)
        os.chdir(self.directory)
        # Without the `site` module there are none, and scripts use them.
        for name in ("exit", "quit"):
            setattr(builtins, name, _sitebuiltins.Quitter(name, "end of input"))
        sys.argv = [_NAME]
        sys.path.extend(self.import_paths)
        give_up_rights(self.bounds)
        os._exit(_exit_code(lambda: _TASKS[self.task["kind"]](self.source, self.task)))


def _exit_code(run: Callable[[], None]) -> int:
    """Run it and all that waits for its end. Taking the interpreter down besides would cost six times as much."""
    code = 0
    try:
        run()
    except SystemExit as error:
        code = _code_of(error)
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


def _code_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _keep_only(streams: Sequence[int]) -> None:
    """Make them the descriptors 0, 1, …, and close all others."""
    # Out of the way first, so that none is overwritten before its turn.
    spare = [os.dup(_at_least(stream, len(streams))) for stream in streams]
    for number, stream in enumerate(spare):
        os.dup2(stream, number)
    os.closerange(len(streams), 2**31 - 1)


def _at_least(stream: int, lowest: int) -> int:
    while stream < lowest:
        stream = os.dup(stream)
    return stream


def _run_with_input(source: str, task: Mapping[str, Any]) -> None:
    _execute(source, "__main__")


def _call(source: str, task: Mapping[str, Any]) -> None:
    names = _execute(source, "program")
    name = task["function"]
    function = names[name] if name in names or "Solution" not in names else getattr(names["Solution"](), name)
    _answer(answer.encode(function(*task["arguments"])))


def _evaluate(source: str, task: Mapping[str, Any]) -> None:
    names = _execute(source, "program")
    _answer(answer.encode(eval(compile(task["expression"], "test", "eval", dont_inherit=True), names)))


def _execute_statements(source: str, task: Mapping[str, Any]) -> None:
    names = _execute(source, "program")
    exec(compile(task["statements"], "test", "exec", dont_inherit=True), names)
    _answer(answer.encode(task["token"]))


_TASKS: Mapping[str, Callable[[str, Mapping[str, Any]], None]] = {
    "RunWithInput": _run_with_input,
    "Call": _call,
    "Evaluate": _evaluate,
    "Execute": _execute_statements,
}


def _execute(source: str, name: str) -> dict[str, Any]:
    """Run the program as a module of this name. Only `__main__` runs what scripts keep for themselves."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, _NAME, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _answer(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(_ANSWER, left) :]
