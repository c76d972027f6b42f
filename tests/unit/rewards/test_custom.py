"""Reward functions from a file."""

from pathlib import Path

import pytest

from megarl.errors import ConfigError, RunError
from megarl.rewards import Scorer, load_reward_function

SIGNATURE = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"


def load(tmp_path: Path, text: str) -> Scorer:
    path = tmp_path / "reward.py"
    path.write_text(text, encoding="utf-8")
    return load_reward_function(path, data_source="mine")


def test_a_number_is_a_score(tmp_path: Path) -> None:
    scorer = load(tmp_path, SIGNATURE + "    return 0.5 if ground_truth in solution_str else -1\n")
    assert (scorer("it is 5", "5", {}).score, scorer("it is 5", "5", {}).correct) == (0.5, True)
    assert (scorer("it is 6", "5", {}).score, scorer("it is 6", "5", {}).correct) == (-1.0, False)


def test_a_mapping_has_accuracy_and_metrics(tmp_path: Path) -> None:
    scorer = load(
        tmp_path, SIGNATURE + "    return {'score': 0.2, 'acc': False, 'length': len(extra_info), data_source: 1}\n"
    )
    reward = scorer("", "", {"a": 1, "b": 2})
    assert (reward.score, reward.correct, reward.details) == (0.2, False, {"length": 2.0, "mine": 1.0})


EXTRAS = """
    import numpy as np
    return {
        "score": np.float32(0.5), "acc": np.bool_(True), "pred": "42", "format": True, "length": 3, "steps": [1, None],
        "probs": np.asarray([0.5, 0.25]), "reason": None, "ratio": float("nan"), "huge": 10 ** 400, "odd": {(1, 2): 3},
        "long": "ab" * 50_000,
    }
"""


def test_what_is_no_number_is_kept_as_notes(tmp_path: Path) -> None:
    """An answer that looks like a number is a text; 10**400 is no float; JSON has no NaN and no tuples as keys."""
    reward = load(tmp_path, SIGNATURE + EXTRAS)("", "", {})
    assert (reward.score, reward.correct, reward.details) == (0.5, True, {"format": 1.0, "length": 3.0})
    notes = dict(reward.notes)
    assert notes.pop("long") == '"' + "ab" * 8191 + "a"
    assert notes == {
        "pred": "42",
        "steps": [1, None],
        "probs": [0.5, 0.25],
        "reason": None,
        "ratio": "nan",
        "huge": 10**400,
        "odd": "{(1, 2): 3}",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef compute_score(:\n", r"reward\.py:2: "),
        ("x = 1\ny = 1 / 0\n", r"reward\.py:2: ZeroDivisionError: division by zero"),
        ("def other():\n    pass\n", r"reward\.py: has no function 'compute_score'; expected def compute_score\("),
        (
            "\ndef compute_score(a, b):\n    pass\n",
            r"reward\.py:2: compute_score: .*expected \(data_source, solution_str",
        ),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.py: no such file"):
        load_reward_function(tmp_path / "none.py", data_source="mine")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    helper = {}\n    return helper['x']\n", r"reward\.py:3: KeyError: 'x'"),
        ("    import json\n    return json.loads('{')\n", r"reward\.py:3: JSONDecodeError"),
        ("    return 'good'\n", r"reward\.py:1: returned good, expected a finite number"),
        ("    return float('nan')\n", r"reward\.py:1: returned nan, expected a finite number"),
        ("    return None\n", r"reward\.py:1: returned None, expected a finite number"),
        ("    return {'acc': 1}\n", r"a mapping with 'score', a finite number"),
        ("    return {'score': '1'}\n", r"a mapping with 'score', a finite number"),
        ("    return {'score': 1, 'acc': 'False'}\n", r"if there is 'acc', a number or a boolean"),
    ],
)
def test_calls_that_fail(tmp_path: Path, body: str, message: str) -> None:
    scorer = load(tmp_path, SIGNATURE + body)
    with pytest.raises(RunError, match=message):
        scorer("", "", {})
