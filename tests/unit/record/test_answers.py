"""pass@k, avg@n and what else an evaluation estimates, with numbers by hand."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.record.rollouts import (
    JudgedAnswer,
    majority_correct,
    pass_at_k,
    read_answers,
    results_by_source,
    write_answers,
)
from megarl.record.turns import Turn
from megarl.run.evaluation.output import results_lines


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 − C(3, 2)/C(4, 2) = 1 − 3/6
        (5, 2, 3, 9 / 10),  # 1 − C(3, 3)/C(5, 3) = 1 − 1/10
        (8, 3, 4, 13 / 14),  # 1 − C(5, 4)/C(8, 4) = 1 − 5/70
        (8, 5, 4, 1.0),  # three wrong ones cannot fill four places
        (8, 0, 8, 0.0),
        (1, 1, 1, 1.0),
    ],
)
def test_pass_at_k(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_counts_subsets(case: tuple[int, int, int]) -> None:
    """The share of all choices of k among n answers that hold a correct one."""
    n, c, k = case
    choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses_the_impossible(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="expected 1 <= k <= n, c <= n"):
        pass_at_k(n, c, k)


def answers(
    source: str, uid: str, correct: Sequence[bool], *, greedy: bool, tokens: int = 4, data: str = "val.parquet"
) -> list[JudgedAnswer]:
    """A greedy answer and sampled ones, every wrong one cut at 10 tokens."""
    sampled = [
        JudgedAnswer(
            data=data,
            data_source=source,
            uid=uid,
            sample_index=i,
            greedy=False,
            prompt="?",
            response="!",
            ground_truth="1",
            reward=1.0 if right else -0.5,
            correct=right,
            finish_reason="stop" if right else "length",
            num_response_tokens=tokens if right else 10,
        )
        for i, right in enumerate(correct)
    ]
    first = sampled[0]
    fields = {name: getattr(first, name) for name in JudgedAnswer.__annotations__}
    return [JudgedAnswer(**fields | {"greedy": True, "correct": greedy, "num_response_tokens": 99}), *sampled]


def test_of_a_conversation_the_last_turn_votes_and_turns_and_calls_are_counted() -> None:
    """Two tools said 7, the policy said 8 twice and nothing once."""
    said = [("#### 7", "#### 8"), ("#### 7", "#### 8"), ("#### 7", "so be it")]
    talks = []
    for (tool, last), answer in zip(
        said, answers("calculator", "a", [True, True, False], greedy=True)[1:], strict=True
    ):
        turns = (
            Turn(author="policy", text="calc"),
            Turn(author="environment", text=tool),
            Turn(author="demonstration", text="####"),
            Turn(author="policy", text=last.removeprefix("####")),
        )
        response = "".join(turn.text for turn in turns)
        talks.append(
            replace(answer, turns=turns if "8" in last else turns[:2] + turns[3:], response=response, num_calls=2)
        )
    assert majority_correct(talks) == 1.0
    (result,) = results_by_source(talks, [1])
    assert (result.turns, result.tool_calls) == (2.0, 2.0)
    assert results_lines([result])[0].split()[-2:] == ["turns", "calls"]
    assert results_lines([result])[1].split()[-2:] == ["2.00", "2.00"]


def test_conversations_come_back_from_files(tmp_path: Path) -> None:
    turn = Turn(author="policy", text="ab", reward=0.5, num_tokens=2)
    talk = replace(answers("calculator", "a", [True], greedy=True)[0], turns=(turn,), num_calls=1)
    write_answers(tmp_path / "a.parquet", [talk])
    assert read_answers(tmp_path / "a.parquet") == [talk]


def test_results_by_source() -> None:
    """Three prompts of `sums` with 1, 0 and 2 of 2 answers right, one of `gsm8k`; in an order that mixes them."""
    found = results_by_source(
        [
            *answers("sums", "a", [True, False], greedy=True),
            *answers("gsm8k", "d", [False, True], greedy=False),
            *answers("sums", "b", [False, False], greedy=False),
            *answers("sums", "c", [True, True], greedy=True),
        ],
        ks=(1, 2),
    )
    gsm8k, sums = found
    assert (gsm8k.data_source, sums.data_source) == ("gsm8k", "sums")
    assert (sums.num_prompts, sums.num_samples) == (3, 2)
    # Means 1/2, 0 and 1 of the prompts: sd 1/2, over √3.
    assert sums.avg == pytest.approx(0.5)
    assert sums.avg_std_error == pytest.approx(0.5 / math.sqrt(3))
    # pass@2 of the prompts: 1, 0, 1.
    assert sums.pass_at == pytest.approx({1: 0.5, 2: 2 / 3})
    assert sums.greedy == pytest.approx(2 / 3)
    # Three right answers and three wrong ones; the greedy answers' 99 tokens do not count.
    assert sums.reward == pytest.approx(0.25)
    assert sums.response_tokens == pytest.approx(7)
    assert sums.truncated_frac == pytest.approx(0.5)
    assert (gsm8k.num_prompts, gsm8k.avg, gsm8k.avg_std_error, gsm8k.greedy) == (1, 0.5, None, 0.0)


def test_files_of_the_same_source_are_kept_apart() -> None:
    found = results_by_source(
        [
            *answers("sums", "a", [True], greedy=True, data="hard.parquet"),
            *answers("sums", "b", [False], greedy=False, data="easy.parquet"),
        ],
        ks=(1,),
    )
    assert [(r.data, r.data_source, r.avg) for r in found] == [
        ("easy.parquet", "sums", 0.0),
        ("hard.parquet", "sums", 1.0),
    ]


def test_prompts_are_told_apart_by_uid_not_by_order() -> None:
    ordered = [
        *answers("sums", "a", [True, True], greedy=True),
        *answers("sums", "b", [False, False], greedy=False),
    ]
    shuffled = [ordered[i] for i in (4, 1, 5, 0, 2, 3)]
    assert results_by_source(shuffled, (1, 2)) == results_by_source(ordered, (1, 2))


def voted(response: str, correct: bool) -> JudgedAnswer:
    (answer,) = answers("sums", "a", [correct], greedy=False)[1:]
    return replace(answer, response=response)


@pytest.mark.parametrize(
    ("responses", "expected"),
    [
        # Two of three say 7.
        ([(r"\boxed{7}", True), (r"so \boxed{ 7 }", True), (r"\boxed{8}", False)], 1.0),
        ([("#### 8", False), ("#### 8", False), ("#### 7", True)], 0.0),
        # A tie of a right and a wrong answer; the response without an answer has no vote.
        ([("#### 8", False), ("<answer>7</answer>", True), ("no idea", False), ("none", False)], 0.5),
        ([("no idea", True)], 0.0),
    ],
)
def test_the_majority_of_final_answers(responses: list[tuple[str, bool]], expected: float) -> None:
    assert majority_correct([voted(*response) for response in responses]) == expected


def test_answers_that_nobody_could_judge_may_be_missing() -> None:
    """Prompt a has one of two answers left, which is right; prompt b has one right one of two."""
    left = [answer for answer in answers("sums", "a", [True, False], greedy=True) if answer.greedy or answer.correct]
    [found] = results_by_source([*left, *answers("sums", "b", [True, False], greedy=True)], ks=(2,))
    assert (found.num_samples, found.avg, found.pass_at) == (2, 0.75, {2: 1.0})


def test_answers_come_back_from_their_file(tmp_path: Path) -> None:
    written = answers("sums", "a", [True, False], greedy=False)
    write_answers(tmp_path / "validation/step_000003.parquet", written)
    assert read_answers(tmp_path / "validation/step_000003.parquet") == written
