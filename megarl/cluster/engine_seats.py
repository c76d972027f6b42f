"""Start engines in their places on the cluster, at first and again when one has died."""

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
    """Create the Ray actor of a process in its place (`Seat`), without waiting until it has started."""
    remote = ray.remote(concurrency_groups=dict(cls.concurrency_groups))(cls)
    return remote.options(**reservation.options(seat)).remote(*args)


def engine_pids(name: str, pids: Sequence[int]) -> dict[str, int]:
    """Map the names of an engine's processes to their ids, the engine itself first."""
    pid, *workers = pids
    return {name: pid} | {f"{name} worker {i}": worker for i, worker in enumerate(workers)}


class EngineSeats:
    """The places of the run's engines. An engine is started in each, and another one if it dies.

    devices_of: returns the devices that a seat shares with trainer ranks, once these ranks have started.
    """

    def __init__(
        self, config: Config, seats: Sequence[Seat], reservation: Reservation, devices_of: Callable[[Seat], list[str]]
    ) -> None:
        self._config, self._seats, self._reservation = config, list(seats), reservation
        self._devices_of = devices_of

    @property
    def shares(self) -> list[tuple[int, ...]]:
        """Return, for each engine, the trainer ranks whose devices it uses."""
        return [seat.shares for seat in self._seats]

    def create(self) -> dict[str, Any]:
        """Create the actors of all engines, and return them by name."""
        return {f"engine {i}": create_actor(EngineActor, self._reservation, seat) for i, seat in enumerate(self._seats)}

    def begin(self, index: int, process: Process, *, predecessor: Sequence[int] = ()) -> Any:
        """Make an engine start once the processes of its predecessor have ended. The pending call is returned at
        once.
        """
        devices = self._devices_of(self._seats[index])
        return process.actor.start.remote(engine_spec(self._config), devices, predecessor)

    def restart(self, index: int, lost: Process, pids: Sequence[int]) -> tuple[Process, list[int]]:
        """Start an engine in place of a lost one, whose processes were `pids`; return it and its process ids.

        It has the weights that are on disk. If memory is offloaded it is put to sleep, as the others must be by then.

        Raises:
            EngineDiedError: the new engine died as well.
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
