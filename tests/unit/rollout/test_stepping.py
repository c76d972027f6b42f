"""Who may step an engine when; the engine is a fake that writes down what is asked of it."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from megarl.rollout.stepping import EngineLoad, EngineWork, Stepper, StepTimes

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Sampled:
    finish_reason: str


@dataclass(frozen=True)
class Output:
    request_id: str
    text: str
    outputs: tuple[Sampled, ...] = (Sampled("stop"),)
    finished: bool = True


@dataclass
class State:
    """vLLM's state of a request; its prompt has two tokens, of which one is cached."""

    request_id: str
    is_prefilling: bool = True
    num_written: int = 0
    prompt_len: int = 2
    num_cached_tokens: int = 1

    @property
    def detokenizer(self) -> "State":
        return self

    def num_output_tokens(self) -> int:
        return self.num_written

    def make_request_output(self, *_: Any) -> Output:
        return Output(self.request_id, f"{self.num_written} tokens", finished=False)


class CountingEngine:
    """Finishes a request when it has been stepped as often as the prompt says, the last one first.

    num_errors: how many times it ends a request with an error first. kept: the requests that do not go on meanwhile.
    """

    def __init__(self, num_errors: int = 0) -> None:
        self.num_errors = num_errors
        self.llm_engine, self.calls = self, list[str]()
        self.left: dict[str, tuple[str, int]] = {}
        self.num_requests, self.adapters = 0, list[object]()
        self.output_processor, self.request_states = self, dict[str, State]()
        self.stepped, self.kept = threading.Event(), set[str]()

    def enqueue(
        self, prompts: Sequence[int], params: Sequence[str], *, lora_request: object, use_tqdm: bool
    ) -> list[str]:
        assert not use_tqdm
        self.adapters.append(lora_request)
        names = [str(self.num_requests + i) for i in range(len(prompts))]
        self.num_requests += len(prompts)
        self.left |= {name: (p, n) for name, n, p in zip(names, prompts, params, strict=True)}
        full = [f"{name}-1a2b3c4d" for name in names]
        self.request_states |= {name: State(name) for name in full}
        return full

    def abort_request(self, ids: Sequence[str], *, internal: bool) -> None:
        assert internal
        for name in ids:
            del self.request_states[name]
            del self.left[name.partition("-")[0]]

    def get_num_unfinished_requests(self) -> int:
        return len(self.left)

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Output]:
        assert "sleep" not in self.calls[-1:]
        self.calls.append("step")
        self.stepped.set()
        if self.kept:
            time.sleep(0.001)
        done = {name: text for name, (text, n) in self.left.items() if n == 1 and name not in self.kept}
        for state in self.request_states.values():
            state.is_prefilling, state.num_written = False, state.num_written + 1
        for name in done:
            del self.request_states[f"{name}-1a2b3c4d"]
        self.left = {
            name: (text, n - (name not in self.kept)) for name, (text, n) in self.left.items() if name not in done
        }
        if done and self.num_errors:
            self.num_errors -= 1
            return [Output(name, "", (Sampled("error"),)) for name in done]
        return [Output(name, text) for name, text in reversed(done.items())]

    def sleep(self, *, level: int, mode: str) -> None:
        assert (level, mode) == (0, "keep")
        self.calls.append("sleep")

    def wake_up(self, *, tags: Sequence[str]) -> None:
        assert tags == ["scheduling"]
        self.calls.append("wake")


def texts(outputs: Sequence[Any]) -> list[str]:
    return [output.text for output in outputs]


def test_outputs_come_in_the_order_of_the_prompts() -> None:
    engine = CountingEngine()
    stepper = Stepper(engine)
    assert texts(stepper.finish([3, 1, 1], ["a", "b", "c"])) == ["a", "b", "c"]
    assert texts(stepper.finish([2], ["d"])) == ["d"]
    assert engine.calls == ["step"] * 5
    with stepper.held() as busy:
        assert not busy
    assert engine.calls == ["step"] * 5


@pytest.mark.parametrize("fails", [False, True])
def test_a_holder_comes_between_two_steps_of_another_thread(fails: bool) -> None:
    """And the others go on when it is done, or has failed."""
    engine = CountingEngine()
    engine.kept = {"0", "1"}
    stepper, answers = Stepper(engine), list[str]()
    worker = threading.Thread(target=lambda: answers.extend(texts(stepper.finish([2, 2], ["a", "b"]))))
    worker.start()
    assert engine.stepped.wait(TIMEOUT_S)
    try:
        with stepper.held() as busy:
            assert busy
            num_calls = len(engine.calls)
            # It does not step meanwhile.
            worker.join(0.05)
            assert len(engine.calls) == num_calls
            if fails:
                raise ConnectionError
    except ConnectionError:
        assert fails
    engine.kept = set()
    worker.join(TIMEOUT_S)
    assert answers == ["a", "b"]
    assert [call for call in engine.calls if call != "step"] == ["sleep", "wake"]


def test_two_threads_get_their_own_outputs() -> None:
    stepper, answers = Stepper(CountingEngine()), dict[str, list[str]]()
    threads = [
        threading.Thread(target=lambda n=name: answers.update({n: texts(stepper.finish([50, 200], [n, n + n]))}))  # type: ignore[misc]
        for name in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert answers == {"a": ["a", "aa"], "b": ["b", "bb"]}


def test_added_prompts_are_served_until_the_engine_closes() -> None:
    """While another thread waits for prompts of its own."""
    engine = CountingEngine()
    stepper, served = Stepper(engine), dict[int, str]()
    more = threading.Event()

    def serve() -> None:
        for part, _ in stepper.serve():
            served.update({key: output.text for key, output in part.items()})
            if len(served) == 3:
                more.set()

    thread = threading.Thread(target=serve)
    thread.start()
    stepper.add([10, 20], [5, 50], ["a", "b"])
    assert texts(stepper.finish([20], ["own"])) == ["own"]
    stepper.add([30], [1], ["c"])
    assert more.wait(TIMEOUT_S)
    assert served == {10: "a", 20: "b", 30: "c"}
    stepper.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_work_is_counted() -> None:
    engine = CountingEngine()
    stepper = Stepper(engine, max_num_seqs=2)
    stepper.finish([2, 2, 3], ["a", "b", "c"])
    # Three sequences in each of two steps, of which an engine takes two at a time, then one.
    assert (stepper.work.num_steps, stepper.work.num_sequences) == (3, 5)
    # Three prompts of two tokens each, of which one was cached.
    assert (stepper.work.prompt_tokens, stepper.work.cached_tokens) == (6, 3)
    ((start, end),) = stepper.work.busy
    assert start <= end
    work = EngineWork()
    for start, end in ((1.0, 2.0), (2.01, 3.0), (4.0, 5.0)):
        work.add_step(start, end, 1)
    assert work.busy == [(1.0, 3.0), (4.0, 5.0)]


def test_prompts_are_added_between_two_steps_of_a_busy_engine() -> None:
    engine = CountingEngine()
    engine.kept = {"0"}
    stepper, served = Stepper(engine), list[int]()

    def serve() -> None:
        for part, _ in stepper.serve():
            served.extend(part)
            if len(served) == 19:
                engine.kept = set()
            if len(served) == 20:
                stepper.close()

    stepper.add([0], [2], ["long"])
    thread = threading.Thread(target=serve)
    thread.start()
    for key in range(1, 20):
        stepper.add([key], [1], ["short"])
    thread.join(TIMEOUT_S)
    # The engine was not asked to finish first what it had.
    assert (sorted(served), served[-1]) == ([*range(20)], 0)


def test_requests_that_vllm_ended_with_an_error_are_repeated() -> None:
    """Both that end in the second step, but not the one that ends in the third; who is served does not notice."""
    engine = CountingEngine(num_errors=1)
    stepper = Stepper(engine, kv_tokens=640)
    assert texts(stepper.finish([2, 3, 2], ["a", "b", "c"])) == ["a", "b", "c"]
    assert (engine.num_requests, stepper.work.num_errors, len(engine.calls)) == (5, 2, 4)
    engine.num_errors = 2
    stepper.add([7], [1], ["d"])
    replies = (part for part, _ in stepper.serve() if part)
    assert [(key, output.text) for key, output in next(replies).items()] == [(7, "d")]
    assert stepper.work.num_errors == 4


def test_requests_ask_for_the_adapters_of_their_time() -> None:
    """Also those that begin again."""
    engine = CountingEngine(num_errors=1)
    stepper = Stepper(engine)
    stepper.finish([1], ["a"])
    stepper.adapters = "policy"  # type: ignore[assignment]
    stepper.finish([1], ["b"])
    assert engine.adapters == [None, None, "policy"]


def test_a_request_that_always_ends_with_an_error_fails() -> None:
    stepper = Stepper(CountingEngine(num_errors=3), kv_tokens=640)
    with pytest.raises(RuntimeError, match=r"^vLLM ended the same request 3 times with an error; its log in RUN/logs"):
        stepper.finish([1], ["a"])


def test_a_reply_tells_of_the_load_and_added_prompts_are_taken_out() -> None:
    """The first reply comes before anything was done; what has finished is still served."""
    stepper = Stepper(CountingEngine(), kv_tokens=640)
    replies = stepper.serve()
    assert next(replies) == ({}, EngineLoad(kv_tokens=640, written={}, cost=None))
    stepper.add([10, 20, 30], [2, 1, 9], ["a", "b", "c"])
    part, load = next(replies)
    assert {key: output.text for key, output in part.items()} == {20: "b"}
    assert load.written == {10: 1, 30: 1}
    # A step later, prompt 10 has finished, but nobody has been given it yet.
    stepper._step_for({})
    assert {key: output.text for key, output in stepper.abort([10, 20, 30]).items()} == {30: "2 tokens"}
    part, load = next(replies)
    assert (list(part), load.written) == ([10], {})


def test_the_cost_of_a_step_is_fitted() -> None:
    """2 s, 0.5 s for each sequence and 0.25 s for each prompt token."""
    times = StepTimes()
    assert times.fit() is None
    for _ in range(3):
        times.add(2.5, num_sequences=1, num_prompt_tokens=0)
    times.add(3.0, num_sequences=2, num_prompt_tokens=0)
    # Without a prompt, nothing says what its tokens cost.
    assert times.fit() is None
    times.add(4.0, num_sequences=2, num_prompt_tokens=4)
    cost = times.fit()
    assert cost is not None
    assert [cost.base_s, cost.sequence_s, cost.prompt_token_s] == pytest.approx([2.0, 0.5, 0.25], rel=1e-6)
