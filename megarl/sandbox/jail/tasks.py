"""Run the tasks of one program, each in a child process of its own that starts from the same state."""

import os
import signal
import socket
from collections.abc import Sequence
from typing import Any, NoReturn

from megarl.sandbox import wire
from megarl.sandbox.jail.processes import Family
from megarl.sandbox.jail.program import Child
from megarl.sandbox.jail.rights import MIB, Bounds
from megarl.sandbox.jail.scratch import Scratch
from megarl.sandbox.jail.watch import Stream, watch

_STDERR_KEPT = 4096


def serve_tasks(
    connection: socket.socket, bounds: Bounds, family: Family, scratch: Scratch, import_paths: Sequence[str]
) -> NoReturn:
    """Answer tasks until the outer side closes the connection, then exit."""
    try:
        _, (source,) = wire.receive(connection)
        while True:
            task, _ = wire.receive(connection)
            scratch.renew()
            streams, others = _pipes(task, bounds)
            child = os.fork()
            if child == 0:
                Child(
                    source=source.decode("utf-8", "surrogatepass"),
                    task=task,
                    streams=others,
                    directory=scratch.path,
                    import_paths=import_paths,
                    bounds=bounds,
                ).run()
            for fd in others:
                os.close(fd)
            header = _finish(child, family, streams, bounds)
            wire.send(connection, header, *(bytes(stream.data) for stream in streams))
    except ConnectionError:
        scratch.remove()
        os._exit(0)


def _pipes(task: dict[str, Any], bounds: Bounds) -> tuple[list[Stream], list[int]]:
    """Make the pipes of a task: this process's ends (output, errors, answer), and the child's ends (input first)."""
    text = task.pop("text", "").encode("utf-8", "surrogatepass")
    given = os.memfd_create("input")
    with open(given, "wb", closefd=False) as file:
        file.write(text)
    os.lseek(given, 0, os.SEEK_SET)
    pairs = [os.pipe() for _ in range(3)]
    keeps = (None, _STDERR_KEPT, None)
    streams = [
        Stream(reader, limit=bounds.output_bytes, keep=keep) for (reader, _), keep in zip(pairs, keeps, strict=True)
    ]
    return streams, [given, *(writer for _, writer in pairs)]


def _finish(child: int, family: Family, streams: Sequence[Stream], bounds: Bounds) -> dict[str, Any]:
    """Wait for the child, kill it and everything that it started, and return the outcome of the task."""
    ending = watch(
        child,
        streams,
        wall_s=bounds.wall_s,
        is_over_memory=lambda: family.resident_bytes() > bounds.memory_mib * MIB,
    )
    status, usage = family.end(child)
    for stream in streams:
        stream.drain()
    cpu_s = usage.ru_utime + usage.ru_stime
    code = os.waitstatus_to_exitcode(status)
    if ending is None and any(stream.is_over for stream in streams):
        ending = "output"
    if ending is None and code < 0:
        over_cpu = -code == signal.SIGXCPU or (-code == signal.SIGKILL and cpu_s >= bounds.cpu_s)
        ending = "cpu_time" if over_cpu else "signalled"
    return {
        "ending": ending or "exited",
        "exit_code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "cpu_s": cpu_s,
    }
