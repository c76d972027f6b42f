"""Step a vLLM engine on behalf of several threads, and count what it does."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt

# Between two steps that follow one another, an engine pauses for less than this.
MAX_PAUSE_S = 0.02
# How often vLLM is given a request that it ends with an error of its own, such as keys and values that it lost.
MAX_TRIES = 3
# What vLLM then gives as the reason.
ERROR = "error"


@dataclass(slots=True, kw_only=True)
class EngineWork:
    """The work of an engine since it was last asked: decode steps, the sequences in them added up, and busy times.

    recomputed_tokens: tokens of unfinished requests whose keys and values were dropped at an update. busy: (start,
    end) in Unix seconds of the times in which steps followed one another without a pause; began: when the count began.
    num_errors: requests that vLLM ended with an error, and that were given to it again.
    """

    num_steps: int = 0
    num_sequences: int = 0
    recomputed_tokens: int = 0
    num_errors: int = 0
    busy: list[tuple[float, float]] = field(default_factory=list)
    began: float = field(default_factory=time.time)

    def add_step(self, start: float, end: float, num_sequences: int) -> None:
        """Count a step; it prolongs the last busy time if it follows within `MAX_PAUSE_S`."""
        self.num_steps += 1
        self.num_sequences += num_sequences
        if self.busy and start - self.busy[-1][1] < MAX_PAUSE_S:
            start = self.busy.pop()[0]
        self.busy.append((start, end))


class Stepper:
    """A `vllm.LLM` that several threads share: they wait for their requests, or stop it between two steps."""

    def __init__(self, llm: "LLM", *, max_num_seqs: int = 256) -> None:
        self._llm, self._max_num_seqs = llm, max_num_seqs
        self._turn, self._counting = threading.Condition(), threading.Lock()
        # Threads that wait for their turn between two steps, or have it.
        self._holders = 0
        self._finished: dict[str, RequestOutput] = {}
        # Unfinished requests by vLLM's ids, and how often each has been tried.
        self._asked: dict[str, tuple[TokensPrompt, SamplingParams, int]] = {}
        # Requests whose outputs `serve` yields: the caller's id by vLLM's.
        self._served: dict[str, int] = {}
        self._closed = False
        self.work = EngineWork()

    def add(self, ids: Sequence[int], prompts: "Sequence[TokensPrompt]", params: "Sequence[SamplingParams]") -> None:
        """Queue prompts, each with an id of the caller's, and return at once; `serve` yields their outputs."""
        with self._between_steps():
            self._served |= dict(zip(self._enqueue(prompts, params), ids, strict=True))

    def serve(self) -> "Iterator[dict[int, RequestOutput]]":
        """Yield vLLM's output for each added prompt by its id, as soon as it has finished, until `close`."""
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._closed or (self._served and not self._holders))
                if self._closed:
                    return
                part = self._step_for(self._served)
            if part:
                yield part

    def finish(self, prompts: "Sequence[TokensPrompt]", params: "Sequence[SamplingParams]") -> "list[RequestOutput]":
        """Wait for all prompts, and return vLLM's outputs in their order."""
        with self._between_steps():
            waiting = {request_id: i for i, request_id in enumerate(self._enqueue(prompts, params))}
        found: dict[int, RequestOutput] = {}
        while waiting:
            with self._turn:
                # Let a waiting holder go first; otherwise this thread would take the lock again at once.
                self._turn.wait_for(lambda: self._holders == 0)
                found |= self._step_for(waiting)
        return [found[i] for i in range(len(prompts))]

    def unfinished(self) -> "dict[int, RequestOutput]":
        """Return vLLM's output so far for each added prompt that is not finished, by its id; all of them go on."""
        from vllm.v1.engine import FinishReason as Reason

        with self._between_steps():
            states = self._llm.llm_engine.output_processor.request_states
            waiting = {request_id.partition("-")[0]: state for request_id, state in states.items()}
            # vLLM makes an output only of what has ended; the state itself does not change.
            return {
                self._served[request_id]: state.make_request_output([], None, Reason.ABORT, None)
                for request_id, state in waiting.items()
                if request_id in self._served
            }

    def abort(self) -> None:
        """Forget all added prompts that are not finished."""
        with self._between_steps():
            states = self._llm.llm_engine.output_processor.request_states
            ids = [request_id for request_id in states if request_id.partition("-")[0] in self._served]
            self._llm.llm_engine.abort_request(ids, internal=True)
            for request_id in self._served:
                self._finished.pop(request_id, None)
                self._asked.pop(request_id, None)
            self._served.clear()

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Keep the engine from stepping inside this context. Yields whether unfinished requests can go on."""
        with self._between_steps():
            busy = self._llm.llm_engine.has_unfinished_requests()
            if busy:
                self._llm.sleep(level=0, mode="keep")
            try:
                yield busy
            finally:
                if busy:
                    self._llm.wake_up(tags=["scheduling"])

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Hold the lock within this context. Threads that step let this one go first: a lock alone is not fair."""
        with self._counting:
            self._holders += 1
        with self._turn:
            try:
                yield
            finally:
                with self._counting:
                    self._holders -= 1
                self._turn.notify_all()

    def close(self) -> None:
        """Make `serve` end."""
        with self._between_steps():
            self._closed = True

    def _enqueue(
        self, prompts: "Sequence[TokensPrompt]", params: "Sequence[SamplingParams]", tries: int = 1
    ) -> list[str]:
        # vLLM appends a random suffix to the ids that it returns here, but not to those in its outputs.
        names = [name.partition("-")[0] for name in self._llm.enqueue(prompts, params, use_tqdm=False)]
        self._asked |= {name: (*asked, tries) for name, *asked in zip(names, prompts, params, strict=True)}
        return names

    def _step_for(self, wanted: dict[str, int]) -> "dict[int, RequestOutput]":
        """Take a step unless a wanted request has finished; remove and return the outputs of those that have.

        A request that vLLM ended with an error begins again. Raises RuntimeError after `MAX_TRIES` of them.
        """
        if not wanted.keys() & self._finished.keys():
            engine, start = self._llm.llm_engine, time.time()
            num_sequences = min(engine.get_num_unfinished_requests(), self._max_num_seqs)
            outputs = engine.step()
            self.work.add_step(start, time.time(), num_sequences)
            self._finished |= {output.request_id: output for output in outputs if output.finished}
        done: dict[int, RequestOutput] = {}
        for name in wanted.keys() & self._finished.keys():
            key, output = wanted.pop(name), self._finished.pop(name)
            prompt, params, tries = self._asked.pop(name)
            if output.outputs[0].finish_reason != ERROR:
                done[key] = output
                continue
            self.work.num_errors += 1
            if tries == MAX_TRIES:
                raise RuntimeError(
                    f"vLLM ended the same request {tries} times with an error; its log in RUN/logs says which; mend "
                    "that (rollout.engine), and resume the run"
                )
            (again,) = self._enqueue([prompt], [params], tries + 1)
            wanted[again] = key
        return done
