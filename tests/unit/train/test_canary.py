"""The canary: when it looks, what it compares, and what it says."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.cluster import offloading
from megarl.errors import MismatchError, WeightSyncError
from megarl.rollout.canary import block_tokens, held_digests
from megarl.rollout.engine import Completion
from megarl.train import canary as module
from megarl.train.canary import Canary, EngineFinding, changed_weights, syncs_apart
from megarl.types import FinishReason, FloatArray, Prompt, Row, VersionSpan

LIMIT = 1e-4
PROMPTS = [Prompt(uid="p", token_ids=(1, 2, 3), data_source="d", ground_truth="")]
PHASE = offloading.Phase(name="score actor", needs=frozenset())


@pytest.mark.parametrize(
    ("round_s", "step_s", "expected"),
    [(0.3, 2.0, 15), (0.301, 2.0, 16), (0.0, 2.0, 1), (0.3, 0.0, 1)],
)
def test_rounds_take_at_most_a_hundredth_of_the_time(round_s: float, step_s: float, expected: int) -> None:
    assert syncs_apart(round_s, step_s) == expected


def answer(logprobs: Sequence[float], *, version: int = 3, num_cached: int = 0) -> Completion:
    return Completion(
        token_ids=np.arange(4, 4 + len(logprobs), dtype=np.int32),
        logprobs=np.array(logprobs, np.float32),
        finish_reason=FinishReason.LENGTH,
        versions=(VersionSpan(version, len(logprobs)),),
        num_cached=num_cached,
    )


def row(logprobs: Sequence[float]) -> Row:
    n = len(logprobs)
    return Row(
        uid="canary0",
        sample_index=0,
        token_ids=np.arange(n + 1),
        num_prompt_tokens=1,
        loss_mask=np.ones(n, np.bool_),
        quantities={"rollout_logprobs": np.array(logprobs, np.float32)},
    )


def finding(engine: list[list[float]], trainer: list[list[float]], **answered: int) -> EngineFinding:
    logprobs = [np.array(each, np.float32) for each in trainer]
    return EngineFinding.of([row(each) for each in engine], logprobs, [answer(e, **answered) for e in engine], 0.01)


def test_each_answer_has_its_own_mean() -> None:
    found = finding([[-1.0, -2.0], [-1.0]], [[-1.25, -2.0], [-1.0]])
    assert (found.largest, found.means) == (0.25, (0.125, 0.0))
    assert (found.mean, found.claims, found.num_cached) == (0.0625, (3,), 0)
    assert found.limits == pytest.approx((0.01 * (1 + 4 / math.sqrt(2)), 0.05))
    (said,) = found.problems(3)
    assert said == (
        "differs from the trainer by 0.062 nats on average and 0.25 at most; in 1 of 2 answers by 0.12 on average, "
        "the limit is 0.038"
    )


def test_what_is_not_a_number_is_wrong() -> None:
    assert len(finding([[math.nan, -1.0]], [[-1.0, -1.0]]).problems(3)) == 1


def test_another_version_and_older_keys_are_wrong_whatever_the_difference() -> None:
    found = finding([[-1.0]], [[-1.0]], version=2, num_cached=8)
    assert found.problems(3) == [
        "claims to have sampled with version 2",
        "had 8 tokens of the prompts in its prefix cache, whose keys are older",
    ]
    assert finding([[-1.0]], [[-1.0]]).problems(3) == []


@dataclass
class Run:
    """Engines, a trainer and a clock; `error` is added to the log-probs of an engine, by its index."""

    file: Path
    errors: dict[int, float] = field(default_factory=dict)
    version: int = 0
    num_cached: int = 0
    # In how many of the next answers `errors` show; None: in all.
    num_wrong: int | None = None
    now: float = 0.0
    calls: list[str] = field(default_factory=list)
    asked: list[tuple[int, str | None]] = field(default_factory=list)
    refuses: bool = False
    digest: int = 7
    phase: offloading.Phase = PHASE
    room: int = 100

    def canary(self, every: int | None, *, holds: bool = True) -> Canary:
        return Canary(
            every=every,
            limit=LIMIT,
            room=100,
            temperature=1.0,
            engines=self,  # type: ignore[arg-type]
            passes=self,
            enter=lambda phase: self.calls.append(phase.name),
            resend=self.resend,
            holds=holds,
            file=self.file,
        )

    def ask_each(self, method: Callable[..., Any], *, doing: str) -> dict[int, Any]:
        if method is block_tokens:
            return {0: 4, 1: 4}
        if method is held_digests:
            self.calls.append("digests")
            return {0: [{"w": 1}], 1: [{"w": self.digest}]}
        assert isinstance(method, partial)
        self.calls.append(f"ask {self.version}")
        self.now += 1.0
        requests = method.keywords["requests"]
        self.asked.append((requests[0].seed, requests[0].cache_salt))
        errors = {} if self.num_wrong == 0 else self.errors
        self.num_wrong = self.num_wrong and self.num_wrong - 1
        return {
            engine: [
                answer([-1.0 + errors.get(engine, 0.0)] * 4, version=self.version, num_cached=self.num_cached)
                for _ in requests
            ]
            for engine in (0, 1)
        }

    def forward(self, rows: Sequence[Row], *, step: int) -> dict[str, list[FloatArray]]:
        self.calls.append(f"forward {step}")
        self.now += 1.0
        assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7]] * 2
        return {"logprobs": [np.full(4, -1.0, np.float32) for _ in rows]}

    def resend(self, version: int) -> None:
        self.calls.append(f"resend {version}")
        if self.refuses:
            raise WeightSyncError("1 tensors differ")
        self.digest = 8

    def step(self, canary: Canary, step: int) -> dict[str, float]:
        """As `Trainer.step`; all but the canary takes 200 s."""
        canary.ask(step - 1)
        canary.prime(step, PROMPTS)
        found = canary.check(step - 1, step)
        self.now, self.version = self.now + 200.0, step
        return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run(file=tmp_path / "new" / "canary.json")
    monkeypatch.setattr(module, "awake_s", lambda: run.now)
    return run


def test_a_round_primes_before_the_sync_asks_after_it_and_compares_before_the_update(run: Run) -> None:
    canary = run.canary(every=2)
    assert [run.step(canary, step) for step in (1, 2)] == [{}, {}]
    assert run.calls == ["generate", "ask 1"]
    run.calls.clear()
    metrics = run.step(canary, 3)
    assert run.calls == ["generate", "ask 2", "score actor", "forward 3"]
    assert metrics == {
        "canary/max_abs_diff": 0.0,
        "canary/mean_abs_diff": 0.0,
        "canary/cached_tokens": 0.0,
        "canary/seconds": 3.0,
        "canary/every": 2.0,
    }
    run.calls.clear()
    run.step(canary, 4)
    run.step(canary, 5)
    assert run.calls == ["generate", "ask 3", "generate", "ask 4", "score actor", "forward 5"]


def test_off_asks_nothing(run: Run) -> None:
    canary = run.canary(every=0)
    assert [run.step(canary, step) for step in range(1, 4)] == [{}] * 3
    assert run.calls == []


def test_by_itself_it_takes_a_hundredth(run: Run) -> None:
    """Three seconds in 200: two steps. The first round is that of the first sync."""
    canary = run.canary(every=None)
    found = [run.step(canary, step).get("canary/every") for step in range(1, 8)]
    assert found == [None, 2.0, None, 2.0, None, 2.0, None]


@pytest.mark.parametrize(("error", "fails"), [(2.9e-4, False), (3.1e-4, True)])
def test_an_engine_beyond_the_limit_ends_the_step(run: Run, error: float, fails: bool) -> None:
    """Answers have four tokens: 1e-4 · (1 + 4/√4) is 3e-4."""
    canary = run.canary(every=1)
    run.step(canary, 1)
    run.errors[1] = error
    if not fails:
        assert run.step(canary, 2)["canary/max_abs_diff"] == pytest.approx(error, rel=1e-3)
        return
    with pytest.raises(MismatchError) as raised:
        run.step(canary, 2)
    said = str(raised.value)
    assert said.startswith(
        "canary: after the sync of version 1, engine 1 differs from the trainer by 0.00031 nats on average and 0.00031 "
        "at most; in 1 of 1 answers by 0.00031 on average, the limit is 0.0003. engine 1: 1 of its weights changed "
        "when they were sent again: w of worker 0. No sample of this version was trained on."
    )
    assert str(run.file) in said
    assert "Resume the run" in said
    assert run.calls[-3:] == ["digests", "resend 1", "digests"]
    written = json.loads(run.file.read_text())
    assert written["version"] == 1
    assert written["engines"]["1"]["held"] == [{"w": 7}]
    assert written["engines"]["1"]["sent_again"] == [{"w": 8}]
    assert written["engines"]["0"]["held"] == written["engines"]["0"]["sent_again"]


def test_what_a_second_answer_does_not_show_was_chance(run: Run) -> None:
    """It is drawn by other seeds, and what the first one left in the cache is not taken."""
    canary = run.canary(every=1)
    run.step(canary, 1)
    run.errors[1], run.num_wrong = 1.0, 1
    run.calls.clear()
    assert run.step(canary, 2)["canary/max_abs_diff"] == 0.0
    assert run.calls[-4:] == ["generate", "ask 1", "score actor", "forward 2"]
    assert run.asked[-1] == (4, "canary 0, version 1")
    run.num_wrong = None
    with pytest.raises(MismatchError, match="engine 1 differs from the trainer by 1 nats"):
        run.step(canary, 3)


def test_engines_that_slept_have_no_digests(run: Run) -> None:
    canary = run.canary(every=1, holds=False)
    run.step(canary, 1)
    run.num_cached = 8
    with pytest.raises(MismatchError, match="engine 0 had 8 tokens of the prompts in its prefix cache"):
        run.step(canary, 2)
    assert "digests" not in run.calls
    assert json.loads(run.file.read_text())["engines"]["0"]["held"] == []


def test_a_sync_that_fails_again_is_told(run: Run) -> None:
    canary = run.canary(every=1)
    run.step(canary, 1)
    run.version, run.refuses = 0, True
    with pytest.raises(MismatchError, match=r"version 0.*sending the weights again failed: 1 tensors differ"):
        run.step(canary, 2)


def test_weights_that_changed_are_named() -> None:
    held, sent = [{"a": 1, "b": 2}, {"a": 1}], [{"a": 1, "b": 3}, {"a": 5}]
    said = "2 of its weights changed when they were sent again: b of worker 0, a of worker 1"
    assert changed_weights(held, sent) == said
    assert changed_weights(held, held).startswith("none of its weights changed")
    many = [dict.fromkeys("abcde", 0)], [dict.fromkeys("abcde", 1)]
    assert changed_weights(*many).endswith("c of worker 0 and 2 more")


def test_what_was_not_asked_before_the_weights_changed_is_not_asked_later(run: Run) -> None:
    """As in a session that steps before it samples, and in one that loads other weights."""
    canary = run.canary(every=1)
    run.step(canary, 1)
    assert canary.check(1, 2) == {}
    run.calls.clear()
    canary.ask(1)
    assert run.calls == []
    canary.prime(2, PROMPTS)
    run.version = 2
    canary.ask(2)
    canary.forget()
    assert canary.check(2, 3) == {}
