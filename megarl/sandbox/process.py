"""The outer side: starts the launcher, hands it programs, and never waits for one without a limit."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

import megarl
from megarl.errors import ConfigError, WorkerError
from megarl.sandbox import wire
from megarl.sandbox.options import Isolation, SandboxOptions
from megarl.sandbox.python_files import python_paths
from megarl.sandbox.remedies import REMEDIES
from megarl.sandbox.task import Ending, Execute, Outcome, Task

# Beyond what a program may take: how late a busy machine may be.
MARGIN_S = 30.0
_DEAD = "the sandbox's launcher died or hung; its error is in this process's log"
_ROOT = str(Path(megarl.__file__).parents[1])
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from megarl.sandbox.jail.launch import main; "
    "sys.path.pop(0); main()"
)


class Program:
    """One program, shut in. `run` starts it afresh for each task. Leaving the context leaves nothing of it behind."""

    def __init__(self, connection: socket.socket, options: SandboxOptions, scratch: str) -> None:
        self._connection = connection
        self._options = options
        self._is_lost = False
        connection.settimeout(MARGIN_S)
        self.keeper = int(wire.receive(connection)[0]["keeper"])
        self._scratch = f"{scratch}-{self.keeper}"
        header, _ = wire.receive(connection)
        if "refused" in header:
            raise ConfigError(_refusal(header["refused"], header["reason"]))

    def give(self, source: str) -> None:
        """The text of the program, before anything else."""
        wire.send(self._connection, {}, source.encode("utf-8", "surrogatepass"))

    def run(self, task: Task) -> Outcome:
        """What came of the task. After `Ending.LOST` every further one is lost too."""
        if self._is_lost:
            return Outcome(ending=Ending.LOST)
        try:
            self._connection.settimeout(self._options.limits.wall_s + MARGIN_S)
            wire.send(self._connection, {"kind": type(task).__name__, **asdict(task)})
            header, (stdout, stderr, answer) = wire.receive(self._connection)
        except (ConnectionError, TimeoutError) as error:
            self._is_lost = True
            if isinstance(error, TimeoutError):
                self._kill()
            return Outcome(ending=Ending.LOST)
        header["ending"] = Ending(header["ending"])
        return Outcome(**header, stdout=stdout, stderr=stderr, answer=answer)

    def close(self) -> None:
        """Wait until every process of the program has ended; end them if they take too long."""
        with self._connection:
            try:
                self._connection.shutdown(socket.SHUT_WR)
                self._connection.settimeout(MARGIN_S)
                self._wait_for_end()
            except TimeoutError:
                self._kill()
                self._wait_for_end()
            except ConnectionError:
                pass
        if self._options.isolation is Isolation.LIMITS_ONLY:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _kill(self) -> None:
        """Only while the connection is open: then the keeper is alive, and its number its own."""
        os.kill(self.keeper, signal.SIGKILL)

    def _wait_for_end(self) -> None:
        while self._connection.recv(1 << 16):
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Sandbox:
    """Runs programs, several at a time if several threads ask. Starts its launcher when first needed."""

    def __init__(self, options: SandboxOptions | None = None) -> None:
        self.options = options or SandboxOptions()
        self._scratch = os.path.join(tempfile.gettempdir(), "megarl-sandbox")
        self._lock = threading.Lock()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def program(self, source: str) -> Program:
        """A context with the program shut in; ConfigError if this machine does not let it be."""
        with self._lock:
            if self._launcher is None or self._launcher.poll() is not None:
                self._stop()
                self._start()
            connection = self._ask()
        return self._shut_in(connection, source)

    def close(self) -> None:
        """End the launcher, and every program that it still runs."""
        with self._lock:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self) -> socket.socket:
        """A connection to a new keeper."""
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"p"], [theirs.fileno()])
            except ConnectionError as error:
                ours.close()
                raise WorkerError(_DEAD) from error
        return ours

    def _shut_in(self, connection: socket.socket, source: str) -> Program:
        try:
            program = Program(connection, self.options, self._scratch)
            program.give(source)
        except (ConnectionError, TimeoutError) as error:
            connection.close()
            raise WorkerError(_DEAD) from error
        except ConfigError:
            connection.close()
            raise
        return program

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", "-c", _BOOT, _ROOT, str(theirs.fileno()), self._setup()],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._check()

    def _check(self) -> None:
        """An import has to succeed, or what fails here would be taken for failures of programs."""
        try:
            with self._shut_in(self._ask(), "") as program:
                outcome = program.run(Execute(statements="import statistics", token=""))
        except ConfigError:
            self._stop()
            raise
        if not outcome.succeeded:
            self._stop()
            last = outcome.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise ConfigError(
                "the sandbox cannot run a program that does nothing here: it ended with "
                f"{outcome.ending.value}, {last!r}; run on Linux 5.14 or newer, and raise the limits if they are lower "
                "than an interpreter needs"
            )

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
        self._control = self._launcher = None

    def _setup(self) -> str:
        """As `jail/launch.py` reads it."""
        limits = asdict(self.options.limits)
        del limits["output_mib"]
        bounds = {
            **limits,
            "output_bytes": self.options.limits.output_bytes,
            "is_isolated": self.options.isolation is Isolation.NAMESPACES,
        }
        import_paths = [os.path.realpath(path) for path in self.options.import_paths]
        setup = {
            "bounds": bounds,
            "paths": python_paths(import_paths),
            "import_paths": import_paths,
            "scratch": self._scratch,
        }
        return json.dumps(setup)


def _refusal(step: str, reason: str) -> str:
    return (
        f"rewards.code.isolation=namespaces: this machine refuses the step {step!r} ({reason}); {REMEDIES[step]}, or "
        "set rewards.code.isolation=limits_only, which protects neither files nor the network from programs"
    )
