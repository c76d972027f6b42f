"""Users' functions in their processes: mixing, files per source, what fails, and the trial before a run."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from megarl.algos.advantages import compute_advantages
from megarl.config.algo import AdvantageConfig
from megarl.config.load import from_dict
from megarl.config.rewards import RewardsConfig
from megarl.errors import ConfigError, DataError, RunError
from megarl.rewards.custom import CustomFunctions, try_functions
from megarl.rewards.custom.call import MAX_OUTPUT_CHARS
from megarl.rewards.judge import Judged
from megarl.rewards.rule import RuleJudge
from megarl.types import Prompt, Reward, scored_batch
from tests.helpers.reward_items import item
from tests.helpers.rows import random_rows
from tests.helpers.segments import policy_segment
from tests.helpers.verifier import without_algebra

ONE = """
import os, time

def length(solution_str, ground_truth):
    return len(solution_str)

def fragile(solution_str, ground_truth):
    if solution_str == "die":
        os._exit(3)
    if solution_str == "hang":
        time.sleep(60)
    return 1 / int(solution_str)

def opinion(completions, **kwargs):
    return [None if c == "?" else 0.5 for c in completions]

def parts(solution_str, ground_truth):
    return {"score": 1.0, "style": None if solution_str == "?" else 1.0}

def unsure(queries, prompts, labels):
    is_unsure = queries[0].endswith("?")
    return {"rewards": [None if is_unsure else 1.0], "extra_logs": {"unjudged": ["who knows" if is_unsure else ""]}}

def broken(solution_str, ground_truth):
    return {"score": 1.0, "style": float("nan") if solution_str == "?" else 1.0}

def tokens(completion_ids, **kwargs):
    return [sum(ids) for ids in completion_ids]

def longest(completions, **kwargs):
    return [len(c) == max(map(len, completions)) for c in completions]

async def stubborn(solution_str, ground_truth):
    # As functions fail among others: one swallows its cancellation, others stop the loop or the process.
    import asyncio, sys
    while solution_str == "deaf":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
    if solution_str == "block":
        time.sleep(60)
    if solution_str == "die":
        os._exit(0)
    if solution_str == "exit":
        sys.exit(0)
    if solution_str == "thread":
        await asyncio.to_thread(time.sleep, 60)
    if solution_str == "leave":
        asyncio.get_running_loop().create_task(stubborn("deaf", ""))
    return 1.0

def streams(solution_str, ground_truth):
    # What an ordinary program may do with its standard streams.
    import faulthandler, logging, subprocess, sys
    os.write(1, b"raw ")
    sys.stdout.buffer.write(b"bytes ")
    print(chr(0xD83D), flush=True)
    sys.stdout.reconfigure(encoding="utf-8")
    logging.getLogger("mine").error("logged")
    faulthandler.enable()
    assert (sys.stdout.fileno(), sys.stderr.fileno(), sys.stdin.fileno()) == (1, 2, 0)
    assert not sys.stdout.isatty() and sys.stdin.read() == ""
    # More than a pipe holds.
    flood = "yes | head -c 3000000; echo child >&2"
    subprocess.run(flood, shell=True, check=True, stdout=sys.stdout, stderr=sys.stderr)
    if solution_str == "close":
        sys.stdout.close()
        os.close(1)
        os.close(2)
    return int(input())

def daemon(solution_str, ground_truth):
    # A process leaves the session, and another one its parent; both tell their ids, then hang.
    import subprocess
    script = "echo $$ >one; sleep 600 & echo $! >two; wait"
    subprocess.run(f"setsid sh -c '{script}' &", shell=True, cwd=solution_str)
    while not (os.path.exists(f"{solution_str}/two") and os.path.getsize(f"{solution_str}/two")):
        time.sleep(0.01)
    return 1.0

def environment(solution_str, ground_truth):
    names = ("RAY_AUTH_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SEARCH_API_KEY")
    return {"score": 1.0, **{name: float(name in os.environ) for name in names}}

async def slowly(solution_str, ground_truth):
    import asyncio
    await asyncio.sleep(0.2)
    return len(solution_str)
"""
TWO = """
def reward_func(queries, prompts, labels, **kwargs):
    return {"rewards": [-1.0] * len(queries), "extra_logs": {"words": ["a b"] * len(queries)}}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    directory = tmp_path_factory.mktemp("custom")
    (directory / "one.py").write_text(ONE)
    (directory / "two.py").write_text(TWO)
    return {name: str(directory / f"{name}.py") for name in ("one", "two")}


@contextmanager
def judge_of(custom: dict[str, Any], **others: Any) -> Iterator[RuleJudge]:
    """A judge that has processes for scorers, and imports algebra, only where `sources` name some, as tests wait."""
    custom = {"workers": 2, "timeout_s": 20.0, **custom}
    config = from_dict(RewardsConfig, {"custom": custom, "verifier": {"workers": 1}, **others})
    with ExitStack() as stack:
        if "sources" not in others:
            stack.enter_context(patch("megarl.rewards.rule.VerifierPool"))
            stack.enter_context(without_algebra())
        yield stack.enter_context(closing(RuleJudge(config)))


def judged(judge: RuleJudge, *answers: tuple[str, str, str]) -> Judged:
    """Answers to (prompt, data source)."""
    judging = judge.begin()
    for prompt, source, response in answers:
        judging.add(item(prompt, response, "8", source=source))
    return judge.finish([judging])


def test_a_file_per_source_and_sums_with_weights(files: Mapping[str, str]) -> None:
    functions = {
        "length": {"path": files["one"], "name": "length", "weight": 0.5, "sources": ["a"]},
        "opinion": {"path": files["one"], "name": "opinion", "weight": 2.0, "sources": ["a", "sums"]},
        "rest": {"path": files["two"]},
    }
    sources = {"sums": {"scorer": "megarl/sums"}, "others": {"scorer": "megarl/sums"}}
    with judge_of({"functions": functions}, sources=sources) as judge:
        found = judged(
            judge,
            ("p", "a", "four"),
            ("p", "a", "?"),
            ("q", "b", "x"),
            ("r", "sums", "#### 8"),
            ("r", "sums", "?"),
            ("s", "others", "#### 8"),
        )
    # 0.5 · 4 + 2 · 0.5; an answer on which `opinion` has none: 0.5 · 1.
    assert [each.score for each in found.rewards] == [3.0, 0.5, -1.0, 2.0, 0.0, 1.0]
    assert found.rewards[0] == Reward(
        score=3.0,
        correct=True,
        details={"length/score": 4.0, "opinion/score": 0.5},
        own_score=4.0,
        no_opinion=("rest/score",),
    )
    assert found.rewards[2].notes == {"rest/words": "a b"}
    # The scorer decides what is correct.
    assert [each.correct for each in found.rewards[3:5]] == [True, False]
    assert found.rewards[3].details["custom/score"] == 1.0
    assert found.tallies["reward/rule/opinion/score"].value == 0.5


def test_functions_get_the_keys_that_are_passed_on_and_no_others(
    files: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("RAY_AUTH_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SEARCH_API_KEY")
    for name in keys:
        monkeypatch.setenv(name, "of the user")
    custom = {"path": files["one"], "name": "environment", "pass_env": ["SEARCH_API_KEY"]}
    with judge_of(custom) as judge:
        (reward,) = judged(judge, ("q", "a", "x")).rewards
        assert {name: reward.details[name] for name in keys} == dict.fromkeys(keys, 0.0) | {"SEARCH_API_KEY": 1.0}
    with pytest.raises(ConfigError, match=r"rewards.custom.pass_env: NOT_SET is not set; export it"):
        CustomFunctions(from_dict(RewardsConfig, {"custom": {**custom, "pass_env": ["NOT_SET"]}})).check()


def test_components_without_an_opinion(files: Mapping[str, str]) -> None:
    """Of a function, of an entry of a mapping, of OpenRLHF's rewards, and of functions beside a scorer."""
    functions = {
        "length": {"path": files["one"], "name": "length", "sources": ["a"]},
        "opinion": {"path": files["one"], "name": "opinion", "sources": ["a", "sums"]},
        "parts": {"path": files["one"], "name": "parts", "sources": ["a"]},
        "unsure": {"path": files["one"], "name": "unsure", "sources": ["a"]},
    }
    with judge_of({"functions": functions}, sources={"sums": {"scorer": "megarl/sums"}}) as judge:
        answers = [("p", "a", text) for text in ("four", "?", "ten", "?")]
        found = judged(judge, *answers, ("r", "sums", "?"), ("r", "sums", "#### 8"))
    silent = ("parts/style", "opinion/score", "unsure/score")
    assert [each.no_opinion for each in found.rewards] == [
        (),
        silent,
        (),
        silent,
        ("custom/score", "length/score", "opinion/score", "parts/score", "unsure/score"),
        ("length/score", "parts/score", "unsure/score"),
    ]
    assert found.tallies["reward/rule/parts/style"].value == 1.0
    rows = [replace(row, uid="p") for row in random_rows([(1, 1)] * 4, holes=False)]
    components = {"opinion/score": 1.0, "parts/style": 1.0, "unsure/score": 1.0, "length/score": 0.25}
    cfg = AdvantageConfig(estimator="gdpo", components=components)
    advantages = compute_advantages(scored_batch(rows, found.rewards[:4]), cfg).advantages[:, 0]
    # Only lengths 4, 1, 3, 1 differ: their mean is 2.25, their deviation 1.5, and the batch's normalisation keeps both.
    assert advantages.tolist() == pytest.approx([1.75 / 1.5, -1.25 / 1.5, 0.75 / 1.5, -1.25 / 1.5], abs=1e-4)


def test_a_part_that_is_nan_names_its_row(files: Mapping[str, str]) -> None:
    functions = {"length": {"path": files["one"], "name": "length"}, "broken": {"path": files["one"], "name": "broken"}}
    with judge_of({"functions": functions}) as judge:
        found = judged(judge, ("p", "a", "four"), ("p", "a", "?"))
    cfg = AdvantageConfig(estimator="gdpo", components={"broken/style": 1.0})
    batch = scored_batch([replace(row, uid="p") for row in random_rows([(1, 1)] * 2)], found.rewards)
    with pytest.raises(DataError, match=r"row 1 \(uid 'p'\) has no number 'broken/style'"):
        compute_advantages(batch, cfg)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [("deaf", "timed_out"), ("block", "timed_out"), ("die", "crashed"), ("exit", "failed"), ("thread", "timed_out")],
)
def test_one_call_under_way_takes_no_other_with_it(files: Mapping[str, str], answer: str, outcome: str) -> None:
    functions = {"stubborn": {"path": files["one"], "name": "stubborn"}}
    with judge_of({"functions": functions, "timeout_s": 1.5, "workers": 1}) as judge:
        found = judged(judge, *(("p", "a", answer if i == 3 else "good") for i in range(12)))
        assert [i for i, each in enumerate(found.rewards) if each.dropped] == [3]
        assert [each.outcome for each in found.troubles] == [outcome]
        # Its worker, or one in its place, judges on.
        assert [each.score for each in judged(judge, ("p", "a", "good")).rewards] == [1.0]


def test_what_a_call_leaves_in_the_loop_holds_nobody_up(files: Mapping[str, str]) -> None:
    functions = {"stubborn": {"path": files["one"], "name": "stubborn"}}
    with judge_of({"functions": functions, "workers": 1}) as judge:
        for _ in range(2):
            assert [each.score for each in judged(judge, *[("p", "a", "leave")] * 3).rewards] == [1.0] * 3


def test_a_function_of_single_rows_has_a_limit_for_each(files: Mapping[str, str]) -> None:
    """Whatever `per` says."""
    functions = {"fragile": {"path": files["one"], "name": "fragile", "per": "group"}}
    with judge_of({"functions": functions, "timeout_s": 1.5}) as judge:
        found = judged(judge, ("p", "a", "1"), ("p", "a", "hang"), ("p", "a", "4"), ("p", "a", "die"))
    assert [each.dropped for each in found.rewards] == [False, True, False, True]
    assert [each.outcome for each in found.troubles] == ["timed_out", "crashed"]


def test_standard_streams_are_those_of_a_program(files: Mapping[str, str]) -> None:
    functions = {"streams": {"path": files["one"], "name": "streams"}, "rest": {"path": files["two"]}}
    with judge_of({"functions": functions, "workers": 1, "on_error": "value", "value": 0.0}) as judge:
        for response in ("close", "", ""):
            judging = judge.begin()
            judging.add(item("p", response, "8", source="a"))
            (trouble,) = judge.finish([judging]).troubles
            # Standard input is empty; of the output there is the end.
            assert "EOFError" in trouble.reason, trouble.reason
            assert "child\n" in trouble.output
            assert len(trouble.output) <= MAX_OUTPUT_CHARS


def test_no_process_outlives_the_workers(files: Mapping[str, str], tmp_path: Path) -> None:
    with judge_of({"functions": {"daemon": {"path": files["one"], "name": "daemon"}}, "workers": 1}) as judge:
        assert judged(judge, ("p", "a", str(tmp_path))).rewards[0].score == 1.0
        pids = [int((tmp_path / name).read_text()) for name in ("one", "two")]
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_functions_of_tokens(files: Mapping[str, str]) -> None:
    """TRL's: one without texts, and one that is not given tokens because it does not ask for them."""
    functions = {
        "tokens": {"path": files["one"], "name": "tokens"},
        "opinion": {"path": files["one"], "name": "opinion"},
    }
    with judge_of({"functions": functions}) as judge:
        judging = judge.begin()
        given = item("p", "abc", "")
        segments = (*given.sample.segments, policy_segment([7, 8]))
        judging.add(replace(given, sample=replace(given.sample, segments=segments)))
        assert judge.finish([judging]).rewards[0].details == {"tokens/score": 15.0, "opinion/score": 0.5}


def test_groups_are_compared_within_themselves(files: Mapping[str, str]) -> None:
    with judge_of({"path": files["one"], "name": "longest", "per": "group"}) as judge:
        first, second = judge.begin(), judge.begin()
        for judging, prompt, response in (
            (first, "p", "a"),
            (first, "q", "abc"),
            (second, "p", "ab"),
            (second, "q", ""),
        ):
            judging.add(item(prompt, response, ""))
        assert [each.score for each in judge.finish([first, second]).rewards] == [0.0, 1.0, 1.0, 0.0]


def test_coroutine_functions_judge_many_rows_at_a_time(files: Mapping[str, str]) -> None:
    with judge_of({"path": files["one"], "name": "slowly"}) as judge:
        judging = judge.begin()
        for index in range(50):
            judging.add(item(f"p{index}", "x" * index, ""))
        judging_pending = judging.pending()
        found = judge.finish([judging])
    assert len(judging_pending) == 2
    assert [each.score for each in found.rewards] == [float(i) for i in range(50)]


def test_one_row_that_fails_is_dropped(files: Mapping[str, str]) -> None:
    with judge_of({"path": files["one"], "name": "fragile", "timeout_s": 1.5, "workers": 1}) as judge:
        found = judged(judge, *(("p", "a", response) for response in ("2", "0", "die", "hang", "4")))
        assert [each.dropped for each in found.rewards] == [False, True, True, True, False]
        assert [found.rewards[row].score for row in (0, 4)] == [0.5, 0.25]
        shares = {name: found.tallies[f"reward/{name}_frac"].value for name in ("failed", "crashed", "timeout")}
        assert shares == {"failed": 0.2, "crashed": 0.2, "timeout": 0.2}
        troubles = [(each.item.response, each.outcome) for each in found.troubles]
        assert troubles == [("0", "failed"), ("die", "crashed"), ("hang", "timed_out")]
        assert "ZeroDivisionError" in found.troubles[0].reason
        assert found.troubles[0].output.startswith("Traceback")
        # All answers to a single odd prompt may fail, not those to all prompts.
        assert all(each.dropped for each in judged(judge, ("p", "a", "0"), ("p", "a", "x")).rewards)
        with pytest.raises(
            RunError, match=r"fragile failed on 2 of 2 rows, so nothing is left.*one.py:12: ZeroDivision"
        ):
            judged(judge, ("p", "a", "0"), ("q", "a", "0"))
        # Nor may the function be late, or end its process, for all of them.
        with pytest.raises(RunError, match=r"fragile failed on 2 of 2 rows, .*, of 'a' \(crashed\)"):
            judged(judge, ("p", "a", "die"), ("q", "a", "hang"))


def test_what_to_do_with_a_row_that_fails_is_said(files: Mapping[str, str]) -> None:
    custom = {"path": files["one"], "name": "fragile", "workers": 1}
    with judge_of({**custom, "on_error": "value", "value": -3}) as judge:
        found = judged(judge, ("p", "a", "0"), ("p", "a", "2"))
        assert [(each.score, each.correct) for each in found.rewards] == [(-3.0, False), (0.5, True)]
    with judge_of({**custom, "on_error": "raise", "timeout_s": 1.5}) as judge:
        for response in ("0", "die", "hang"):
            with pytest.raises(RunError, match=r"failed on 1 of 2 rows"):
                judged(judge, ("p", "a", response), ("p", "a", "2"))


def tried(custom: dict[str, Any], truth: str) -> None:
    rewards = from_dict(RewardsConfig, {"custom": custom})
    prompt = Prompt(uid="p1", token_ids=(), data_source="a", ground_truth=truth)
    with without_algebra():
        try_functions(CustomFunctions(rewards), [prompt])


@pytest.mark.parametrize(
    ("body", "is_flat"),
    [
        ("1.0", True),
        ("float(ground_truth in solution_str)", False),
        # Neither the bare answer nor an empty one is in their forms.
        ("float('#### ' + ground_truth in solution_str)", False),
        ("float('boxed{' + ground_truth in solution_str)", False),
        ("float('<answer>' in solution_str)", False),
    ],
)
def test_a_function_that_gives_every_answer_the_same_is_warned_of(
    body: str, is_flat: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(f"def mine(solution_str, ground_truth):\n    return {body}\n")
    tried({"path": str(tmp_path / "mine.py"), "name": "mine", "workers": 1}, "8")
    told = capsys.readouterr().out
    assert told.startswith("warning: rewards.custom: the function mine is flat: it gave ") == is_flat
    assert bool(told) == is_flat


def test_the_trial(files: Mapping[str, str]) -> None:
    """An empty answer is no number, which `fragile` may refuse unless the run ends of it."""
    custom = {"path": files["one"], "name": "fragile", "workers": 1}
    tried(custom, "8")
    with pytest.raises(
        ConfigError, match=r"fragile has no reward for 1 of 2 trial answers to prompt p1 of 'a' \(failed\)"
    ):
        tried({**custom, "on_error": "raise"}, "8")
    with pytest.raises(ConfigError, match=r"(?s)for 2 of 2 .*one.py:12: ValueError: invalid.*It printed:\nTraceback"):
        tried(custom, "eight")
