"""Reward functions from a file: which conventions are known, what functions are given, and what they may return.

They are called as workers call them, in this process.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megarl.config.rewards import CustomConfig, RewardsConfig
from megarl.errors import ConfigError
from megarl.rewards.custom import CustomFunctions
from megarl.rewards.custom.call import call_function
from megarl.rewards.question import Question, Verdict
from megarl.rewards.verifier.types import WorkerReply
from megarl.types import Message, Reward

SIGNATURE = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"


def question(response: str, truth: str = "", extra: dict[str, Any] | None = None, **others: Any) -> Question:
    return Question(
        data_source="mine", prompt="?", response=response, ground_truth=truth, extra_info=extra or {}, **others
    )


def ask(
    tmp_path: Path,
    text: str,
    rows: Sequence[Question],
    *,
    together: bool = False,
    arguments: dict[str, Any] | None = None,
) -> list[Verdict]:
    path = tmp_path / "reward.py"
    path.write_text(text, encoding="utf-8")
    verdicts = call_function(
        "", "", {}, rows=rows, path=str(path), name="compute_score", arguments=arguments or {}, together=together
    )
    # As it comes from a worker.
    reply = WorkerReply(outcome="scored", verdicts=tuple(verdicts))
    return list(WorkerReply.decode(json.dumps(asdict(reply)).encode()).verdicts)


def reward_of(tmp_path: Path, text: str, row: Question, **settings: Any) -> Reward:
    (verdict,) = ask(tmp_path, text, [row], **settings)
    assert verdict.reward is not None, verdict.reason
    return verdict.reward


def test_a_number_is_a_score(tmp_path: Path) -> None:
    text = SIGNATURE + "    return 0.5 if ground_truth in solution_str else -1\n"
    assert [each.reward for each in ask(tmp_path, text, [question("it is 5", "5"), question("it is 6", "5")])] == [
        Reward(score=0.5, correct=True),
        Reward(score=-1.0, correct=False),
    ]


def test_a_mapping_has_accuracy_and_metrics(tmp_path: Path) -> None:
    text = SIGNATURE + "    return {'score': 0.2, 'acc': False, 'length': len(extra_info), data_source: 1}\n"
    reward = reward_of(tmp_path, text, question("", "", {"a": 1, "b": 2}))
    assert reward == Reward(score=0.2, correct=False, details={"length": 2.0, "mine": 1.0})


# Each says what it was given, as a function of its library is.
KINDS = {
    "verl": (
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return len(solution_str)",
        [2.0, 3.0],
    ),
    "verl, few parameters": (
        "def compute_score(solution_str, ground_truth):\n    return len(ground_truth)",
        [1.0, 1.0],
    ),
    "verl's batch manager": (
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [{'score': len(text), 'acc': 0} for text in solution_strs]",
        [2.0, 3.0],
    ),
    "OpenRLHF": (
        "def compute_score(queries, prompts, labels, **kwargs):\n"
        "    return {'rewards': [len(q) - len(p) for q, p in zip(queries, prompts)]}",
        [2.0, 3.0],
    ),
    "TRL": (
        "def compute_score(completions, **kwargs):\n    return [float(len(text)) for text in completions]",
        [2.0, 3.0],
    ),
    "TRL, a column": (
        "def compute_score(prompts, completions, index):\n    return [None if i == 1 else i for i in index]",
        [None, 7.0],
    ),
    "TRL, the ground truth": (
        "def compute_score(completions, answer):\n    return [int(a) for a in answer]",
        [4.0, 5.0],
    ),
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_conventions_of_libraries(tmp_path: Path, kind: str, together: bool) -> None:
    """Called with lists of one row, or of all."""
    text, expected = KINDS[kind]
    rows = [question("ab", "4", {"index": 1}), question("abc", "5", {"index": 7})]
    for source in (text, text.replace("def ", "async def ")):
        verdicts = ask(tmp_path, source, rows, together=together)
        assert [each.reward and each.reward.score for each in verdicts] == expected, verdicts
        (tmp_path / "reward.py").touch()


def test_trl_gets_chats_where_the_data_has_chats(tmp_path: Path) -> None:
    text = (
        "def compute_score(prompts, completions, **kwargs):\n"
        "    return [len(p[-1]['content']) + 10 * len(c[0]['content']) for p, c in zip(prompts, completions)]"
    )
    row = question("abc", messages=(Message(role="system", content="x"), Message(role="user", content="hi")))
    assert reward_of(tmp_path, text, row).score == 32.0


def test_functions_of_groups_see_all_rows_at_once(tmp_path: Path) -> None:
    text = "def compute_score(completions):\n    return [len(c) == max(map(len, completions)) for c in completions]"
    rows = [question("a"), question("abc"), question("ab")]
    assert [each.reward and each.reward.score for each in ask(tmp_path, text, rows, together=True)] == [0.0, 1.0, 0.0]


def test_calls_of_a_coroutine_function_overlap(tmp_path: Path) -> None:
    """Each waits for all of them to have begun, which would never end one after the other."""
    text = (
        "import asyncio\nbarrier = asyncio.Barrier(3)\n"
        "async def compute_score(solution_str, ground_truth):\n"
        "    await asyncio.wait_for(barrier.wait(), 5.0)\n    return 1.0"
    )
    assert [each.outcome for each in ask(tmp_path, text, [question("a")] * 3)] == ["correct"] * 3


def test_further_arguments(tmp_path: Path) -> None:
    text = "def compute_score(solution_str, ground_truth, *, scale):\n    return scale * len(solution_str)"
    assert reward_of(tmp_path, text, question("ab"), arguments={"scale": 3}).score == 6.0


def test_what_one_row_does_does_not_concern_the_others(tmp_path: Path) -> None:
    text = SIGNATURE + "    print('judging', solution_str)\n    return 1 / int(solution_str)\n"
    bad, good = ask(tmp_path, text, [question("0"), question("2")])
    assert (bad.outcome, bad.reward) == ("failed", None)
    assert bad.reason == f"{tmp_path / 'reward.py'}:3: ZeroDivisionError: division by zero"
    assert bad.output.startswith("judging 0\njudging 2\nTraceback")
    assert good.reward == Reward(score=0.5, correct=True)


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
    reward = reward_of(tmp_path, SIGNATURE + EXTRAS, question(""))
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


def test_notes_of_many_rows_fit_into_a_reply(tmp_path: Path) -> None:
    text = SIGNATURE + "    return {'score': 1, 'text': 'é' * 16_000, 'pred': '4'}\n"
    verdicts = ask(tmp_path, text, [question("")] * 200)
    replied = json.dumps([each.reward and dict(each.reward.notes) for each in verdicts])
    assert len(replied) < 1 << 20
    assert {each.reward.notes["pred"] for each in verdicts if each.reward} == {"4"}


def check(path: Path, name: str = "compute_score") -> None:
    CustomFunctions(RewardsConfig(custom=CustomConfig(path=str(path), name=name))).check()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef compute_score(:\n", r"reward\.py:2: "),
        ("x = 1\ny = 1 / 0\n", r"reward\.py:2: ZeroDivisionError: division by zero"),
        ("def other():\n    pass\n", r"reward\.py: has no function 'compute_score', only other; set its name"),
        (
            "\ndef compute_score(a, b):\n    pass\n",
            r"reward\.py:2: compute_score: got the parameters \(a, b\), expected one of solution_str \(verl\), ",
        ),
        (
            "\ndef compute_score(solution_str, truth):\n    pass\n",
            r"reward\.py:2: compute_score: missing a required argument: 'truth'; a call offers data_source, ",
        ),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "reward.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        check(tmp_path / "reward.py")


@pytest.mark.parametrize("text", ["x = 1\ndef compute_score(:\n", "x = 1\ny = 1 / 0\n"])
def test_the_line_of_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(text)
    with pytest.raises(ConfigError, match=r"^reward\.py:2: "):
        check(Path("reward.py"))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.py: no such file"):
        check(tmp_path / "none.py")


FAILURES = [
    (SIGNATURE + "    helper = {}\n    return helper['x']\n", "reward.py:3: KeyError: 'x'"),
    (SIGNATURE + "    import json\n    return json.loads('{')\n", "reward.py:3: JSONDecodeError"),
    (SIGNATURE + "    return 'good'\n", "reward.py:1: returned 'good', expected a finite number"),
    (SIGNATURE + "    return float('nan')\n", "reward.py:1: returned nan, expected a finite number"),
    (SIGNATURE + "    return None\n", "reward.py:1: returned None, expected a finite number"),
    (SIGNATURE + "    return {'acc': 1}\n", "a mapping with 'score', a finite number"),
    (SIGNATURE + "    return {'score': '1'}\n", "a mapping with 'score', a finite number"),
    (SIGNATURE + "    return {'score': 1, 'acc': 'False'}\n", "if there is 'acc', a number or a boolean"),
    ("def compute_score(completions):\n    return [1, 2]\n", "returned [1, 2], expected a list of 1 numbers or None"),
    ("def compute_score(completions):\n    return ['1']\n", "returned '1' for a row, expected a finite number"),
    (
        "def compute_score(completions, depth):\n    pass\n",
        "missing a required argument: 'depth'; a call offers prompts",
    ),
    ("def compute_score(queries):\n    return {'rewards': [1, 2]}", "returned for 1 rows: rewards: got 2 numbers"),
]


@pytest.mark.parametrize(("text", "reason"), FAILURES)
def test_calls_that_fail(tmp_path: Path, text: str, reason: str) -> None:
    (verdict,) = ask(tmp_path, text, [question("")])
    assert (verdict.reward, verdict.outcome) == (None, "failed")
    assert reason in verdict.reason


@pytest.mark.parametrize("together", [False, True])
def test_trl_functions_log_metrics_and_columns(tmp_path: Path, together: bool) -> None:
    """`log_metric(name, value)` is averaged over a batch, `log_extra(column, values)` has an entry per completion."""
    text = (
        "def compute_score(completions, log_extra, log_metric=None, **kwargs):\n"
        "    log_metric('chars', sum(map(len, completions)) / len(completions))\n"
        "    log_metric('nothing', float('nan'))\n"
        "    log_extra('first', [text[0] for text in completions])\n"
        "    return [1.0] * len(completions)"
    )
    for source in (text, text.replace("def ", "async def ")):
        verdicts = ask(tmp_path, source, [question("ab"), question("cdef")], together=together)
        rewards = [each.reward for each in verdicts if each.reward is not None]
        assert [each.details["chars"] for each in rewards] == ([3.0, 3.0] if together else [2.0, 4.0]), verdicts
        assert [(len(each.details), each.notes) for each in rewards] == [(1, {"first": "a"}), (1, {"first": "c"})]
        (tmp_path / "reward.py").touch()


def test_a_logged_column_has_an_entry_per_row(tmp_path: Path) -> None:
    text = "def compute_score(completions, log_extra):\n    log_extra('x', [1, 2])\n    return [1.0]"
    (verdict,) = ask(tmp_path, text, [question("a")])
    assert (verdict.outcome, "log_extra: x has 2 values, expected 1" in verdict.reason) == ("failed", True)
