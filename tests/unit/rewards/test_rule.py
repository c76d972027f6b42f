"""The rule in a real pool: scorers by the configuration, files of users, and what a verdict without reward is worth."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from megarl.config.rewards import CustomConfig, RewardsConfig, SourceConfig, VerifierConfig
from megarl.config.schema import Config, ModelConfig, RunConfig
from megarl.errors import ConfigError, DataError
from megarl.record.recorder import RunRecorder
from megarl.record.rollouts import read_rollouts
from megarl.rewards.build import open_rewards
from megarl.rewards.question import Question
from megarl.rewards.rule import RuleJudge, Rules
from megarl.rewards.verifier import JobResult
from megarl.types import (
    DROPPED,
    FinishReason,
    Prompt,
    Reward,
    RolloutBatch,
    Sample,
    Segment,
    SegmentSource,
    prompt_segment,
    version_spans,
)
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.helpers.reward_items import item
from tests.helpers.verifier import without_algebra

FILE = """
import time

def reward_func(queries, prompts, labels, **kwargs):
    import numpy as np
    texts = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    if texts == ["hang"]:
        time.sleep(60)
    if texts == ["fail"]:
        raise KeyError("no such thing")
    if texts == ["odd"]:
        return {"rewards": np.asarray([1.0, 2.0])}
    right = [float(text == label) for text, label in zip(texts, labels)]
    return {
        "rewards": np.asarray(right) * 10 - 5,
        "scores": right,
        "extra_logs": {"chars": np.asarray([len(t) for t in texts]), "index": [kwargs["extra_info"][0]["index"]]},
    }

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str), "acc": solution_str == ground_truth, "index": extra_info["index"]}

def tell_more(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "pred": solution_str, "steps": ["a", None], "why": None, "chars": len(solution_str)}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("custom") / "mine.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture(scope="module")
def judge(file: str) -> Iterator[RuleJudge]:
    cfg = RewardsConfig(
        custom=CustomConfig(path=file, timeout_s=1.5, workers=1),
        sources={
            "sums": SourceConfig(scorer="megarl/sums", wrong=-2.0, correct=3.0),
            "count": SourceConfig(scorer="megarl/countdown"),
            "programs": SourceConfig(scorer="apps", wrong=0.0),
        },
        verifier=VerifierConfig(workers=1, soft_limit_s=0.5, hard_limit_s=5.0),
    )
    with without_algebra(), closing(RuleJudge(cfg)) as opened:
        yield opened


def ask(judge: RuleJudge, source: str, response: str, truth: str) -> tuple[Reward, str]:
    question = Question(data_source=source, prompt="?", response=response, ground_truth=truth, extra_info={"index": 7})
    judging = judge.begin()
    judging.ask(question, label="it")
    (verdict,) = judge.verdicts([judging])
    return verdict.reward or DROPPED, verdict.outcome


def test_a_source_is_judged_and_paid_as_configured(judge: RuleJudge) -> None:
    assert ask(judge, "sums", "#### 8", "8")[0].score == 3.0
    reward, outcome = ask(judge, "sums", "#### 9", "8")
    assert (reward.score, reward.correct, outcome) == (-2.0, False, "wrong")


def test_a_file_judges_every_other_source(judge: RuleJudge) -> None:
    """OpenRLHF's kind: it gets prompt + response, and its scores say what is correct."""
    reward, outcome = ask(judge, "poems", "rose", "rose")
    assert reward == Reward(score=5.0, correct=True, details={"chars": 4.0, "index": 7.0}, own_score=1.0)
    assert outcome == "correct"
    assert ask(judge, "poems", "lily", "rose")[0] == Reward(
        score=-5.0, correct=False, details={"chars": 4.0, "index": 7.0}, own_score=0.0
    )


def test_a_file_that_fails_or_hangs_leaves_no_reward(judge: RuleJudge) -> None:
    """What wrong is worth only the file knows."""
    assert ask(judge, "poems", "fail", "rose") == (DROPPED, "failed")
    assert ask(judge, "poems", "odd", "rose") == (DROPPED, "failed")
    assert ask(judge, "poems", "hang", "rose") == (DROPPED, "timed_out")


def test_programs_have_a_pool_of_their_own(judge: RuleJudge) -> None:
    tests = json.dumps({"inputs": ["1\n", "4\n"], "outputs": ["2\n", "5\n"]})
    right = "```python\nprint(int(input()) + 1)\n```"
    assert ask(judge, "programs", right, tests)[0].score == 1.0
    assert ask(judge, "programs", right.replace("+", "-"), tests)[0].score == 0.0


def test_a_malformed_ground_truth_names_the_sample(judge: RuleJudge) -> None:
    judging = judge.begin()
    judging.add(item("q", "<answer>1</answer>", "8", source="count"))
    with pytest.raises(DataError, match="sample q/0: countdown ground truth is '8'"):
        judge.finish([judging])


def test_outcomes_are_counted_apart(judge: RuleJudge) -> None:
    judging = judge.begin()
    for response, label in (("#### 8", "8"), ("#### 9", "8"), ("eight", "8"), ("#### 8", "8")):
        judging.add(item("q", response, label, source="sums"))
    judged = judge.finish([judging])
    assert [reward.score for reward in judged.rewards] == [3.0, -2.0, -2.0, 3.0]
    (unread,) = judged.troubles
    assert (unread.item.response, unread.outcome) == ("eight", "parse_failed")
    fractions = {name: tally.value for name, tally in judged.tallies.items() if name.endswith("_frac")}
    del fractions["perf/reward_early_frac"]
    assert fractions == {
        "reward/wrong_frac": 0.25,
        "reward/parse_failed_frac": 0.25,
        "reward/timeout_frac": 0.0,
        "reward/crashed_frac": 0.0,
        "reward/failed_frac": 0.0,
    }


def test_an_answer_that_took_too_long_is_wrong() -> None:
    rules = Rules(RewardsConfig(sources={"math500": SourceConfig(wrong=-0.5)}))
    late = JobResult(reward=None, outcome="timed_out", seconds=2.0)
    assert rules.verdict("math500", late).reward == Reward(score=-0.5, correct=False, own_score=0.0)
    # The range of the source's own scorer.
    assert Rules(RewardsConfig()).verdict("math500", late).reward == Reward(score=-1.0, correct=False, own_score=0.0)


def test_which_sources_there_is_a_rule_for(file: str) -> None:
    rules = Rules(RewardsConfig(sources={"mine": SourceConfig(scorer="gpqa")}))
    assert [rules.knows(source) for source in ("mine", "gpqa", "megarl/sums", "poems")] == [True, True, True, False]
    with pytest.raises(ConfigError, match="unknown data source 'poems'"):
        rules.spec("poems")
    assert Rules(RewardsConfig(custom=CustomConfig(path=file))).knows("poems")


def test_verls_kind_of_function_at_a_path_relative_to_the_working_directory(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(file).parent)
    cfg = RewardsConfig(custom=CustomConfig(path="mine.py", name="compute_score"), verifier=VerifierConfig(workers=1))
    with closing(RuleJudge(cfg)) as judge:
        assert ask(judge, "poems", "rose", "rose")[0] == Reward(score=4.0, correct=True, details={"index": 7.0})


def test_what_a_function_says_besides_numbers_reaches_the_rollout_files(file: str, tmp_path: Path) -> None:
    """verl's functions return texts, lists and None among their extras: the run goes on, and numbers are logged."""
    tokenizer = make_byte_tokenizer()
    ids = np.asarray(tokenizer("rose", add_special_tokens=False)["input_ids"], dtype=np.int64)
    answer = Segment(
        source=SegmentSource.POLICY,
        token_ids=ids,
        loss_mask=np.ones(len(ids), dtype=np.bool_),
        versions=version_spans(np.zeros(len(ids), dtype=np.int64)),
    )
    prompt = Prompt(uid="q", token_ids=(65,), data_source="poems", ground_truth="rose")
    sample = Sample(
        uid="q",
        sample_index=0,
        seed=0,
        segments=(prompt_segment([65]), answer),
        finish_reason=FinishReason.STOP,
    )
    rewards = RewardsConfig(custom=CustomConfig(path=file, name="tell_more"), verifier=VerifierConfig(workers=1))
    with closing(open_rewards(rewards, ["poems"], tokenizer)) as manager:
        judging = manager.begin()
        judging.add(prompt, sample)
        judged = manager.finish([judging], [sample])
    rule = {name: tally.value for name, tally in judged.tallies.items() if name.startswith("reward/rule/")}
    assert rule == {"reward/rule/chars": 4.0}
    recorder = RunRecorder(Config(run=RunConfig(name="a", dir=str(tmp_path)), model=ModelConfig(path="m")))
    recorder.sample_rollouts(1, RolloutBatch(prompts={"q": prompt}, samples=(sample,)), judged.rewards, [], tokenizer)
    (record,) = read_rollouts(recorder.paths.rollouts(1))
    assert json.loads(record.details) == {"chars": 4.0, "pred": "rose", "steps": ["a", None], "why": None}
