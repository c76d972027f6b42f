"""The engines, called together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.processes import Process, wait_all, wait_streams
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.vllm_source import OnCompletion
from megarl.types import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A batch that engines are working on: per engine, the positions of its requests, and the pending answer."""

    positions: tuple[tuple[int, ...], ...]
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


class EngineGroup:
    """The engines, each holding a full copy of the policy.

    Every request has its own seed, so what is sampled does not depend on how many engines there are.
    """

    def __init__(self, processes: Sequence[Process], *, timeout_s: float) -> None:
        self.processes, self._timeout_s = list(processes), timeout_s

    def submit(self, requests: Sequence[GenerationRequest]) -> Submission:
        """Start generating."""
        hands = deal_requests(requests, len(self.processes))
        busy = [(p, hand) for p, hand in zip(self.processes, hands, strict=True) if hand]
        return Submission(
            positions=tuple(tuple(hand) for _, hand in busy),
            calls=tuple((p, _stream(p, [requests[i] for i in hand])) for p, hand in busy),
        )

    def collect(self, submission: Submission, on_finished: OnCompletion, *, timeout_s: float) -> None:
        """Wait for all completions. `on_finished` gets each, with the position of its request, once it is there."""

        def take(call: int, part: Mapping[int, Completion]) -> None:
            for place, completion in part.items():
                on_finished(submission.positions[call][place], completion)

        wait_streams(submission.calls, take, timeout_s=timeout_s, doing="generating")

    def load_weights(self, files: Sequence[Path], *, version: int, with_checksums: bool) -> list[dict[str, int]]:
        """Reload every engine from the files on its host; returns the checksums of all their workers."""
        paths = [str(f) for f in files]
        engines = self._call("load_weights", paths, version=version, with_checksums=with_checksums)
        return [checksums for workers in engines for checksums in workers]

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]], *, engine: int = 0) -> list[FloatArray]:
        """One engine's log-probs of given sequences (temperature 1)."""
        process = self.processes[engine]
        call = process.actor.call.remote("prompt_logprobs", [list(s) for s in sequences])
        return wait_all([(process, call)], timeout_s=self._timeout_s, doing="scoring with the engine")[0]

    def sleep(self) -> None:
        """Drop weights and KV caches, on platforms whose engines can."""
        self._call("sleep")

    def wake(self, parts: Sequence[str]) -> None:
        """Bring back `weights` (to be synced next) or `kv_cache`."""
        self._call("wake", list(parts))

    def _call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        calls = [(p, p.actor.call.remote(method, *args, **kwargs)) for p in self.processes]
        return wait_all(calls, timeout_s=self._timeout_s, doing=_DOING[method])


def _stream(process: Process, requests: Sequence[GenerationRequest]) -> Any:
    return process.actor.stream.options(num_returns="streaming").remote(requests)


_DOING = {
    "load_weights": "syncing weights",
    "sleep": "putting engines to sleep",
    "wake": "waking engines",
}
