"""Move models between device and host memory in each phase of a step, where trainer and engines share devices.

A phase, such as generation, lists the parts of memory that it needs on the devices, such as `actor.params`. Before a
phase, unneeded parts are moved off the devices first and missing parts back second, so that two successive phases never
use more memory than the larger one. After an update the order is: wake the engines' weights → sync → offload the
trainer → wake the KV caches.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.types.messages import Part, Role, RoleSpec

if TYPE_CHECKING:
    from megarl.cluster.engines import EngineGroup
    from megarl.cluster.workers import RoleWorkers

ENGINE = "engine"
WEIGHTS, KV_CACHE = "weights", "kv_cache"


@dataclass(frozen=True, slots=True, order=True)
class Resident:
    """The name of a part of device memory, such as `actor.params`: its owner (a role or the engines) and the part."""

    owner: str
    part: str

    def __str__(self) -> str:
        return f"{self.owner}.{self.part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of a step (such as generation), with the parts of memory that must be on the devices during it."""

    name: str
    needs: frozenset[Resident]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A transfer of parts of one role's or the engines' memory, off the devices or (`to_device`) back to them."""

    owner: str
    parts: tuple[str, ...]
    to_device: bool

    def __str__(self) -> str:
        return f"{'onload' if self.to_device else 'offload'} {self.owner}.{'+'.join(self.parts)}"


def parts_of(owner: str, parts: Iterable[str]) -> frozenset[Resident]:
    """Return parts of one owner's memory, such as `params` of the actor, each as a `Resident`."""
    return frozenset(Resident(owner, str(part)) for part in parts)


def built_parts(roles: Sequence[RoleSpec]) -> frozenset[Resident]:
    """Return the parts of memory that loading the roles' models fills on the devices."""
    own = [role for role in roles if role.has_memory]
    return frozenset().union(*(parts_of(r.role, Part if r.trainable else [Part.PARAMS]) for r in own))


_ENGINE_PARTS = parts_of(ENGINE, [WEIGHTS, KV_CACHE])
LOAD = Phase(name="load", needs=frozenset())
GENERATE = Phase(name="generate", needs=_ENGINE_PARTS)
SYNC = Phase(name="sync", needs=parts_of(Role.ACTOR, [Part.PARAMS]) | parts_of(ENGINE, [WEIGHTS]))


def _params(role: Role, memory: Sequence[Role]) -> frozenset[Resident]:
    return frozenset().union(*(parts_of(each, [Part.PARAMS]) for each in memory or (role,)))


def forward(role: Role, memory: Sequence[Role] = ()) -> Phase:
    """Return the phase in which a role's model only computes outputs, and needs just its parameters.

    memory: the roles in whose memory these are, if not its own alone.
    """
    return Phase(name=f"score {role}", needs=_params(role, memory))


def updating(role: Role, memory: Sequence[Role] = (), roles: Sequence[RoleSpec] = ()) -> Phase:
    """Return the phase in which a role is trained, and needs its parameters, gradients and optimizer.

    memory: as in `forward`. roles: those of the run, of which some compute in the update, or follow it, and need
    their parameters.
    """
    beside = (_params(each.role, each.memory) for each in roles if each.is_beside(role))
    return Phase(name=f"update {role}", needs=parts_of(role, Part).union(_params(role, memory), *beside))


def accumulating(role: Role, memory: Sequence[Role] = ()) -> Phase:
    """Return the phase in which gradients of a role are accumulated, for a later optimizer step.

    memory: as in `forward`.
    """
    return Phase(name=f"accumulate {role}", needs=parts_of(role, [Part.PARAMS, Part.GRADS]) | _params(role, memory))


def exporting(role: Role, memory: Sequence[Role] = ()) -> Phase:
    """Return the phase in which a role's weights are written as a model directory. memory: as in `forward`."""
    return Phase(name=f"export {role}", needs=_params(role, memory))


def checkpointing(roles: Sequence[RoleSpec]) -> Phase:
    """Return the phase in which every role whose weights change is written to a checkpoint."""
    trained = [parts_of(r.role, [Part.PARAMS, Part.OPTIMIZER]) for r in roles if r.trainable]
    averages = [parts_of(r.role, [Part.PARAMS]) for r in roles if r.update_rate is not None]
    return Phase(name="checkpoint", needs=frozenset().union(*trained, *averages))


def step_phases(roles: Sequence[RoleSpec]) -> list[Phase]:
    """Return a step's phases in order: generation, a forward pass of every role, updates of trained roles, weight
    sync.
    """
    others_first = (*roles[1:], roles[0])
    trained = [updating(r.role, r.memory, roles) for r in others_first if r.trainable]
    passes = [forward(r.role, r.memory) for r in others_first if r.in_update_of is None]
    return [GENERATE, *passes, *trained, SYNC]


def plan_moves(resident: frozenset[Resident], phase: Phase) -> list[Move]:
    """List the moves that must precede a phase, one per owner and direction: those off the devices come first."""
    leaving = resident - phase.needs
    if leaving & _ENGINE_PARTS:
        # Engines that sleep drop everything.
        leaving |= resident & _ENGINE_PARTS
    return [
        Move(owner=owner, parts=tuple(sorted(p.part for p in parts if p.owner == owner)), to_device=to_device)
        for parts, to_device in ((leaving, False), (phase.needs - (resident - leaving), True))
        for owner in sorted({part.owner for part in parts})
    ]


def phase_table(resident: frozenset[Resident], phases: Sequence[Phase]) -> list[str]:
    """Format a table with a line per phase: the moves before the phase, and what is on the devices during it."""
    lines = []
    for phase in phases:
        moves = ", ".join(map(str, plan_moves(resident, phase))) or "-"
        resident = phase.needs
        lines.append(f"{phase.name:<16} | {moves:<64} | {', '.join(map(str, sorted(resident))) or '-'}")
    return [f"{'phase':<16} | {'moves before it':<64} | on the devices", *lines]


class MemoryLedger:
    """A record of which models are in device memory. It carries out the moves of each phase, if `enabled`.

    pauses: whether engines may have unfinished requests when another phase begins, which then wait for the next one in
    which engines generate. refill: sends engines their weights again, for which it enters `SYNC`. Engines that slept
    have dropped them, and a phase that is not of a step, such as a checkpoint's, may end their sleep without a sync.
    """

    refill: Callable[[], object] | None = None

    def __init__(self, workers: "RoleWorkers", engines: "EngineGroup", *, enabled: bool, pauses: bool = False) -> None:
        self._workers, self._engines, self.enabled, self._pauses = workers, engines, enabled, pauses
        # Engines are awake after they have started.
        self.resident = _ENGINE_PARTS
        self._have_weights = True
        self._released: dict[str, int] = {}

    def enter(self, phase: Phase) -> None:
        """Move memory so that exactly the parts that a phase needs are on the devices."""
        if self._pauses and phase is not GENERATE:
            self._engines.pause()
        if self.enabled:
            if phase is GENERATE and not self._have_weights and self.refill is not None:
                self.refill()
            self._carry_out(phase)
            self._have_weights |= phase is SYNC
        if self._pauses and phase is GENERATE:
            self._engines.resume()

    def _carry_out(self, phase: Phase) -> None:
        for move in plan_moves(self.resident, phase):
            if move.owner == ENGINE:
                if move.to_device:
                    self._engines.wake(move.parts)
                else:
                    self._have_weights &= not self._engines.sleep()
                continue
            role, parts = Role(move.owner), [Part(part) for part in move.parts]
            if move.to_device:
                self._workers.onload(role, parts)
            else:
                self._released[role] = self._released.get(role, 0) + self._workers.offload(role, parts)
        self.resident = phase.needs

    def add(self, parts: frozenset[Resident]) -> None:
        """Record parts that were just built on the devices."""
        self.resident |= parts

    def metrics(self) -> dict[str, float]:
        """Return how many GiB of device memory each role gave up since the last call."""
        metrics = {f"memory/offloaded_gib/{owner}": num / 2**30 for owner, num in self._released.items()}
        self._released = {}
        return metrics
