"""Run the tasks of one program, each in a child process of its own that starts from the same state. Only cells follow
one another in the same child.
"""

import fcntl
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from megarl_sandbox import wire
from megarl_sandbox.jail.channel import Channel
from megarl_sandbox.jail.processes import ProcessFamily
from megarl_sandbox.jail.program import PROGRAM_ENDED, Child
from megarl_sandbox.jail.rights import MIB, Bounds
from megarl_sandbox.jail.scratch import Scratch
from megarl_sandbox.jail.watch import OutputStream, has_ended, watch

_STDERR_KEPT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A task that was started: the program, what decides its end, and the streams of output, errors and answer.

    cells: the descriptor through which an interpreter of cells gets them.
    """

    program: int
    judge: int
    streams: Sequence[OutputStream]
    cells: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Everything that the tasks of a program have in common."""

    connection: socket.socket
    bounds: Bounds
    family: ProcessFamily
    scratch: Scratch
    import_paths: Sequence[str]

    def serve(self) -> NoReturn:
        """Answer tasks until the outer side closes the connection, then exit."""
        waiting: _Running | None = None
        try:
            _, (source,) = wire.receive(self.connection)
            while True:
                task, _ = wire.receive(self.connection)
                is_cell = task["kind"] == "Cell"
                if waiting is not None and not is_cell:
                    self._end(waiting, None)
                    waiting = None
                if waiting is None:
                    self.scratch.renew()
                running = waiting or self._start(source.decode("utf-8", "surrogatepass"), task)
                header = self._run_cell(running, task["code"]) if is_cell else self._end(running, self._watch(running))
                waiting = running if header["ending"] == "waits" else None
                wire.send(self.connection, header, *(bytes(stream.data) for stream in running.streams))
        except ConnectionError:
            self.scratch.remove()
            os._exit(0)

    def _start(self, source: str, task: dict[str, Any]) -> _Running:
        """Start what a task needs."""
        given = _input(task.pop("text", ""))
        pairs = [os.pipe() for _ in range(3)]
        keeps = (None, _STDERR_KEPT, None)
        streams = [
            OutputStream(reader, limit=self.bounds.output_bytes, keep=keep)
            for (reader, _), keep in zip(pairs, keeps, strict=True)
        ]
        (_, output), (_, errors), (_, answer) = pairs
        opened = [given, output, errors, answer]
        cells: int | None = None

        keeper = os.getpid()

        def fork(run: Callable[[Child], NoReturn], others: Sequence[int]) -> int:
            child = os.fork()
            if child == 0:
                run(
                    Child(
                        source=source,
                        task=task,
                        streams=others,
                        directory=self.scratch.path,
                        import_paths=self.import_paths,
                        bounds=self.bounds,
                        keeper=keeper,
                    )
                )
            return child

        if task["kind"] == "Check":
            requests, responses, nothing = os.pipe(), os.pipe(), os.open("/dev/null", os.O_RDWR)
            opened += [*requests, *responses, nothing]
            program = fork(Child.run_program, [given, output, errors, requests[0], responses[1]])
            # Its text comes through the connection, so that the program has never been near it.
            fds = [nothing, nothing, nothing, answer, responses[0], requests[1], self.connection.fileno()]
            judge = fork(Child.run_tests, fds)
        elif task["kind"] == "Cell":
            reader, cells = os.pipe()
            opened.append(reader)
            program = judge = fork(Child.run_program, opened)
        else:
            program = judge = fork(Child.run_program, opened)
        for fd in opened:
            os.close(fd)
        return _Running(program=program, judge=judge, streams=streams, cells=cells)

    def _run_cell(self, running: _Running, code: str) -> dict[str, Any]:
        """Have an interpreter run a cell. Until the next one, all its processes stand still."""
        assert running.cells is not None
        self.family.send(signal.SIGCONT)
        for stream in running.streams:
            stream.empty()
        with suppress(BrokenPipeError):
            Channel(-1, running.cells, limit=0).send({"code": code})
        answer = running.streams[2]
        ending = self._watch(running, is_done=lambda: bool(answer.data))
        if ending is None and answer.data:
            self.family.send(signal.SIGSTOP)
            for stream in running.streams:
                stream.drain()
            if not any(stream.is_over for stream in running.streams):
                return {"ending": "waits", "exit_code": answer.data[0]}
        return self._end(running, ending)

    def _watch(self, running: _Running, *, is_done: Callable[[], bool] = lambda: False) -> str | None:
        return watch(running.judge, running.streams, wall_s=self.bounds.wall_s, excess=self._excess, is_done=is_done)

    def _end(self, running: _Running, ending: str | None) -> dict[str, Any]:
        """Kill everything that was started, and return the header of the task's outcome.

        ending: the limit that the task went over, if any.
        """
        # Where the test ended because the program had, the program's end is the outcome.
        is_over = _exit_code_of(running.judge) == PROGRAM_ENDED and has_ended(running.program)
        decisive = running.program if is_over else running.judge
        ended = self.family.end()
        for stream in running.streams:
            stream.drain()
            os.close(stream.fd)
        if running.cells is not None:
            os.close(running.cells)
        status, usage = ended[decisive]
        cpu_s = usage.ru_utime + usage.ru_stime
        code = os.waitstatus_to_exitcode(status)
        if ending is None and any(stream.is_over for stream in running.streams):
            ending = "output"
        if ending is None and code < 0:
            over_cpu = -code == signal.SIGXCPU or (-code == signal.SIGKILL and cpu_s >= self.bounds.cpu_s)
            ending = "cpu_time" if over_cpu else "signalled"
        return {
            "ending": ending or "exited",
            "exit_code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "cpu_s": cpu_s,
        }

    def _excess(self) -> str | None:
        """Return of which resource the task holds too much."""
        if self.family.resident_bytes() > self.bounds.memory_mib * MIB:
            return "memory"
        return "output" if self.scratch.is_full(self.family) else None


def _exit_code_of(child: int) -> int | None:
    """Return the exit code of a child that has exited, and leave it to be waited for."""
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return ended.si_status if ended is not None and ended.si_code == os.CLD_EXITED else None


def _input(text: str) -> int:
    """Return a descriptor that reads `text`, and by which nothing can be written."""
    given = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(given, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(given, fcntl.F_ADD_SEALS, seals)
    os.lseek(given, 0, os.SEEK_SET)
    return given
