"""Keep track of the processes of a run: where they run, and which of them may die without ending the run."""

import asyncio
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from megarl.errors import EngineDiedError, WorkerError
from megarl.record.progress import write_line

if TYPE_CHECKING:
    from megarl.cluster.remotes import Process, Remote


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The host and devices of a process. `host`: Ray's id of the host; `files`: the directory on this host in which
    the process leaves its Python stacks and its stage; `device_ids`: ids of the devices that Ray gave the process;
    `further_hosts`: the hosts of an engine's other nodes.
    """

    host: str
    address: str
    device_ids: tuple[str, ...]
    hostname: str = ""
    pid: int = 0
    files: str = ""
    further_hosts: tuple[str, ...] = ()

    def host_of(self, worker: int, num_workers: int) -> str:
        """Return the host of one of an engine's workers, which are spread evenly over its nodes."""
        hosts = (self.host, *self.further_hosts)
        return hosts[worker * len(hosts) // num_workers]


NOWHERE = Location(host="", address="", device_ids=())


class Roster:
    """The list of a run's processes, by name. Some can be replaced when they die; the death of any other ends the run.

    living: processes that are not known to be dead. lost: dead processes that are to be replaced. num_restarts: the
    number of replacements so far, including those still to come for `lost`. watched: processes that answer questions
    while they work, and count as hung if they do not for `silence_s` seconds. asked: questions that have no answer yet,
    with the process and the time (`time.monotonic`) of the question. next_look: when a wait should look for deaths
    again.
    """

    def __init__(self) -> None:
        self.living: dict[str, Process[Remote]] = {}
        self._replaceable: frozenset[str] = frozenset()
        self._max_restarts = 0
        self.lost: dict[str, Process[Remote]] = {}
        self.num_restarts = 0
        self.watched: dict[str, Process[Remote]] = {}
        self.silence_s = math.inf
        self.asked: dict[asyncio.Future[list[int]], tuple[Process[Remote], float]] = {}
        self.next_look = 0.0

    def enter(self, process: "Process[Remote]") -> None:
        """Add a process, replacing the lost one of the same name if there is one."""
        self.living[process.name] = process
        self.lost.pop(process.name, None)

    def expect_answers(self, process: "Process[Remote]", *, within_s: float) -> None:
        """From now on, take this process for hung if it does not answer a question within so many seconds."""
        self.watched[process.name], self.silence_s = process, within_s

    def allow_restarts(self, names: Collection[str], max_restarts: int) -> None:
        """From now on, survive up to `max_restarts` deaths among the processes `names`, all together."""
        self._replaceable, self._max_restarts, self.num_restarts = frozenset(names), max_restarts, 0

    def report_death(self, process: "Process[Remote]", event: str) -> WorkerError:
        """Record a death and print a warning; return the error, an `EngineDiedError` if the process can be replaced.

        event: text that says what the run was doing and which process died.
        """
        message = f"{event}; see RUN/logs"
        if process.name in self._replaceable and self.living.get(process.name) != process:
            return EngineDiedError(message)  # a process that was already reported dead
        if process.name not in self._replaceable or self.num_restarts == self._max_restarts:
            return WorkerError(message)
        self.num_restarts += 1
        self.lost[process.name] = self.living.pop(process.name)
        # An engine survives the death of its workers: kill it, so that calls to it fail.
        ray.kill(process.actor)
        where = f"on {process.location.hostname or 'its host'}"
        write_line(f"warning: {event} {where}; restart {self.num_restarts} of {self._max_restarts}")
        return EngineDiedError(message)
