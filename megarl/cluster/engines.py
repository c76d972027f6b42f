"""Distribute generation requests over the engines of a cluster, and collect the completions."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.cluster.processes import wait_all, wait_living, wait_streams
from megarl.cluster.roster import Process
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.vllm_source import OnCompletion
from megarl.types import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A batch of requests that engines are generating. `hands`: for each engine, the indices of its requests; `calls`:
    pending remote calls.
    """

    requests: tuple[GenerationRequest, ...]
    hands: tuple[tuple[int, ...], ...]
    calls: tuple[tuple[Process, Any], ...]


def deal_requests(requests: Sequence[GenerationRequest], num_engines: int) -> list[list[int]]:
    """Assign requests to engines, and return the indices of each engine's requests.

    Requests with the same prompt go to one engine, which then uses its prefix cache; distinct prompts are assigned in
    turn. If there are fewer prompts than engines, single requests are assigned in turn.
    """
    prompts = {request.token_ids: i for i, request in enumerate({r.token_ids: r for r in requests}.values())}
    by_prompt = len(prompts) >= num_engines
    hands: list[list[int]] = [[] for _ in range(num_engines)]
    for position, request in enumerate(requests):
        turn = prompts[request.token_ids] if by_prompt else position
        hands[turn % num_engines].append(position)
    return hands


def deal_again(submission: Submission, finished: Collection[int], *, exactly: bool) -> list[list[int]]:
    """Distribute the unfinished requests of a batch anew after engines died; return each engine's request indices.

    exactly: let every engine that has unfinished requests repeat its whole share, so that results are bitwise equal.
    """
    if exactly:
        return [list(hand) if set(hand) - set(finished) else [] for hand in submission.hands]
    left = [position for position in range(len(submission.requests)) if position not in finished]
    dealt = deal_requests([submission.requests[position] for position in left], len(submission.hands))
    return [[left[i] for i in hand] for hand in dealt]


class EngineGroup:
    """The engines of a run, called together; each holds a full copy of the policy.

    Every request has its own seed, so the samples do not depend on the number of engines.
    """

    def __init__(self, processes: Sequence[Process], *, timeout_s: float) -> None:
        self.processes, self._timeout_s = list(processes), timeout_s

    def submit(self, requests: Sequence[GenerationRequest], hands: Sequence[Sequence[int]] | None = None) -> Submission:
        """Start generating. `hands`: indices of the requests for each engine; by default from `deal_requests`."""
        hands = deal_requests(requests, len(self.processes)) if hands is None else hands
        calls = [
            (p, p.actor.stream.options(num_returns="streaming").remote([requests[i] for i in hand]))
            for p, hand in zip(self.processes, hands, strict=True)
            if hand
        ]
        return Submission(requests=tuple(requests), hands=tuple(map(tuple, hands)), calls=tuple(calls))

    def collect(self, submission: Submission, on_finished: OnCompletion, *, timeout_s: float) -> None:
        """Wait for all completions, and pass each to `on_finished` on arrival, with the index of its request.

        If an engine dies that can be restarted, this returns without completions for its unfinished requests.
        """
        hands = [hand for hand in submission.hands if hand]

        def take(call: int, part: Mapping[int, Completion]) -> None:
            for place, completion in part.items():
                on_finished(hands[call][place], completion)

        wait_streams(submission.calls, take, timeout_s=timeout_s, doing="generating")

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]], *, engine: int = 0) -> list[FloatArray]:
        """Return the log-probs that one engine gives the tokens of given sequences, at temperature 1."""
        process = self.processes[engine]
        call = process.actor.call.remote("prompt_logprobs", [list(s) for s in sequences])
        return wait_all([(process, call)], timeout_s=self._timeout_s, doing="scoring with the engine")[0]

    def sleep(self) -> None:
        """Make the engines free the memory of weights and KV caches (vLLM's sleep), on platforms that support sleep."""
        self._move("sleep", doing="putting engines to sleep")

    def wake(self, parts: Sequence[str]) -> None:
        """Make the engines allocate memory again: for `weights`, which the next weight sync fills, or `kv_cache`."""
        self._move("wake", list(parts), doing="waking engines")

    def _move(self, method: str, *args: Any, doing: str) -> None:
        # An engine that died has nothing to move.
        calls = [(p, p.actor.call.remote(method, *args)) for p in self.processes]
        wait_living(calls, timeout_s=self._timeout_s, doing=doing)
