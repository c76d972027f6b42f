"""The engines of a run, called together; and how a run goes on when engines die.

`EngineGroup` belongs to a cluster. `EngineSupervisor` belongs to one run on it: new engines take the seats of those
that died, get the policy, and finish what these had begun.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.cluster import residency
from megarl.cluster.bridge import BridgeSync
from megarl.cluster.processes import wait_all, wait_living, wait_streams
from megarl.cluster.roster import Process
from megarl.errors import EngineDiedError
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.vllm_source import OnCompletion
from megarl.types import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A batch that engines are working on: per engine, the positions of its requests, and the pending answers."""

    requests: tuple[GenerationRequest, ...]
    hands: tuple[tuple[int, ...], ...]
    calls: tuple[tuple[Process, Any], ...]


def deal_requests(requests: Sequence[GenerationRequest], num_engines: int) -> list[list[int]]:
    """Positions of the requests that each engine takes.

    Requests with the same prompt go to one engine, for its prefix cache; prompts are dealt out in turn. With fewer
    prompts than engines the requests themselves are.
    """
    prompts = {request.token_ids: i for i, request in enumerate({r.token_ids: r for r in requests}.values())}
    by_prompt = len(prompts) >= num_engines
    hands: list[list[int]] = [[] for _ in range(num_engines)]
    for position, request in enumerate(requests):
        turn = prompts[request.token_ids] if by_prompt else position
        hands[turn % num_engines].append(position)
    return hands


def deal_again(submission: Submission, finished: Collection[int], *, exactly: bool) -> list[list[int]]:
    """Positions of the requests that each engine takes after some died with theirs unfinished.

    exactly: in batches that are the same as before, which finished requests are part of.
    """
    if exactly:
        return [list(hand) if set(hand) - set(finished) else [] for hand in submission.hands]
    left = [position for position in range(len(submission.requests)) if position not in finished]
    dealt = deal_requests([submission.requests[position] for position in left], len(submission.hands))
    return [[left[i] for i in hand] for hand in dealt]


class EngineGroup:
    """The engines, each holding a full copy of the policy.

    Every request has its own seed, so what is sampled does not depend on how many engines there are.
    """

    def __init__(self, processes: Sequence[Process], *, timeout_s: float) -> None:
        self.processes, self._timeout_s = list(processes), timeout_s

    def submit(self, requests: Sequence[GenerationRequest], hands: Sequence[Sequence[int]] | None = None) -> Submission:
        """Start generating. `hands`: positions of the requests that each engine takes (default: `deal_requests`)."""
        hands = deal_requests(requests, len(self.processes)) if hands is None else hands
        calls = [
            (p, p.actor.stream.options(num_returns="streaming").remote([requests[i] for i in hand]))
            for p, hand in zip(self.processes, hands, strict=True)
            if hand
        ]
        return Submission(requests=tuple(requests), hands=tuple(map(tuple, hands)), calls=tuple(calls))

    def collect(self, submission: Submission, on_finished: OnCompletion, *, timeout_s: float) -> None:
        """Wait for all completions, but of engines that die and can be restarted. `on_finished` gets each, with the
        position of its request, once it is there.
        """
        hands = [hand for hand in submission.hands if hand]

        def take(call: int, part: Mapping[int, Completion]) -> None:
            for place, completion in part.items():
                on_finished(hands[call][place], completion)

        wait_streams(submission.calls, take, timeout_s=timeout_s, doing="generating")

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]], *, engine: int = 0) -> list[FloatArray]:
        """One engine's log-probs of given sequences (temperature 1)."""
        process = self.processes[engine]
        call = process.actor.call.remote("prompt_logprobs", [list(s) for s in sequences])
        return wait_all([(process, call)], timeout_s=self._timeout_s, doing="scoring with the engine")[0]

    def sleep(self) -> None:
        """Drop weights and KV caches, on platforms whose engines can."""
        self._move("sleep", doing="putting engines to sleep")

    def wake(self, parts: Sequence[str]) -> None:
        """Bring back `weights` (to be synced next) or `kv_cache`."""
        self._move("wake", list(parts), doing="waking engines")

    def _move(self, method: str, *args: Any, doing: str) -> None:
        # An engine that died has nothing to move.
        calls = [(p, p.actor.call.remote(method, *args)) for p in self.processes]
        wait_living(calls, timeout_s=self._timeout_s, doing=doing)


class EngineSupervisor:
    """The engines of one run, with the policy that they generate by.

    Engines are restarted at two points where none is at work: before a sync, and when all living ones have finished
    their part of a batch. The devices are then emptied as for the first start, and a new transport carries the policy
    to all engines, so that no transport needs to know of restarts.

    restart_engine: replaces the engine in a seat. open_sync: opens a transport to the current engines; called when the
    actor is on the devices. max_restarts: so many deaths of engines do not end the run. deterministic: what is
    unfinished is submitted again in the same batches as before, for the same bits.
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
        """Make all engines generate with the trainer's current weights, as `version`; metrics of `BridgeSync.push`."""
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
                # Others have part of the weights, or the new ones: all get everything.
                continue

    def submit(self, requests: Sequence[GenerationRequest]) -> Submission:
        """`EngineGroup.submit`."""
        if self._roster.lost:
            self._bring_back()
        return self._engines.submit(requests)

    def collect(self, submission: Submission, on_finished: OnCompletion, *, timeout_s: float) -> None:
        """`EngineGroup.collect`, of everything; `timeout_s` is for what lies between two restarts."""
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
        """Restarts since the last call."""
        before, self._num_reported = self._num_reported, self._roster.num_restarts
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
