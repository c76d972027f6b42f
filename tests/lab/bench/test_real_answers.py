"""The tool that tries scorers on real problems: on problems of our own, what it must find."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.rewards.scorers import SCORERS, RegisteredScorer
from megarl.types import Reward
from megarl_lab.bench.real_answers import (
    are_truly_equal,
    boxed,
    failures,
    measure,
    mutated,
    mutations,
    read_sets,
    shuffled,
    worked,
)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("train", "test"):
        write(tmp_path / f"gsm8k/{name}.jsonl", [{"answer": "1+1=2\n#### 2"}, {"answer": "2000+1\n#### 2,001"}])
    write(
        tmp_path / "eval/minerva_math.jsonl",
        [
            {"idx": 0, "solution": r"so \boxed{\frac{1}{2}}"},
            {"idx": 1, "solution": r"\boxed{x^{2}} m"},
            {"idx": 2, "solution": r"\boxed{4.5e33}"},
        ],
    )
    aime = [{"id": 1, "answer": "025", "solution": r"\boxed{25}"}, {"id": 2, "answer": "3", "solution": r"\boxed{4}"}]
    write(tmp_path / "eval/aime24.jsonl", aime)
    write(tmp_path / "eval/amc23.jsonl", [{"id": 0, "answer": 27.0}, {"id": 1, "answer": 36.0}])
    write(
        tmp_path / "eval/svamp.jsonl",
        [{"ID": "a", "Answer": 1.0}, {"ID": "b", "Answer": 1.5}, {"ID": "c", "Answer": 1.0}],
    )
    return tmp_path


def test_good_scorers_pass(root: Path) -> None:
    results = measure(root, 2)
    assert failures(results) == []
    # A worked solution of AIME that ends in another number is listed, and fails nothing.
    listed = [line for result in results if result.data == "aime24" for line in result.unexpected]
    assert listed == ["2 (gold 3)", "2 (gold 3)"]


def test_a_scorer_that_accepts_everything_fails(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCORERS._entries, "anything", RegisteredScorer(lambda *_: Reward(score=1.0, correct=True)))
    result = shuffled("svamp", "anything", read_sets(root)["svamp"], 2)
    # Of six pairs the two of 1.0 and 1.0 do not count.
    assert failures([result]) == ["svamp, other gold, anything: 4 accepted, 0 expected"]
    assert result.unexpected[0] == "1.0 for 1.5 (a, b)"


def test_a_scorer_that_accepts_mutations_fails(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCORERS._entries, "anything", RegisteredScorer(lambda *_: Reward(score=1.0, correct=True)))
    # Two digits, the sign and a factor of 1.0 and of 1.5.
    found = mutated("svamp", "anything", read_sets(root)["svamp"])
    assert failures([found]) == ["svamp, mutation, anything: 8 accepted, 0 expected"]
    assert found.unexpected[:4] == ("2.0 for 1.0", "1.1 for 1.0", "-1.0 for 1.0", r"1.0\pi for 1.0")


@pytest.mark.parametrize(
    ("gold", "others"),
    [
        ("12", ["22", "13", "-12", "120", r"12\pi"]),
        ("-0.9", ["-1.9", "-0.1", "0.9", r"-0.9\pi"]),
        # The digit of a name is no value.
        ("x_{1}^2", ["x_{1}^3"]),
        ("(1, 2)", ["(2, 2)", "(1, 3)", "(1)"]),
        ("0", ["1"]),
    ],
)
def test_mutations(gold: str, others: list[str]) -> None:
    assert mutations(gold) == others


def test_what_is_wrong_is_found(root: Path) -> None:
    problems = read_sets(root)["minerva_math"]
    found = failures([worked("minerva_math", "megarl/sums", problems), boxed("minerva_math", "answer_line", problems)])
    assert found == [
        "minerva_math, worked, megarl/sums: 0/3 correct, at least 99.5% expected",
        "minerva_math, boxed gold, answer_line: 3 wrong, 0 expected",
    ]


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [("1", "1.0", True), ("2,001", "2001", True), ("1/2", "0.5", True), ("x", "x", True), ("x", "y", False)],
)
def test_truly_equal(a: str, b: str, equal: bool) -> None:
    assert are_truly_equal(a, b) is equal
