"""Keep a run going when engines die: start new ones, sync the policy, and resubmit unfinished requests."""

from collections.abc import Callable, Sequence

from megarl.cluster import residency
from megarl.cluster.bridge import BridgeSync
from megarl.cluster.engines import EngineGroup, Submission, deal_again
from megarl.errors import EngineDiedError
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.vllm_source import OnCompletion


class EngineSupervisor:
    """A supervisor of a run's engines. It restarts engines that die, and keeps all of them in sync with the policy.

    Engines are restarted at two points, when no engine is working: before a weight sync, and when all living engines
    have finished their share of a batch. The trainer's memory is first moved off the devices, as when the run started,
    and a new `BridgeSync` then sends the policy to all engines, so that `BridgeSync` itself never has to handle a
    restart.

    restart_engine: replaces the engine with a given index. open_sync: returns a new `BridgeSync`; called when the actor
    is on the devices. max_restarts: how many deaths of engines the run survives. deterministic: unfinished requests are
    submitted again in the same batches as before, for bitwise equal results.
    """

    def __init__(
        self,
        engines: EngineGroup,
        restart_engine: Callable[[int], None],
        ledger: residency.MemoryLedger,
        open_sync: Callable[[], BridgeSync],
        *,
        max_restarts: int,
        deterministic: bool,
        verify: bool,
    ) -> None:
        self._engines, self._restart_engine, self._ledger, self._open_sync = engines, restart_engine, ledger, open_sync
        # All processes of a cluster share one roster.
        self._roster = engines.processes[0].roster
        self._deterministic, self._verify = deterministic, verify
        self._sync: BridgeSync | None = None
        self._version, self._num_reported = 0, 0
        self._roster.allow_restarts([process.name for process in engines.processes], max_restarts)

    def push(self, version: int) -> dict[str, float]:
        """Restart lost engines, and send the current weights to all engines as `version`; see `BridgeSync.push`."""
        self._version = version
        while True:
            try:
                if self._roster.lost:
                    self.close()
                    self._ledger.enter(residency.LOAD)
                    for index, process in enumerate(self._engines.processes):
                        if process.name in self._roster.lost:
                            self._restart_engine(index)
                self._ledger.enter(residency.SYNC)
                if self._sync is None:
                    self._sync = self._open_sync()
                return self._sync.push(version, verify=self._verify)
            except EngineDiedError:
                # Engines may now have some, all or none of the new weights: start over and send all of them everything.
                continue

    def submit(self, requests: Sequence[GenerationRequest]) -> Submission:
        """Restart lost engines, and submit requests to all engines; see `EngineGroup.submit`."""
        if self._roster.lost:
            self._bring_back()
        return self._engines.submit(requests)

    def collect(self, submission: Submission, on_finished: OnCompletion, *, timeout_s: float) -> None:
        """Collect all completions, restarting engines that die; `timeout_s` limits the time between two restarts."""
        finished: set[int] = set()

        def finish(position: int, completion: Completion) -> None:
            if position not in finished:
                finished.add(position)
                on_finished(position, completion)

        self._engines.collect(submission, finish, timeout_s=timeout_s)
        while len(finished) < len(submission.requests):
            self._bring_back()
            hands = deal_again(submission, finished, exactly=self._deterministic)
            submission = self._engines.submit(submission.requests, hands)
            self._engines.collect(submission, finish, timeout_s=timeout_s)

    def metrics(self) -> dict[str, float]:
        """Return how many engines were restarted since the last call, as a metric."""
        before, self._num_reported = self._num_reported, self._roster.num_restarts
        return {"rollout/engine_restarts": float(self._num_reported - before)}

    def close(self) -> None:
        """Close the weight sync, which removes its shared memory."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    def _bring_back(self) -> None:
        """Restart lost engines, and sync all engines so that they generate with the same weights as before."""
        self.push(self._version)
        self._ledger.enter(residency.GENERATE)
