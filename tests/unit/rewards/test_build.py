"""From the section `rewards` to judges: who is asked about what, and what is refused before a run starts."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from megarl.config.judges import JudgeConfig
from megarl.config.load import from_dict
from megarl.config.rewards import GroundTruthConfig, RewardsConfig
from megarl.config.schema import DataConfig
from megarl.data.prompts import PromptDataset
from megarl.errors import ConfigError, DataError
from megarl.rewards.build import check_ground_truths, open_rewards
from megarl.rewards.hybrid import Summand
from megarl.rewards.judge import Judged, JudgeSession
from megarl.rewards.llm import Completions, EndpointCompletions, LlmJudge
from megarl.rewards.manager import RULE
from megarl.rewards.remote import RemoteJudge
from megarl.rewards.routes import check_sources, route_of, summands_of, without_training
from megarl_lab.recipes.tiny_model import make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()
URL = "http://127.0.0.1:9/get_reward"
HYBRID: Mapping[str, Any] = {
    "manager": "hybrid",
    "hybrid": {
        "parts": {
            "right": {"manager": "rule", "weight": 2.0},
            "style": {"manager": "remote", "urls": [URL + "/style"], "transform": "clip", "clip": [-1, 1]},
            "taste": {"manager": "model"},
        },
        "routes": {"openai/gsm8k": ["right"], "poems": ["taste", "style"]},
    },
}


def section(**changes: Any) -> RewardsConfig:
    return from_dict(RewardsConfig, changes, "rewards")


class Model:
    """Stands in for a reward model."""

    def begin(self) -> JudgeSession:
        raise NotImplementedError

    def finish(self, sessions: Sequence[JudgeSession]) -> Judged:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing."""


def test_the_rule_has_one_name() -> None:
    rewards = section(**HYBRID)
    assert summands_of(rewards) == {
        RULE: Summand(weight=2.0),
        "style": Summand(transform="clip", clip=(-1.0, 1.0)),
        "taste": Summand(),
    }
    assert route_of(rewards, "openai/gsm8k") == (RULE,)
    assert route_of(rewards, "poems") == ("taste", "style")
    assert route_of(rewards, "other") == (RULE, "style", "taste")
    assert (summands_of(section()), route_of(section(), "poems")) == ({RULE: Summand()}, (RULE,))


def test_only_judges_that_are_asked_are_started() -> None:
    model = Model()
    manager = open_rewards(section(**HYBRID), ["poems"], TOKENIZER, model=model)
    assert manager.judges["taste"] is model
    assert set(manager.judges) == set(manager.summands) == {"taste", "style"}
    style = manager.judges["style"]
    assert isinstance(style, RemoteJudge)
    assert (style.urls, style.name) == ((URL + "/style",), "style")
    style.close()
    assert manager.asked("poems") == ["taste", "style"]


def test_judges_by_their_entry_and_by_the_name_of_their_part() -> None:
    endpoint = {"urls": ["http://127.0.0.1:9/v1"]}
    judges = {"a": {"endpoint": endpoint}, "b": {"endpoint": endpoint, "mode": "pairwise"}}
    parts = {"kind": {"manager": "judge", "judge": "b", "weight": 0.5}, "right": {"manager": "judge", "judge": "a"}}
    manager = open_rewards(section(manager="hybrid", hybrid={"parts": parts}, judges=judges), ["poems"], TOKENIZER)
    with closing(manager):
        kind, right = manager.judges["kind"], manager.judges["right"]
        assert isinstance(kind, LlmJudge)
        assert isinstance(right, LlmJudge)
        assert (kind.name, kind.section, kind.cfg.mode) == ("kind", "b", "pairwise")
        assert (right.name, right.section, right.cfg.mode) == ("right", "a", "pointwise")
    with closing(open_rewards(section(manager="judge", judges={"a": judges["a"]}), ["poems"], TOKENIZER)) as manager:
        assert [(name, judge.name) for name, judge in manager.judges.items() if isinstance(judge, LlmJudge)] == [
            ("judge", "judge")
        ]


def test_a_model_of_the_run_judges_only_there() -> None:
    rewards = section(manager="judge", judges={"own": {"use_policy": True}})
    with pytest.raises(ConfigError, match=r"rewards.judges.own: its model belongs to a run that trains"):
        open_rewards(rewards, ["poems"], TOKENIZER)
    asked = []

    def completions(key: str, cfg: JudgeConfig) -> Completions:
        asked.append((key, cfg.use_policy))
        return EndpointCompletions(cfg, name=key, urls=("http://127.0.0.1:9/v1",))

    with closing(open_rewards(rewards, ["poems"], TOKENIZER, completions=completions)) as manager:
        assert list(manager.judges) == ["judge"]
    assert asked == [("own", True)]


def test_the_rule_decides_what_is_correct_of_sources_that_it_knows() -> None:
    manager = open_rewards(section(manager="model"), ["openai/gsm8k", "poems"], TOKENIZER, model=Model())
    assert manager.asked("openai/gsm8k") == ["model", RULE]
    assert manager.asked("poems") == ["model"]
    manager.judges[RULE].close()


def test_where_nothing_is_trained_the_rule_judges_if_it_can() -> None:
    rewards = section(**HYBRID)
    assert without_training(rewards, ["openai/gsm8k"]).manager == "rule"
    assert without_training(rewards, ["openai/gsm8k", "poems"]) is rewards
    with pytest.raises(ConfigError, match=r"rewards.manager: a reward model judges samples only while a run trains"):
        open_rewards(section(manager="model"), ["poems"], TOKENIZER)


def test_unknown_sources_are_refused_where_the_rule_is_asked() -> None:
    check_sources(section(**HYBRID), ["openai/gsm8k", "poems"])
    check_sources(section(manager="remote", remote={"urls": [URL]}), ["poems"])
    for rewards in (section(), section(**HYBRID)):
        with pytest.raises(ConfigError, match="unknown data source 'chess'"):
            check_sources(rewards, ["chess"])
    with pytest.raises(ConfigError, match=r"correct=1.0, wrong=2.0.*expected finite numbers with correct > wrong"):
        check_sources(section(sources={"gpqa": {"wrong": 2}}), [])


@pytest.mark.parametrize("name", ["format/think", "format/think_boxed"])
@pytest.mark.parametrize("opened", [False, True])
def test_formats_agree_with_what_the_prompt_opens(name: str, opened: bool, tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer()
    if opened:
        tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    path = tmp_path / "x.jsonl"
    right, wrong = (name, f"{name}/opened")[:: -1 if opened else 1]
    for source in (right, wrong):
        path.write_text(json.dumps({"prompt": "?", "data_source": source, "reward_model": {"ground_truth": "1"}}))
        data = PromptDataset([path], tokenizer, DataConfig())
        if source == right:
            check_ground_truths(RewardsConfig(), data, tokenizer)
        else:
            with pytest.raises(ConfigError, match=rf"after which no response has it; take '{right[7:]}'$"):
                check_ground_truths(RewardsConfig(), data, tokenizer)


@pytest.mark.parametrize("source", ["math", "short_answer", "openai/gsm8k"])
@pytest.mark.parametrize("truth", ["None", "72\n\nas 48+24 is 72", [None], {"answer": "72", "why": "48+24"}])
def test_one_truth_that_no_answer_matches_ends_the_start(
    source: str, truth: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last row is not among those that are judged, and the message names the file that has it."""
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, last in zip(files, ("72", truth), strict=True):
        rows = [{"prompt": "?", "data_source": source, "answer": answer} for answer in ("5", last)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = PromptDataset(files, make_byte_tokenizer(), DataConfig(label_key="answer"))
    checked = RewardsConfig(ground_truths=GroundTruthConfig(max_rows=1))
    with pytest.raises(DataError, match=r"b\.jsonl row 1: "):
        check_ground_truths(checked, data, make_byte_tokenizer())
    if truth == "None" and source != "openai/gsm8k":
        some = RewardsConfig(ground_truths=GroundTruthConfig(max_unscorable=0.5))
        check_ground_truths(some, data, make_byte_tokenizer())
        assert "b.jsonl row 1: 'None'" in capsys.readouterr().err


FOUR = ["Oslo", "Paris", "Rome", "Bern"]


@pytest.mark.parametrize("source", ["math", "openai/gsm8k", "short_answer", "math/last_number"])
@pytest.mark.parametrize(
    ("columns", "truth", "is_refused"),
    [
        ({"choices": FOUR}, 1, True),
        ({"choices": FOUR}, 0, True),
        ({"options": FOUR}, 4, True),
        ({"endings": FOUR}, "3", True),
        ({"choices": FOUR}, 1.0, True),
        ({"choices": json.dumps(FOUR)}, 1, True),
        ({"extra_info": {"choices": FOUR}}, 1, True),
        ({"choices": {"text": FOUR, "label": ["A", "B", "C", "D"]}}, 1, True),
        ({"options": dict(zip("ABCD", FOUR, strict=True))}, 1, True),
        # Labels that are numbers, numbers beyond the choices, and choices that are the numbers themselves.
        ({"choices": {"text": FOUR, "label": ["1", "2", "3", "4"]}}, "1", False),
        ({"choices": FOUR}, 5, False),
        ({"choices": ["0", "1", "2"]}, 1, False),
        ({"options": ["12", "15"]}, 15, False),
        ({"choices": []}, 1, False),
        ({}, 1, False),
    ],
)
def test_a_truth_that_may_be_the_number_of_a_choice_is_refused(
    source: str, columns: dict[str, Any], truth: object, is_refused: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "?", "data_source": source, "answer": truth, **columns}) + "\n")
    data = PromptDataset([path], make_byte_tokenizer(), DataConfig(label_key="answer"))
    if is_refused:
        with pytest.raises(DataError, match=r"a\.jsonl row 0: ground truth '.*': got what may be the number of one of"):
            check_ground_truths(RewardsConfig(), data, make_byte_tokenizer())
    else:
        check_ground_truths(RewardsConfig(), data, make_byte_tokenizer())
