"""Rewards of a batch: who is asked, the mixture, and correctness apart from it. Judges here answer from tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from megarl.data.answers import response_decoder
from megarl.errors import RunError
from megarl.rewards.environment import EnvironmentJudge
from megarl.rewards.hybrid import Summand
from megarl.rewards.judge import Gathered, Judged, Tally, mean_of, tally_metrics
from megarl.rewards.manager import RULE, RewardManager
from megarl.types import (
    DROPPED,
    Episode,
    FinishReason,
    Prompt,
    Reward,
    RolloutBatch,
    Sample,
    Segment,
    SegmentSource,
    environment_segment,
    prompt_segment,
    version_spans,
)
from megarl.types.judged import FinishedSample, Trouble
from megarl_lab.recipes.tiny_model import make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()


@dataclass
class Table:
    """Judges by the response's text; `heard` are the items of the latest session in the order of `add`."""

    rewards: Mapping[str, Reward]
    heard: list[FinishedSample] = field(default_factory=list)
    closed: bool = False

    def begin(self) -> Gathered:
        session = Gathered()
        self.heard = session.items
        return session

    def finish(self, sessions: Sequence[Gathered]) -> Judged:
        heard = [item for session in sessions for item in session.items]
        rewards = [self.rewards[item.response] for item in heard]
        troubles = [
            Trouble(item=item, outcome="unanswered", reason="")
            for item, reward in zip(heard, rewards, strict=True)
            if reward.dropped
        ]
        return Judged(rewards=rewards, tallies={f"reward/{id(self)}": Tally(total=len(rewards))}, troubles=troubles)

    def close(self) -> None:
        self.closed = True


def worth(score: float, *, correct: bool = False) -> Reward:
    return Reward(score=score, correct=correct)


def prompt(uid: str, data_source: str) -> Prompt:
    ids = tuple(TOKENIZER(f"<|im_start|>{uid}?", add_special_tokens=False)["input_ids"])
    return Prompt(uid=uid, token_ids=ids, data_source=data_source, ground_truth="")


def sample(uid: str, index: int, text: str) -> Sample:
    ids = np.asarray(TOKENIZER(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    segment = Segment(
        source=SegmentSource.POLICY,
        token_ids=ids,
        loss_mask=np.ones(len(ids), dtype=np.bool_),
        versions=version_spans(np.zeros(len(ids), dtype=np.int64)),
    )
    return Sample(
        uid=uid,
        sample_index=index,
        seed=0,
        segments=(prompt_segment([1]), segment),
        finish_reason=FinishReason.STOP,
    )


PROMPTS = {"m": prompt("m", "maths"), "c": prompt("c", "chat")}
RULE_SAYS = Table({"good": worth(1.0, correct=True), "bad": worth(0.0)})
MODEL_SAYS = Table(
    {"good": worth(-3.0), "bad": worth(5.0, correct=True), "kind": worth(2.0, correct=True), "rude": worth(-2.0)}
)


def manager(
    judges: Mapping[str, Table], summands: Mapping[str, Summand], routes: Mapping[str, Sequence[str]]
) -> RewardManager:
    return RewardManager(
        judges=judges,
        summands=summands,
        route=lambda source: routes[source],
        knows=lambda source: source == "maths",
        decode=response_decoder(TOKENIZER),
        tokenizer=TOKENIZER,
    )


def judge_all(asked: RewardManager, finished: RolloutBatch) -> Judged:
    judging = asked.begin()
    for each in finished.samples:
        judging.add(finished.prompts[each.uid], each)
    return asked.finish([judging], finished.samples)


def batch(*samples: Sample) -> RolloutBatch:
    return RolloutBatch(prompts=PROMPTS, samples=samples)


MIXED = batch(sample("m", 0, "good"), sample("c", 0, "kind"), sample("m", 1, "bad"), sample("c", 1, "rude"))


def test_correct_is_what_the_rule_says_whatever_is_rewarded() -> None:
    """The model alone is rewarded, and likes wrong answers better; where there is no rule it decides itself."""
    judges = {RULE: RULE_SAYS, "model": MODEL_SAYS}
    judged = judge_all(manager(judges, {"model": Summand()}, {"maths": ["model"], "chat": ["model"]}), MIXED)
    assert [reward.score for reward in judged.rewards] == [-3.0, 2.0, 5.0, -2.0]
    assert [reward.correct for reward in judged.rewards] == [True, True, False, False]
    assert [item.response for item in RULE_SAYS.heard] == ["good", "bad"]
    assert judged.rewards[0].details == {"rule/score": 1.0, "model/score": -3.0}


def test_parts_by_data_source() -> None:
    """maths: 2·rule + 0.5·model. chat: 0.5·model."""
    judges = {RULE: RULE_SAYS, "model": MODEL_SAYS}
    summands = {RULE: Summand(weight=2.0), "model": Summand(weight=0.5)}
    judged = judge_all(manager(judges, summands, {"maths": [RULE, "model"], "chat": ["model"]}), MIXED)
    assert [reward.score for reward in judged.rewards] == [2.0 - 1.5, 1.0, 2.5, -1.0]
    assert [reward.correct for reward in judged.rewards] == [True, True, False, False]


def test_samples_are_told_of_as_they_finish_and_answered_in_the_batchs_order() -> None:
    asked = manager({RULE: RULE_SAYS}, {RULE: Summand()}, {"maths": [RULE]})
    samples = [sample("m", i, text) for i, text in enumerate(["good<|im_end|>", "bad<|im_end|>", "good"])]
    judging = asked.begin()
    for each in reversed(samples):
        judging.add(PROMPTS["m"], each)
        assert RULE_SAYS.heard[-1].sample is each
    # Of prompts special tokens are shown, of responses they are not.
    assert (RULE_SAYS.heard[0].prompt_text, RULE_SAYS.heard[1].response) == ("<|im_start|>m?", "bad")
    assert [reward.score for reward in asked.finish([judging], samples).rewards] == [1.0, 0.0, 1.0]


def test_the_samples_of_several_judgings_are_judged_as_one_batch() -> None:
    """Standardised within the group of prompt c, whose samples are in both: 2 and -2 have a deviation of sqrt(8)."""
    asked = manager(
        {RULE: RULE_SAYS, "model": MODEL_SAYS},
        {RULE: Summand(), "model": Summand(transform="group_zscore")},
        {"maths": [RULE], "chat": ["model"]},
    )
    samples = [sample("m", 0, "good"), sample("c", 0, "kind"), sample("c", 1, "rude"), sample("m", 1, "bad")]
    judgings = [asked.begin(), asked.begin()]
    for each in samples:
        judgings[each.sample_index].add(PROMPTS[each.uid], each)
    judged = asked.finish(judgings, samples)
    zscore = 2.0 / (math.sqrt(8.0) + 1e-6)
    assert [reward.score for reward in judged.rewards] == pytest.approx([1.0, zscore, -zscore, 0.0])


def test_a_row_that_a_part_dropped_is_dropped_and_no_baseline_of_others() -> None:
    """Group z-scores of the rows that are left: mean 2, std √2."""
    model = Table({"good": worth(1.0), "bad": worth(3.0), "odd": worth(900.0)})
    judge = Table({"good": worth(0.0), "bad": worth(0.0), "odd": DROPPED})
    rule = Table({"good": worth(1.0, correct=True), "bad": worth(0.0), "odd": worth(0.0)})
    summands = {"model": Summand(transform="group_zscore"), "judge": Summand()}
    asked = manager({RULE: rule, "model": model, "judge": judge}, summands, {"maths": ["model", "judge"]})
    judged = judge_all(asked, batch(*(sample("m", i, text) for i, text in enumerate(["good", "odd", "bad"]))))
    assert judged.rewards[1] is DROPPED
    assert [judged.rewards[i].score for i in (0, 2)] == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], abs=1e-6)
    assert judged.tallies["reward/dropped_rows"].value == 1.0
    assert judged.tallies["reward/dropped_frac"].value == 1 / 3
    assert [(each.judge, each.item.response) for each in judged.troubles] == [("judge", "odd")]
    assert judged.tallies["reward/judge/score"] == Tally(total=0.0, over=2)
    assert judged.tallies["reward/model/score"] == Tally(total=904.0, over=3)


def test_a_problem_names_its_judge_and_says_if_others_reward() -> None:
    """A rule without an answer in a conversation that its environment rewards is no problem of the reward."""
    rule = Table({"good": DROPPED})
    for route, reason in (
        (["model"], " (rule decides only what is correct; the reward is that of model)"),
        (["model", RULE], ""),
    ):
        judges = {RULE: rule, "model": MODEL_SAYS}
        judged = judge_all(
            manager(judges, dict.fromkeys(route, Summand()), {"maths": route}), batch(sample("m", 0, "good"))
        )
        assert [(each.judge, each.reason) for each in judged.troubles] == [(RULE, reason)]


def test_what_every_judge_said_is_kept() -> None:
    """Of one name, the note of the judge that decides."""
    rule = Table({"good": Reward(score=1.0, correct=True, notes={"why": "equal", "read": "8"})})
    judge = Table({"good": Reward(score=0.5, correct=True, notes={"why": "kind", "said": "nice"})})
    asked = manager({RULE: rule, "judge": judge}, {RULE: Summand(), "judge": Summand()}, {"maths": [RULE, "judge"]})
    (reward,) = judge_all(asked, batch(sample("m", 0, "good"))).rewards
    assert reward.notes == {"why": "equal", "read": "8", "said": "nice"}


def test_a_single_judges_reward_is_untouched() -> None:
    rewards = {"good": Reward(score=0.1, correct=True, details={"format": 1.0})}
    judged = judge_all(
        manager({RULE: Table(rewards)}, {RULE: Summand()}, {"maths": [RULE]}), batch(sample("m", 0, "good"))
    )
    assert judged.rewards == [rewards["good"]]


def test_the_rule_alone_judges_what_is_not_trained_on() -> None:
    judges = {RULE: RULE_SAYS, "model": MODEL_SAYS}
    asked = manager(judges, {"model": Summand()}, {"maths": ["model"]})
    judged = judge_all(asked.by_rule(), batch(sample("m", 0, "good"), sample("m", 1, "bad")))
    assert [reward.score for reward in judged.rewards] == [1.0, 0.0]
    asked.close()
    assert [judge.closed for judge in judges.values()] == [True, True]


def test_tallies_of_several_batches() -> None:
    metrics = tally_metrics(
        [
            {"jobs": Tally(total=3.0), "seconds": mean_of([1.0, 2.0, 6.0]), "never": mean_of([])},
            {"jobs": Tally(total=1.0), "seconds": mean_of([11.0])},
        ]
    )
    assert metrics == {"jobs": 4.0, "seconds": 5.0}


def talk(index: int, *turns: str, reason: FinishReason = FinishReason.STOP) -> Sample:
    """A conversation in which the environment's reply to each turn is the answer `good`; each turn earns 0.5."""
    said = sample("m", index, "".join(turns[:1]))
    segments = list(said.segments)
    for turn in turns[1:]:
        segments += [environment_segment(TOKENIZER("good", add_special_tokens=False)["input_ids"])]
        segments += sample("m", index, turn).segments[1:]
    rewarded = [replace(each, reward=0.5 * (each.source is SegmentSource.POLICY)) for each in segments]
    episode = Episode(environment="game", failure="raised" if reason is FinishReason.FAILED else "", reason="KeyError")
    return replace(said, segments=tuple(rewarded), finish_reason=reason, episode=episode)


def test_judges_read_the_last_turn_and_never_what_an_environment_wrote() -> None:
    asked = manager({RULE: RULE_SAYS}, {RULE: Summand()}, {"maths": (RULE,)})
    judged = judge_all(asked, batch(talk(0, "bad", "bad"), talk(1, "bad", "good"), talk(2, "good", "bad")))
    assert [reward.score for reward in judged.rewards] == [0.0, 1.0, 0.0]
    assert [item.response for item in RULE_SAYS.heard] == ["bad", "good", "bad"]


def test_a_sample_whose_environment_failed_is_dropped_and_no_judge_is_asked() -> None:
    asked = manager({RULE: RULE_SAYS}, {RULE: Summand()}, {"maths": (RULE,)})
    failed = talk(0, "unknown to the table", reason=FinishReason.FAILED)
    judged = judge_all(asked, batch(failed, talk(1, "good")))
    assert [reward.dropped for reward in judged.rewards] == [True, False]
    (trouble,) = judged.troubles
    assert (trouble.judge, trouble.outcome, trouble.reason) == ("environment", "failed", "raised: KeyError")


def test_the_environment_judge_adds_up_the_rewards_of_turns() -> None:
    asked = manager({"environment": EnvironmentJudge()}, {"environment": Summand()}, {"maths": ("environment",)})  # type: ignore[dict-item]
    asked = replace(asked, knows=lambda _: False)
    told_wrong = replace(talk(1, "a", "b"), episode=Episode(environment="game", details={"correct": False}))
    judged = judge_all(asked, batch(talk(0, "a", "b", "c"), told_wrong))
    assert [(reward.score, reward.correct) for reward in judged.rewards] == [(1.5, True), (1.0, False)]
    with pytest.raises(RunError, match="sample m/0 has no environment that could reward it; name one in the data"):
        judge_all(asked, batch(sample("m", 0, "a")))
