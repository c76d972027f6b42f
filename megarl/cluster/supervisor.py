"""Keep a run going when engines die: start new ones, sync the policy, and resubmit unfinished requests."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from megarl.cluster import offloading
from megarl.cluster.engines import EngineGroup
from megarl.errors import EngineDiedError, RunError
from megarl.host import loop
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.source import Doing, generating


class WeightSync(Protocol):
    """Brings the weights to all engines, and does not survive the replacement of one; see `BridgeSync`."""

    def push(self, version: int, *, verify: bool) -> dict[str, float]: ...

    def close(self) -> None: ...


class EngineSupervisor:
    """A supervisor of a run's engines. It restarts engines that die, and keeps all of them in sync with the policy.

    When an engine dies, the living engines take over its unfinished requests at once, and a new engine replaces it
    before the next weight sync, or at once if no engine lives. With `deterministic` no engine takes requests over: the
    dead engine is replaced when the living ones have finished theirs, and the new engine repeats its requests. Before a
    replacement, `placement.offload` moves trainer and engines off the devices. Afterwards a new `WeightSync` sends the
    policy to all engines, so that none ever has to handle a replacement.

    restart_engine: replaces the engine with a given index. open_sync: returns a new `WeightSync`; called when the actor
    is on the devices. max_restarts: how many deaths of engines the run survives. deterministic: a new engine gets the
    same batch of requests as the one that it replaces, for bitwise equal results.
    """

    def __init__(
        self,
        engines: EngineGroup,
        restart_engine: Callable[[int], None],
        ledger: offloading.MemoryLedger,
        open_sync: Callable[[], WeightSync],
        *,
        max_restarts: int,
        deterministic: bool,
        verify: bool,
    ) -> None:
        self._engines, self._restart_engine, self._ledger, self._open_sync = engines, restart_engine, ledger, open_sync
        # All processes of a cluster share one roster.
        self._roster = engines.processes[0].roster
        self._deterministic, self._verify = deterministic, verify
        ledger.refill = self._refill
        self._sync: WeightSync | None = None
        self._is_outdated = False
        self._version, self._num_reported = 0, 0
        # By engine: (start, end) in Unix seconds of the times in which it was at work, as `metrics` found them.
        self.busy: dict[str, list[tuple[float, float]]] = {}
        engines.repeats_batches = deterministic
        # An earlier run on this cluster may have ended early.
        engines.abort()
        self._roster.allow_restarts([process.name for process in engines.processes], max_restarts)

    def push(self, version: int, *, verify: bool = False) -> dict[str, float]:
        """Restart lost engines, and send the current weights to all engines as `version`; see `WeightSync.push`.

        Unfinished requests of lost engines begin again afterwards. verify: compare checksums, also without sync.verify.
        """
        self._version, self._is_outdated = version, False
        orphans: set[int] = set()
        while True:
            try:
                if self._roster.lost:
                    # Once an engine has been replaced, nothing tells its predecessor's requests from its own.
                    orphans.update(self._engines.orphans())
                    self.close()
                    self._ledger.enter(offloading.LOAD)
                    for index, process in enumerate(self._engines.processes):
                        if process.name in self._roster.lost:
                            self._restart_engine(index)
                self._ledger.enter(offloading.SYNC)
                if self._sync is None:
                    self._sync = self._open_sync()
                metrics = self._sync.push(version, verify=verify or self._verify)
                break
            except EngineDiedError:
                # Engines may now have some, all or none of the new weights: start over and send all of them everything.
                continue
        if orphans:
            self._ledger.enter(offloading.GENERATE)
        for engine in sorted(orphans):
            self._engines.start_again(engine, exactly=self._deterministic)
        self._engines.flush()
        return metrics

    def restart_dead_engines(self) -> None:
        """Start new engines in place of dead ones now, for runs without further syncs; the living ones go on.

        With `placement.offload`, engines that generate would have to sleep: then nothing is done unless all are idle.
        """
        if self._roster.lost and (not self._ledger.enabled or self._engines.are_idle(self._engines.living())):
            self._bring_back()

    def outdate(self) -> None:
        """Note that the policy is about to change: until the next `push`, nobody has the weights of the engines.

        A new engine could only get newer ones. Where no living engine may take over from one that dies, `wait` then
        returns early, and the push begins the requests again.
        """
        self._is_outdated = True

    def generate(self, request: GenerationRequest) -> "asyncio.Future[Completion]":
        """Queue a request for the living engines; see `EngineGroup.generate`."""
        return self._engines.generate(request)

    def wait(self, work: "asyncio.Future[None]", *, timeout_s: float, doing: Doing = generating) -> None:
        """Wait for `work`, while engines and environment workers that die are replaced, and requests of dead engines
        begin again.
        """
        engines = self._engines
        while not work.done():
            loop.wait(engines.attend(work, timeout_s=timeout_s, doing=doing))
            engines.trouble.clear()
            if engines.environment_workers is not None:
                engines.environment_workers.mend()
            living = engines.living()
            # With the memory of ranks and engines shared, no engine may be at work when one starts.
            is_due = engines.are_missed() or (engines.orphans() and (self._deterministic or not living))
            if is_due and engines.are_idle(living):
                if self._is_outdated:
                    return
                self._bring_back()
        work.result()

    def parts(self) -> "dict[asyncio.Future[Completion], Completion]":
        """Return the tokens so far of all unfinished requests; see `EngineGroup.parts`."""
        return self._engines.parts()

    def metrics(self) -> dict[str, float]:
        """Return metrics of the engines' work since the last call, which also renews `busy`.

        rollout/engine_restarts; rollout/moved (samples that went on at another engine); over all engines:
        rollout/request_errors (requests that vLLM ended with an error), perf/engine_steps (decode steps),
        perf/engine_sequences (sequences in these steps, added up), perf/engine_busy_s and perf/engine_idle_s (time
        within steps and between them), perf/recomputed_tokens (tokens of unfinished requests whose keys and values an
        update dropped), engine/prefix_hit_frac (share of the prompt tokens of requests that began which prefix caches
        had; only if any began); and what `EnvironmentWorkers.metrics` says, if there are any.
        """
        before, self._num_reported = self._num_reported, self._roster.num_restarts
        num_moved, self._engines.num_moved = self._engines.num_moved, 0
        work, now = self._engines.work(), time.time()
        self.busy = {str(engine): each.busy for engine, each in work.items()}
        busy_s = sum(end - start for times in self.busy.values() for start, end in times)
        environments = self._engines.environment_workers
        num_prompt_tokens = sum(each.prompt_tokens for each in work.values())
        num_cached_tokens = sum(each.cached_tokens for each in work.values())
        return {
            "rollout/engine_restarts": float(self._num_reported - before),
            "rollout/request_errors": float(sum(each.num_errors for each in work.values())),
            "rollout/moved": float(num_moved),
            "perf/engine_steps": float(sum(each.num_steps for each in work.values())),
            "perf/engine_sequences": float(sum(each.num_sequences for each in work.values())),
            "perf/engine_busy_s": busy_s,
            "perf/engine_idle_s": max(0.0, sum(now - each.began for each in work.values()) - busy_s),
            "perf/recomputed_tokens": float(sum(each.recomputed_tokens for each in work.values())),
            **({"engine/prefix_hit_frac": num_cached_tokens / num_prompt_tokens} if num_prompt_tokens else {}),
            **(environments.metrics() if environments is not None else {}),
        }

    def close(self) -> None:
        """Close the weight sync, which removes its shared memory."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    def _refill(self) -> None:
        """Send engines the weights that they dropped. RunError: the policy has moved on from them."""
        if self._is_outdated:
            raise RunError(
                f"engines dropped the weights of version {self._version} to make room for the trainer, and the policy "
                "has moved on; send the new ones first (`Session.snapshot`), or set placement.offload=false"
            )
        self.push(self._version)

    def _bring_back(self) -> None:
        """Restart lost engines, sync all engines so that they generate with the same weights as before, and begin the
        lost engines' unfinished requests again.
        """
        self.push(self._version)
        self._ledger.enter(offloading.GENERATE)
