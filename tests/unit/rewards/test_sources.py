"""Ranges of data sources, formats, and scorers by name."""

import time
from dataclasses import replace
from typing import Any

import pytest

from megarl.config.rewards import CustomConfig, RewardsConfig
from megarl.errors import ConfigError, DataError
from megarl.rewards import PARSE_FAILED, SCORERS, SOURCES, SourceSpec, score, source_spec
from megarl.rewards.routes import filter_ranges
from megarl.rewards.scorers import FORMATS


def test_golden_ranges(golden: Any) -> None:
    case = golden("A.reward.ranges")
    scores = [score(row["data_source"], row["response"], row["ground_truth"], {}).score for row in case["inputs"]]
    assert scores == case["expected"]


@pytest.mark.parametrize(
    ("data_source", "correct", "wrong"),
    [
        # The ranges of the specification.
        ("hendrycks_math", 1, -1),
        ("hendrycks_math:train_MATH-500:test", 1, -1),
        ("math500", 1, -1),
        ("hendrycks_math01", 1, 0),
        ("amc23", 1, -1),
        ("aime2024", 1, -1),
        ("aime2025", 1, -1),
        ("gpqa", 1, 0),
        ("openai/gsm8k", 1, 0),
        ("hiyouga/geometry3k", 1, 0),
        ("lighteval/MATH", 1, 0),
        ("math_dapo", 1, -1),
        ("numina_olympiads", 1, 0),
    ],
)
def test_default_ranges(data_source: str, correct: float, wrong: float) -> None:
    spec = source_spec(data_source)
    assert (spec.correct, spec.wrong, spec.malformed) == (correct, wrong, None)
    gold = "B" if data_source == "gpqa" else "5"
    right = {"openai/gsm8k": "#### 5", "math_dapo": "Answer: 5"}.get(data_source, rf"\boxed{{{gold}}}")
    assert score(data_source, right, gold, {}).score == correct
    reward = score(data_source, "I do not know.", gold, {})
    assert (reward.score, reward.correct, reward.details[PARSE_FAILED]) == (wrong, False, 1.0)


def test_every_source_has_a_scorer() -> None:
    assert {spec.variant for spec in SOURCES.values()} <= set(SCORERS)


def test_a_wrong_answer_is_not_one_that_cannot_be_read() -> None:
    for response, failed in [(r"\boxed{6}", 0.0), (r"\boxed{\frac{1}{}", 1.0), ("6", 1.0), (r"\boxed{}", 1.0)]:
        reward = score("hendrycks_math", response, "5", {})
        assert (reward.score, reward.details[PARSE_FAILED]) == (-1.0, failed)
    assert score("hendrycks_math", r"\boxed{" + "1" * 513 + "}", "5", {}).details[PARSE_FAILED] == 1.0


def test_a_source_can_be_changed() -> None:
    spec = source_spec("hendrycks_math", correct=2.0, wrong=-0.5, malformed=-2.0)
    scores = [score("x", response, "5", {}, source=spec).score for response in (r"\boxed{5}", r"\boxed{6}", "")]
    assert scores == [2.0, -0.5, -2.0]
    # Another scorer brings its own values.
    assert source_spec("hendrycks_math", scorer="gpqa") == SOURCES["gpqa"]
    assert source_spec("hendrycks_math", scorer="luffy/1").malformed == -1.0
    assert source_spec("anything", scorer="strict") == SourceSpec(scorer="strict")


def test_modes_of_a_source() -> None:
    # Half of 100: the factor that only the reference forgives.
    for mode, expected in [("fix", -1.0), ("doc", 1.0), ("ref", 1.0)]:
        assert score("math500", r"\boxed{0.5}", "50", {}, source=source_spec("math500", mode=mode)).score == expected


def test_last_number_is_opt_in() -> None:
    assert not score("math500", "that makes 5", "5", {}).correct
    assert score("math500", "that makes 5", "5", {}, source=source_spec("math500", scorer="math/last_number")).correct


def test_unknown_names() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown data source 'gpq'; did you mean 'gpqa'\? .*hendrycks_math.* rewards\.custom$"
    ):
        source_spec("gpq")
    with pytest.raises(ConfigError, match="unknown scorer 'strikt'; did you mean 'strict'"):
        source_spec("aime2024", scorer="strikt")
    with pytest.raises(ConfigError, match="unknown data source 'luffy/0@ref'"):
        source_spec("aime2024", scorer="luffy/0", mode="ref")


@pytest.mark.parametrize(
    "changes",
    [{"correct": -1.0}, {"wrong": float("nan")}, {"malformed": float("inf")}],
)
def test_ranges_are_checked(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected finite numbers with correct > wrong"):
        source_spec("gpqa", **changes)


@pytest.mark.parametrize(
    "changes", [{"format": "think"}, {"format_weight": 0.1}, {"format": "think", "format_weight": 1.0}]
)
def test_format_and_weight_go_together(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected both or neither, the weight below 1"):
        source_spec("gpqa", **changes)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        # .9·correct + .1·format
        (r"<think>so</think> \boxed{5}", 1.0),
        (r"\boxed{5}", 0.9),
        (r"<think>so</think> \boxed{6}", 0.1),
        (r"\boxed{6}", 0.0),
        ("", 0.0),
    ],
)
def test_format_as_a_share(response: str, expected: float) -> None:
    spec = source_spec("hiyouga/geometry3k", format="think_boxed", format_weight=0.1)
    reward = score("hiyouga/geometry3k", response, "5", {}, source=spec)
    assert reward.score == pytest.approx(expected, abs=1e-12)
    assert reward.details["format"] == float(response.startswith("<think>"))
    # The range is that of the mixture.
    reward = score("x", response, "5", {}, source=replace(spec, wrong=-1.0))
    assert reward.score == pytest.approx(2 * expected - 1, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "response", "has"),
    [
        ("think", "<think>a</think> b", True),
        ("think", " <think>a</think>\nb ", True),
        ("think", "<think>a</think>", False),
        ("think", "a</think> b", False),
        ("think", "x <think>a</think> b", False),
        ("think", "<think>a</think> b</think> c", False),
        ("think", "<think><think>a</think> b", False),
        ("think/opened", "a</think> b", True),
        ("think/opened", "<think>a</think> b", False),
        ("think_boxed", r"<think>a</think> it is \boxed{5}.", True),
        ("think_boxed", r"<think>\boxed{5}</think> it is", False),
        ("think_answer", "<think>a</think>\n<answer>5</answer>", True),
        ("think_answer", "<think>a</think>\n<answer></answer>", False),
        ("think_answer", "<think>a</think> so <answer>5</answer>", False),
        ("think_answer", "<answer>5</answer><think>a</think>", False),
        ("think_answer", "<think>a</think><answer>5</answer> bye", False),
        ("think_answer/opened", "a</think><answer>5</answer>", True),
    ],
)
def test_formats(name: str, response: str, has: bool) -> None:
    assert FORMATS.get(name)(response) is has
    assert score(f"format/{name}", response, "", {}).correct is has


@pytest.mark.parametrize(
    ("response", "fix", "ref"),
    [
        (r"\boxed{B}", True, True),
        (r"\boxed{\text{(B)}}", True, True),
        (r"\boxed{(b)}", True, True),
        (r"\boxed{B. Paris}", True, True),
        (r"\boxed{\textbf{B}}", True, True),
        (r"\boxed{\textbf{A}}", False, True),  # the reference reads the b of \textbf
        ("The answer is **B**.", True, True),
        (r"\boxed{Because}", False, True),
        (r"\boxed{A}", False, False),
        (r"\boxed{2}", False, False),
        ("B", True, False),
    ],
)
def test_letters(response: str, fix: bool, ref: bool) -> None:
    assert score("gpqa", response, "B", {}).correct is fix
    assert score("gpqa", response, "(b)", {}, source=source_spec("gpqa", mode="ref")).correct is ref


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("Answer: 5", True),
        ("so\nanswer:  $5$\n", True),
        ("Answer: 5\nAnswer: 6", False),
        (r"Answer: \boxed{5}", True),
        ("Answer: 5" + " " * 400, False),
        (r"\boxed{5}", False),
    ],
)
def test_answer_line(response: str, correct: bool) -> None:
    assert score("math_dapo", response, "5", {}).correct is correct


@pytest.mark.parametrize(
    ("version", "thought", "thought_wrong", "unthought", "none", "loose"),
    [
        # right and wrong after the thoughts, right without thoughts, no answer, a number without a box
        (0, 1.0, 0.0, 0.0, 0.0, 0.0),
        (1, 1.0, -0.5, -1.0, -1.0, -1.0),
        (2, 1.0, 0.0, 1.0, 0.0, 0.0),
        (3, 1.0, 0.0, 0.0, 0.0, 1.0),
        (4, 1.0, 0.0, 1.0, 0.0, 1.0),
    ],
)
def test_luffy_versions(
    version: int, thought: float, thought_wrong: float, unthought: float, none: float, loose: float
) -> None:
    responses = [
        r"so</think>\boxed{1/2}",
        r"so</think>\boxed{6}",
        r"\boxed{1/2}",
        r"so</think>I do not know",
        "so</think> $0.5$",
    ]
    scores = [score(f"luffy/{version}", response, r"\frac{1}{2}", {}).score for response in responses]
    assert scores == [thought, thought_wrong, unthought, none, loose]


def test_luffy_counts_only_what_follows_the_thoughts() -> None:
    for version in range(5):
        assert not score(f"luffy/{version}", r"\boxed{5}</think> or \boxed{6}", "5", {}).correct


def test_math_verify_by_name() -> None:
    for response, correct, failed in [
        (r"\boxed{\frac{2}{4}}", True, 0.0),
        (r"<think>\boxed{3}</think> \boxed{1/2}", True, 0.0),
        (r"\boxed{3}", False, 0.0),
        ("I do not know", False, 1.0),
        ("it is 9**9**9**9", False, 1.0),
        (r"\boxed{9^{9^{9^9}}}", False, 1.0),
    ]:
        reward = score("math_verify", response, r"\frac12", {})
        assert (reward.correct, reward.details[PARSE_FAILED]) == (correct, failed)


@pytest.mark.parametrize(
    ("data_source", "ground_truth", "message"),
    [
        ("hendrycks_math", "", "expected an answer of 1 to 512"),
        ("hendrycks_math", "1" * 513, "has 513 characters"),
        ("aime2024", " ", "expected an answer of 1 to 512"),
        ("gpqa", "5", "expected one letter of a choice"),
        ("gpqa", "AB", "expected one letter of a choice"),
        ("math_verify", "", "expected an answer of 1 to 512"),
        ("openai/gsm8k", "", "expected a number"),
        ("openai/gsm8k", "x", "expected a number"),
    ],
)
def test_bad_ground_truth_shows_with_an_empty_answer(data_source: str, ground_truth: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        score(data_source, "", ground_truth, {})


def test_gold_may_stand_in_a_box() -> None:
    assert score("numina_olympiads", r"\boxed{5}", r"so it is $\boxed{5}$.", {}).correct


@pytest.mark.parametrize("unit", [r"\boxed{", "{", "$", r"\(", "<think>", "the answer is ", "1,", "Answer: ", "\\frac"])
def test_a_megabyte_is_judged_at_once(unit: str) -> None:
    response = "<think>a</think>" + unit * (1_000_000 // len(unit))
    start = time.process_time()
    for name in (
        "math",
        "math@doc",
        "strict",
        "letters",
        "answer_line",
        "luffy/0",
        "openai/gsm8k",
        "format/think_boxed",
    ):
        score(name, response, "5" if name == "openai/gsm8k" else "B", {})
    assert time.process_time() - start < 5


def test_a_reward_keeps_the_score_that_it_was_made_of() -> None:
    """math_dapo turns 1 and 0 into rewards of 1 and −1; a format's share of the reward is not part of the score."""
    wrong, right = (score("math_dapo", f"Answer: {answer}", "7", {}) for answer in (8, 7))
    assert [(reward.score, reward.own_score) for reward in (wrong, right)] == [(-1.0, 0.0), (1.0, 1.0)]


def test_what_numbers_a_filter_can_see() -> None:
    sources = ["math_dapo", "openai/gsm8k", "luffy/1"]
    assert filter_ranges(RewardsConfig(), "correct", sources) == dict.fromkeys(sources, (0.0, 1.0))
    assert filter_ranges(RewardsConfig(), "score", sources) == dict.fromkeys(sources, (0.0, 1.0))
    # A luffy/1 answer that cannot be read has −1, a wrong one −0.5.
    expected = {"math_dapo": (-1.0, 1.0), "openai/gsm8k": (0.0, 1.0), "luffy/1": (-1.0, 1.0)}
    assert filter_ranges(RewardsConfig(), "reward", sources) == expected
    # Nobody knows what a user's function returns.
    custom = RewardsConfig(custom=CustomConfig(path="rewards.py"))
    assert filter_ranges(custom, "reward", sources) == filter_ranges(custom, "score", sources) == {}


@pytest.mark.parametrize(
    ("response", "ground_truth", "correct"),
    [
        ("<answer>The Beatles!</answer>", '{"target": ["Beatles", "the fab four"]}', True),
        ("<answer>A  fab four</answer>", '["Beatles", "the Fab Four"]', True),
        ("<answer>Beatles</answer> no: <answer>Stones</answer>", '["Beatles"]', False),
        ("<answer>2718</answer>", '{"target": ["2,718"]}', True),
        ("<answer>42</answer>", "42", True),
        ("<answer>Theodore</answer>", "odore", False),
        ("Beatles", "Beatles", False),
    ],
)
def test_short_answers(response: str, ground_truth: str, correct: bool) -> None:
    reward = score("nq", response, ground_truth, {})
    assert (reward.score, reward.correct) == (float(correct), correct)
    assert reward.details[PARSE_FAILED] == float("<answer>" not in response)


def test_countdown_of_tinyzero() -> None:
    truth = '{"numbers": [44, 19, 35], "target": 98}'
    assert score("countdown", "<answer>44 + 19 + 35</answer>", truth, {}).correct
    assert not score("countdown", "<answer>44 + 19</answer>", truth, {}).correct


@pytest.mark.parametrize("name", [name for name in SCORERS if SCORERS.get(name).states and "@" not in name])
def test_an_answer_within_thoughts_is_none(name: str) -> None:
    stated = SCORERS.get(name).states("C" if name == "letters" else "72").replace("</think>", "")  # type: ignore[misc]
    truth = "C" if name == "letters" else "72"
    for gap in ("", "\n"):
        drafted = gap.join(("<think>", stated, "</think>", ""))
        assert score(name, drafted + "I do not know.", truth, {}).correct is False
        assert score(name, drafted + stated, truth, {}).correct is True


def test_an_expression_within_thoughts_is_no_answer() -> None:
    truth, answer = '{"numbers": [8, 9], "target": 72}', "<answer>8 * 9</answer>"
    found = [
        score("countdown", text, truth, {}).correct for text in (f"{answer}</think>", f"8</think>{answer}", answer)
    ]
    assert found == [False, True, True]
