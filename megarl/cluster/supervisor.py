"""Engines that may die: new ones take their places, get the policy, and finish what the old ones had begun."""

from collections.abc import Callable, Sequence
from typing import Protocol

from megarl.cluster import residency
from megarl.cluster.engines import EngineGroup, Submission
from megarl.cluster.roster import Roster
from megarl.errors import EngineDiedError
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.vllm_source import OnCompletion
from megarl.sync.seam import PolicySync


class EngineHost(Protocol):
    """What this needs of a `Cluster`."""

    engines: EngineGroup

    @property
    def roster(self) -> Roster: ...

    def restart_engine(self, index: int) -> None: ...


class EngineSupervisor:
    """The engines of one run, with the policy that they generate by.

    Restarts are at two points where no engine is at work: before a sync, and when all that live have finished a batch.
    Then the devices are emptied as for the first start, and a new transport carries the policy to all engines, so that
    no transport needs to know of restarts.

    open_sync: a transport to the engines there are now; called when the actor is on the devices. max_restarts: so many
    deaths of engines do not end the run. deterministic: submit again in the same batches, for the same bits.
    """

    def __init__(
        self,
        host: EngineHost,
        ledger: residency.MemoryLedger,
        open_sync: Callable[[], PolicySync],
        *,
        max_restarts: int,
        deterministic: bool,
        verify: bool,
    ) -> None:
        self._host, self._ledger, self._open_sync = host, ledger, open_sync
        self._deterministic, self._verify = deterministic, verify
        self._sync: PolicySync | None = None
        self._version, self._num_reported = 0, 0
        host.roster.allow_restarts([process.name for process in host.engines.processes], max_restarts)

    def push(self, version: int) -> dict[str, float]:
        """Make all engines generate with the trainer's current weights, as `version`; metrics of `PolicySync.push`."""
        self._version = version
        while True:
            try:
                if self._host.roster.lost:
                    self._restart_lost()
                self._ledger.enter(residency.SYNC)
                if self._sync is None:
                    self._sync = self._open_sync()
                return self._sync.push(version, verify=self._verify)
            except EngineDiedError:
                # Others have part of the weights, or the new ones: all get everything.
                continue

    def submit(self, requests: Sequence[GenerationRequest]) -> Submission:
        """`EngineGroup.submit`."""
        if self._host.roster.lost:
            self._bring_back()
        return self._host.engines.submit(requests)

    def collect(self, submission: Submission, on_finished: OnCompletion, *, timeout_s: float) -> None:
        """`EngineGroup.collect`, of everything; `timeout_s` is for what lies between two restarts."""
        finished: set[int] = set()

        def finish(position: int, completion: Completion) -> None:
            if position not in finished:
                finished.add(position)
                on_finished(position, completion)

        engines = self._host.engines
        engines.collect(submission, finish, timeout_s=timeout_s)
        while len(finished) < len(submission.requests):
            self._bring_back()
            submission = engines.submit_again(submission, finished, exactly=self._deterministic)
            engines.collect(submission, finish, timeout_s=timeout_s)

    def metrics(self) -> dict[str, float]:
        """Restarts since the last call."""
        before, self._num_reported = self._num_reported, self._host.roster.num_restarts
        return {"rollout/engine_restarts": float(self._num_reported - before)}

    def close(self) -> None:
        """Free what the transport holds outside its processes."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    def _bring_back(self) -> None:
        """Generating can go on afterwards, by the same weights."""
        self.push(self._version)
        self._ledger.enter(residency.GENERATE)

    def _restart_lost(self) -> None:
        self.close()
        self._ledger.enter(residency.LOAD)
        for index, process in enumerate(self._host.engines.processes):
            if process.name in self._host.roster.lost:
                self._host.restart_engine(index)
