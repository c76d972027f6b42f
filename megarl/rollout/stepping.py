"""Drives an engine step by step, so that new weights can come in between two steps of requests that are under way."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Stepper:
    """Runs a `vllm.LLM` for threads that wait for their requests, and lets another thread hold it between steps."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._turn = threading.Condition()
        self._holders = 0
        self._finished: dict[str, Any] = {}

    def finish(self, prompts: Sequence[Any], params: Sequence[Any]) -> list[Any]:
        """vLLM's outputs of all prompts, in their order, when all have finished."""
        found = {i: output for part in self.stream(prompts, params) for i, output in part.items()}
        return [found[i] for i in range(len(prompts))]

    def stream(self, prompts: Sequence[Any], params: Sequence[Any]) -> Iterator[dict[int, Any]]:
        """vLLM's outputs by the positions of their prompts, those that have finished as soon as they have."""
        with self._turn:
            queued = self._llm.enqueue(prompts, params, use_tqdm=False)
        # vLLM adds a random end to the ids that its outputs have.
        positions = {request_id.partition("-")[0]: i for i, request_id in enumerate(queued)}
        while positions:
            with self._turn:
                # A holder that has come to wait goes first: the lock alone would be taken here again at once.
                self._turn.wait_for(lambda: self._holders == 0)
                if not positions.keys() & self._finished.keys():
                    outputs = self._llm.llm_engine.step()
                    self._finished |= {output.request_id: output for output in outputs if output.finished}
                ids = positions.keys() & self._finished.keys()
                part = {positions.pop(request_id): self._finished.pop(request_id) for request_id in ids}
            if part:
                yield part

    @contextmanager
    def held(self) -> Iterator[bool]:
        """No step is taken within; unfinished requests are kept. Tells whether there are any."""
        self._holders += 1
        with self._turn:
            busy = self._llm.llm_engine.has_unfinished_requests()
            if busy:
                self._llm.sleep(level=0, mode="keep")
            try:
                yield busy
            finally:
                if busy:
                    self._llm.wake_up(tags=["scheduling"])
                self._holders -= 1
                self._turn.notify_all()
