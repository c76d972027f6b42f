"""Step a vLLM engine on behalf of several threads, and measure what it does."""

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megarl.rollout.images import EnginePrompt

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.output_processor import RequestState

# Between two steps that follow one another, an engine pauses for less than this.
MAX_PAUSE_S = 0.02
# How often vLLM is given a request that it ends with an error of its own, such as keys and values that it lost.
MAX_TRIES = 3
# vLLM's reason then.
ERROR = "error"
# A busy engine reports at least this often.
REPORT_S = 0.5
# Each step weighs this much less than the next one in the fit of their times, which thus follows the last thousands.
_DECAY = 0.9995


@dataclass(slots=True, kw_only=True)
class EngineWork:
    """The work of an engine since it was last asked: decode steps, the sequences in them added up, and busy times.

    prompt_tokens: those of all requests that began; cached_tokens: how many of them vLLM found in its prefix cache.
    recomputed_tokens: tokens of unfinished requests whose keys and values were dropped at an update. busy: (start,
    end) in Unix seconds of the times in which steps followed one another without a pause; began: when the count began.
    num_errors: requests that vLLM ended with an error, and that were given to it again.
    """

    num_steps: int = 0
    num_sequences: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStepCost:
    """The seconds of an engine's step: a base, and more for each sequence in it and each prompt token it computes."""

    base_s: float
    sequence_s: float
    prompt_token_s: float


class StepTimes:
    """The times of an engine's steps, from which `fit` derives their cost by least squares."""

    def __init__(self) -> None:
        # Products of (1, sequences, prompt tokens, seconds) in pairs, added up over steps.
        self._sums = np.zeros((4, 4))

    def add(self, seconds: float, *, num_sequences: int, num_prompt_tokens: int) -> None:
        """Note the time of a step."""
        step = np.asarray([1.0, num_sequences, num_prompt_tokens, seconds])
        self._sums = _DECAY * self._sums + np.outer(step, step)

    def fit(self) -> EngineStepCost | None:
        """Return the cost of steps; None if they were too much alike to tell its parts from each other."""
        scale = np.sqrt(np.diag(self._sums)[:3])
        if not scale.all():
            return None
        scaled = self._sums[:3, :3] / np.outer(scale, scale)
        solution, _, rank, _ = np.linalg.lstsq(scaled, self._sums[:3, 3] / scale, rcond=1e-6)
        if rank < 3:
            return None
        base_s, sequence_s, prompt_token_s = np.maximum(solution / scale, 0.0).tolist()
        return EngineStepCost(base_s=base_s, sequence_s=sequence_s, prompt_token_s=prompt_token_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """An engine's report of its work.

    kv_tokens: the tokens whose keys and values its cache holds at most. written: the tokens so far of each unfinished
    request, by the caller's id; those that wait have none. cost: of a step, once there is an estimate.
    """

    kv_tokens: int
    written: Mapping[int, int]
    cost: EngineStepCost | None


class Stepper:
    """A `vllm.LLM` that several threads share: they wait for their requests, or stop it between two steps.

    kv_tokens: the capacity of its KV cache in tokens. reads_images: whether prompts are those of `ImagePrompts`.
    """

    def __init__(self, llm: "LLM", *, max_num_seqs: int = 256, kv_tokens: int = 0, reads_images: bool = False) -> None:
        self._llm, self._max_num_seqs, self._kv_tokens = llm, max_num_seqs, kv_tokens
        self._reads_images = reads_images
        self._turn, self._counting = threading.Condition(), threading.Lock()
        # Threads that wait for their turn between two steps, or have it.
        self._holders = 0
        self._finished: dict[str, RequestOutput] = {}
        # Unfinished requests by vLLM's ids, and how often each has been tried.
        self._asked: dict[str, tuple[EnginePrompt, SamplingParams, int]] = {}
        # Requests whose outputs `serve` yields: the caller's id by vLLM's.
        self._served: dict[str, int] = {}
        # Requests whose prompts are not computed yet, by vLLM's full ids.
        self._prefilling: set[str] = set()
        self._closed = False
        self.work, self._times = EngineWork(), StepTimes()
        # The adapters that all further requests ask for; None: none.
        self.adapters: LoRARequest | None = None

    def add(self, ids: Sequence[int], prompts: "Sequence[EnginePrompt]", params: "Sequence[SamplingParams]") -> None:
        """Queue prompts, each with an id of the caller's, and return at once; `serve` yields their outputs."""
        with self._between_steps():
            self._served |= dict(zip(self._enqueue(prompts, params), ids, strict=True))

    def serve(self) -> "Iterator[tuple[dict[int, RequestOutput], EngineLoad]]":
        """Yield vLLM's output for each added prompt by its id, as soon as it has finished, until `close`.

        Each reply comes with the engine's load; the first one, and others of a busy engine, have nothing else.
        """
        reported_at = 0.0
        part: dict[int, RequestOutput] = {}
        while True:
            with self._turn:
                if reported_at:
                    self._turn.wait_for(lambda: self._closed or (self._served and not self._holders))
                    if self._closed:
                        return
                    part = self._step_for(self._served)
                is_due = bool(part) or time.monotonic() >= reported_at + REPORT_S
                load = self._load() if is_due else None
            if load is not None:
                reported_at = time.monotonic()
                yield part, load

    def finish(self, prompts: "Sequence[EnginePrompt]", params: "Sequence[SamplingParams]") -> "list[RequestOutput]":
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
        with self._between_steps():
            return {key: _output_so_far(state) for key, state in self._added().items()}

    def abort(self, ids: Collection[int] | None = None) -> "dict[int, RequestOutput]":
        """Forget added prompts, all unless `ids` are given; return vLLM's output so far of the unfinished ones by id.

        With `ids`, those that have finished are still served.
        """
        with self._between_steps():
            states = {key: state for key, state in self._added().items() if ids is None or key in ids}
            taken = {key: _output_so_far(state) for key, state in states.items()}
            names = [state.request_id for state in states.values()]
            self._llm.llm_engine.abort_request(names, internal=True)
            self._prefilling.difference_update(names)
            for request_id, key in list(self._served.items()):
                if ids is None or key in taken:
                    for container in (self._served, self._finished, self._asked):
                        container.pop(request_id, None)
            return taken

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
        self, prompts: "Sequence[EnginePrompt]", params: "Sequence[SamplingParams]", tries: int = 1
    ) -> list[str]:
        if self._reads_images:
            # These prompts are what vLLM would make of others.
            full = self._llm._render_and_add_requests(prompts, params, lora_requests=[self.adapters] * len(prompts))
        else:
            full = self._llm.enqueue(prompts, params, lora_request=self.adapters, use_tqdm=False)
        self._prefilling.update(full)
        # vLLM appends a random suffix to the ids that it returns here, but not to those in its outputs.
        names = [name.partition("-")[0] for name in full]
        self._asked |= {name: (*asked, tries) for name, *asked in zip(names, prompts, params, strict=True)}
        return names

    def _states(self) -> "Mapping[str, RequestState]":
        states: Mapping[str, RequestState] = self._llm.llm_engine.output_processor.request_states
        return states

    def _added(self) -> "dict[int, RequestState]":
        """Return vLLM's state of each added prompt that is not finished, by its id."""
        found = ((self._served.get(name.partition("-")[0]), state) for name, state in self._states().items())
        return {key: state for key, state in found if key is not None}

    def _load(self) -> EngineLoad:
        written = {key: state.detokenizer.num_output_tokens() for key, state in self._added().items()}
        return EngineLoad(kv_tokens=self._kv_tokens, written=written, cost=self._times.fit())

    def _step_for(self, wanted: dict[str, int]) -> "dict[int, RequestOutput]":
        """Take a step unless a wanted request has finished; remove and return the outputs of those that have.

        A request that vLLM ended with an error begins again. Raises RuntimeError after `MAX_TRIES` of them.
        """
        if not wanted.keys() & self._finished.keys():
            engine, start = self._llm.llm_engine, time.time()
            num_sequences = min(engine.get_num_unfinished_requests(), self._max_num_seqs)
            prefilling = [state for name, state in self._states().items() if name in self._prefilling]
            outputs = engine.step()
            end = time.time()
            self.work.add_step(start, end, num_sequences)
            computed = [state for state in prefilling if not state.is_prefilling]
            self._prefilling.difference_update(state.request_id for state in computed)
            num_prompt_tokens = sum(state.prompt_len for state in computed)
            num_cached = sum(state.num_cached_tokens for state in computed)
            self.work.prompt_tokens += num_prompt_tokens
            self.work.cached_tokens += num_cached
            self._times.add(end - start, num_sequences=num_sequences, num_prompt_tokens=num_prompt_tokens - num_cached)
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


def _output_so_far(state: "RequestState") -> "RequestOutput":
    from vllm.v1.engine import FinishReason as Reason

    # vLLM makes an output only of what has ended; the state itself does not change.
    return state.make_request_output([], None, Reason.ABORT, None)
