"""How engines are made: the first of each seat, and those that take the place of one that died."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray

from megarl.cluster.actors import EngineActor, RunActor
from megarl.cluster.placement import Reservation, Seat
from megarl.cluster.processes import wait_all
from megarl.cluster.roster import Process
from megarl.config.schema import Config
from megarl.rollout.engine import engine_spec


def create_actor(cls: type[RunActor], reservation: Reservation, seat: Seat, *args: Any) -> Any:
    """Create an actor in its seat, without waiting until it has started."""
    remote = ray.remote(concurrency_groups=dict(cls.concurrency_groups))(cls)
    return remote.options(**reservation.options(seat)).remote(*args)


def engine_pids(name: str, pids: Sequence[int]) -> dict[str, int]:
    """Map the names of an engine's processes to their ids, the engine itself first."""
    pid, *workers = pids
    return {name: pid} | {f"{name} worker {i}": worker for i, worker in enumerate(workers)}


class EngineSeats:
    """The seats of the engines, and what an engine starts with.

    devices_of: the devices of trainer ranks that a seat shares, once these have started.
    """

    def __init__(
        self, config: Config, seats: Sequence[Seat], reservation: Reservation, devices_of: Callable[[Seat], list[str]]
    ) -> None:
        self._config, self._seats, self._reservation = config, list(seats), reservation
        self._devices_of = devices_of

    @property
    def shares(self) -> list[tuple[int, ...]]:
        """Of each engine the trainer ranks whose devices it uses."""
        return [seat.shares for seat in self._seats]

    def create(self) -> dict[str, Any]:
        """Create the actors of all engines, by name."""
        return {f"engine {i}": create_actor(EngineActor, self._reservation, seat) for i, seat in enumerate(self._seats)}

    def begin(self, index: int, process: Process, *, predecessor: Sequence[int] = ()) -> Any:
        """Let an engine start, as soon as the processes of its predecessor have ended; returns at once."""
        devices = self._devices_of(self._seats[index])
        return process.actor.start.remote(engine_spec(self._config), devices, predecessor)

    def restart(self, index: int, lost: Process, pids: Sequence[int]) -> tuple[Process, list[int]]:
        """Start an engine in place of a lost one, whose processes were `pids`; return it and its process ids.

        It has the weights that are on disk. Where engines sleep, it does, as the others have to by then.

        Raises:
            EngineDiedError: the new one died as well.
        """
        process = replace(lost, actor=create_actor(EngineActor, self._reservation, self._seats[index]))
        process.roster.enter(process)
        process = replace(process, location=self._ask(process, process.actor.locate.remote()))
        process.roster.enter(process)
        new_pids: list[int] = self._ask(process, self.begin(index, process, predecessor=pids))
        if self._config.placement.offload:
            self._ask(process, process.actor.call.remote("sleep"))
        return process, new_pids

    def _ask(self, process: Process, call: Any) -> Any:
        timeout_s = self._config.cluster.start_timeout_s
        (answer,) = wait_all([(process, call)], timeout_s=timeout_s, doing=f"restarting {process.name}")
        return answer
