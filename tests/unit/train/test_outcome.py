"""What the first steps come to: failures, differences, cut answers, and updates that move weights or do not."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.errors import RunError
from megarl.rollout.source import Group
from megarl.train.groups import JudgedGroup
from megarl.train.outcome import FirstSteps, StepOutcome, all_failed_error, cut_warning
from megarl.train.watch import WeightWatch
from megarl.types import FinishReason, Message, Prompt, Reward, Row, Sample, prompt_segment
from megarl.types.judged import FinishedSample, Trouble
from megarl.types.messages import Role, UpdateResult


def outcome_of(scores: Sequence[Sequence[float | str]], *, cut: bool = False) -> StepOutcome:
    """Groups of samples with these scores, or with the outcomes of troubles for which they were dropped."""
    groups, troubles = [], []
    for i, own in enumerate(scores):
        prompt = Prompt(
            uid=f"q:{i}",
            token_ids=(i,),
            data_source="q",
            ground_truth="the\ntruth",
            messages=(Message(role="user", content="ask " * 90),),
        )
        group = Group(prompt=prompt, plan=None, number=i, index=i)  # type: ignore[arg-type]
        for place, score in enumerate(own):
            sample = group.samples[place] = Sample(
                uid=prompt.uid,
                sample_index=place,
                seed=0,
                segments=(prompt_segment([i]),),
                finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
            )
            if isinstance(score, str):
                item = FinishedSample(prompt=prompt, sample=sample, prompt_text="", response="")
                troubles.append(Trouble(item=item, outcome=score, reason="boom (agent.py:6)", judge="environment"))
        known = [(s, r) for s, r in zip(group.samples.values(), own, strict=True) if not isinstance(r, str)]
        rewards = tuple(Reward(score=float(r), correct=float(r) > 0) for _, r in known)
        groups.append(
            JudgedGroup(group=group, samples=tuple(s for s, _ in known), rewards=rewards, num_sampled=len(own))
        )
    return StepOutcome.of(groups, troubles)


@pytest.mark.parametrize(
    ("scores", "failed", "flat"),
    [
        ([["failed", "timed_out"], ["crashed", "unanswered"]], True, False),
        # No function has an opinion: nothing failed.
        ([["abstained", "abstained"]], False, False),
        ([["failed", "failed"], [0.0, 0.0]], False, True),
        ([["failed", 1.0], [0.0, 0.0]], False, True),
        ([[0.0, 1.0], [0.0, 0.0]], False, False),
        ([[1.0, 1.0], [0.0, 0.0]], False, True),
    ],
    ids=str,
)
def test_what_a_step_came_to(scores: Sequence[Sequence[float | str]], failed: bool, flat: bool) -> None:
    got = outcome_of(scores)
    assert (got.all_failed, got.is_flat) == (failed, flat)
    first = FirstSteps(total_steps=9)
    assert first.nothing_heard(got) == failed
    # Later failures are another matter.
    assert not FirstSteps(total_steps=9, is_heard=True).nothing_heard(got)


def test_the_error_has_count_and_first_cause() -> None:
    outcome = outcome_of([["failed"] * 4] * 4)
    error = all_failed_error("step 1", outcome.num_samples, outcome.failures)
    assert str(error).startswith(
        "step 1: all 16 samples failed, the first of them: environment failed, boom (agent.py:6); mend what fails"
    )


def warned(outcomes: Sequence[StepOutcome], *, total_steps: int = 9, teaches: bool = False) -> list[tuple[int, str]]:
    first = FirstSteps(total_steps=total_steps)
    return [
        (step, text)
        for step, outcome in enumerate(outcomes, start=1)
        for text in first.warnings(
            step, outcome, teaches=teaches, read=lambda _: "an\nanswer", of_cut=lambda frac: cut_warning(frac, 7, ["."])
        )
    ]


FLAT, MIXED = [[0.0, 0.0], [1.0, 1.0]], [[0.0, 1.0]]


@pytest.mark.parametrize(
    ("steps", "total", "teaches", "expected"),
    [
        ([FLAT] * 5, 9, False, [3]),
        ([FLAT, FLAT, MIXED, FLAT, FLAT, FLAT], 9, False, []),
        ([MIXED, FLAT, FLAT, FLAT], 9, False, []),
        ([FLAT] * 2, 2, False, [2]),
        ([FLAT] * 5, 9, True, []),
    ],
)
def test_groups_without_differences(steps: Any, total: int, teaches: bool, expected: list[int]) -> None:
    found = warned([outcome_of(scores) for scores in steps], total_steps=total, teaches=teaches)
    assert [step for step, _ in found] == expected
    for _, text in found:
        assert "\n" not in text
        for part in ("'ask ask ", " … ", "was 'an answer', expected 'the truth', judged wrong with the reward 0;"):
            assert part in text


def row(advantage: float | None, *, num_loss_tokens: int = 2) -> Row:
    mask = np.arange(2) < num_loss_tokens
    quantities = {} if advantage is None else {"advantages": np.full(2, advantage, np.float32)}
    ids = np.arange(3, dtype=np.int32)
    return Row(uid="a", sample_index=0, token_ids=ids, num_prompt_tokens=1, loss_mask=mask, quantities=quantities)


def result(role: Role, norm: float, moved: int, watched: int = 1000) -> UpdateResult:
    metrics = {f"{role}/grad_norm": norm, f"{role}/lr": 1e-30}
    return UpdateResult(metrics=metrics, before={}, num_watched=watched, num_moved=moved)


@pytest.mark.parametrize(
    ("role", "advantage", "norm", "moved", "warms_up", "error"),
    [
        (Role.ACTOR, 1.0, 0.5, 900, False, None),
        (Role.ACTOR, 1.0, 0.0, 0, False, "its gradient is 0, so no loss token has a path"),
        (Role.ACTOR, 1.0, 0.5, 0, False, r"lr=1e-30 changed 0\.00% of its weights, .* raise actor\.optimizer\.lr"),
        (Role.ACTOR, 1.0, 0.5, 5, False, r"lr=1e-30 changed 0\.50% of its weights"),
        (Role.ACTOR, 1.0, 0.5, 0, True, None),
        # Flat groups move nothing, rightly.
        (Role.ACTOR, 0.0, 0.0, 0, False, None),
        # Supervised, preferences, reward models and critics.
        (Role.ACTOR, None, 0.0, 0, False, "its gradient is 0"),
        (Role.REWARD, None, 0.0, 0, False, "its gradient is 0"),
        (Role.CRITIC, 0.0, 0.5, 0, False, r"raise critic\.optimizer\.lr"),
    ],
)
def test_updates_that_move_nothing(
    role: Role, advantage: float | None, norm: float, moved: int, warms_up: bool, error: str | None
) -> None:
    for last in (1, 3):
        watch = WeightWatch(role)
        for step in range(1, last):
            watch.look([row(advantage)], result(role, norm, moved), step=step, is_last=False, warms_up=warms_up)
        if error is None:
            watch.look([row(advantage)], result(role, norm, moved), step=last, is_last=True, warms_up=warms_up)
        else:
            with pytest.raises(RunError, match=rf"^step {last}: {last} updates of the {role} .*{error}"):
                watch.look([row(advantage)], result(role, norm, moved), step=last, is_last=last == 1, warms_up=False)


def test_the_last_update_moves_weights_after_an_idle_one() -> None:
    watch = WeightWatch(Role.ACTOR)
    watch.look([row(1.0)], result(Role.ACTOR, 0.0, 0), step=1, is_last=False, warms_up=False)
    watch.look([row(1.0)], result(Role.ACTOR, 0.5, 900), step=2, is_last=True, warms_up=False)


def taught(reverse: float, forward: float = 0.0) -> UpdateResult:
    # The gradients of a teacher that is the policy are the rounding's, and an optimizer makes steps of them.
    found = result(Role.ACTOR, 1e-6, 900)
    return replace(found, metrics=found.metrics | {"distill/reverse_kl": reverse, "distill/forward_kl": forward})


@pytest.mark.parametrize("advantage", [0.0, None], ids=["train", "sft"])
@pytest.mark.parametrize(
    ("given", "others", "error"),
    [
        ([(0.0,), (7e-9, 9e-9)], False, True),
        ([(-3e-8,), (0.0,)], False, True),
        ([(0.0,), (2e-3,)], False, False),
        ([(0.0, 1e-3), (0.0, 1e-3)], False, False),
        # Rewards or demonstrations teach, too.
        ([(0.0,), (0.0,)], True, False),
    ],
    ids=str,
)
def test_a_teacher_that_is_the_policy(advantage: float | None, given: Any, others: bool, error: bool) -> None:
    watch = WeightWatch(Role.ACTOR, is_taught=not others)
    first, second = (taught(*values) for values in given)
    watch.look([row(advantage)], first, step=1, is_last=False, warms_up=False)
    if error:
        with pytest.raises(RunError, match=r"^step 2: the teacher gives all tokens of 2 updates the probabilities"):
            watch.look([row(advantage)], second, step=2, is_last=False, warms_up=False)
        with pytest.raises(RunError, match=r"^step 1: .* all tokens of 1 updates"):
            WeightWatch(Role.ACTOR, is_taught=True).look([row(advantage)], first, step=1, is_last=True, warms_up=False)
    else:
        watch.look([row(advantage)], second, step=2, is_last=True, warms_up=False)


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 23), ("bfloat16", 7)])
def test_a_teacher_within_rounding_is_the_policy(dtype: str, bits: int) -> None:
    """Logits of 1 that are rounded differ by 2^-bits, and distributions by its square; log-probs have 32 bits."""
    least = max(2.0 ** (-2 * bits), 8 * 2.0**-23)
    for divergence, tells in ((0.9 * least, False), (1.1 * least, True)):
        watch = WeightWatch(Role.ACTOR, is_taught=True, dtype=dtype)
        with nullcontext() if tells else pytest.raises(RunError, match="the teacher gives all tokens of 1 updates"):
            watch.look([row(None)], taught(divergence), step=1, is_last=True, warms_up=False)


def test_a_teacher_without_rewards_that_agrees_with_the_policy() -> None:
    first = FirstSteps(total_steps=9)
    texts = [
        first.warnings(step, outcome_of(FLAT), teaches=False, is_judged=False, read=str, of_cut=str)
        for step in range(1, 6)
    ]
    assert [len(each) for each in texts] == [0, 0, 1, 0, 0]
    assert texts[2][0].startswith("warning: in the first 3 steps the teacher gave all tokens the probabilities that")


def test_nothing_is_looked_at_once_weights_have_moved() -> None:
    watch = WeightWatch(Role.ACTOR)
    watch.look([row(1.0)], result(Role.ACTOR, 0.5, 900), step=1, is_last=False, warms_up=False)
    assert watch.is_done
    watch.look([row(1.0)], result(Role.ACTOR, 0.0, 0), step=2, is_last=True, warms_up=False)


def test_answers_that_are_all_cut() -> None:
    ((step, text),) = warned([outcome_of(MIXED, cut=True)] * 2)
    assert step == 1
    assert text.startswith("warning: 100% of the responses of step 1 were cut at rollout.max_response_tokens=7, ")


def test_rows_without_a_loss_token() -> None:
    rows = [replace(row(1.0), loss_mask=np.zeros(2, dtype=bool))] * 2
    with pytest.raises(RunError, match="step 1: none of the 2 rows of the actor has a loss token"):
        WeightWatch(Role.ACTOR).look(rows, result(Role.ACTOR, 0.0, 0), step=1, is_last=False, warms_up=False)
