"""Samples to rows: which tokens are a demonstration's, and which samples their group does not need."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from megarl.config.algo import AlgoConfig, CpoConfig, DemonstrationConfig
from megarl.errors import DataError
from megarl.train.collect import Collected
from megarl.train.rows import TrainingRows, require_routed_experts, training_rows
from megarl.types import (
    Episode,
    FinishReason,
    Prompt,
    Reward,
    RolloutBatch,
    Row,
    Sample,
    Segment,
    SegmentSource,
    environment_segment,
    prompt_segment,
    version_spans,
)
from megarl.types.forks import Fork
from megarl.types.turns import Tries
from megarl.weights.families import Dims, Experts
from tests.helpers.segments import demonstration_segment, policy_segment

PROMPTS = {
    uid: Prompt(
        uid=uid,
        token_ids=(1, 2),
        data_source="q",
        ground_truth="",
        demonstration_ids=(5, 6, 7),
        demonstration_probs=(0.5, 0.25, -1.0),
    )
    for uid in ("a", "b", "c")
}
WITH_DEMONSTRATIONS = DemonstrationConfig(strategy="fixed", num_prefixed=1)


def sample(uid: str, index: int, given: Sequence[int] = (), written: Sequence[int] = (8, 9)) -> Sample:
    demonstration = [demonstration_segment(given)] if given else []
    return Sample(
        uid=uid,
        sample_index=index,
        seed=0,
        segments=(prompt_segment((1, 2)), *demonstration, policy_segment(written)),
        finish_reason=[FinishReason.STOP, FinishReason.LENGTH][index % 2],
    )


def collected(samples_and_correct: Sequence[tuple[Sample, bool]]) -> Collected:
    samples = tuple(s for s, _ in samples_and_correct)
    prompts: Mapping[str, Prompt] = {uid: PROMPTS[uid] for uid in dict.fromkeys(s.uid for s in samples)}
    return Collected(
        rollout=RolloutBatch(prompts=prompts, samples=samples),
        # Scores are those of the samples' places, to tell rewards apart.
        rewards=[Reward(score=float(i), correct=correct) for i, (_, correct) in enumerate(samples_and_correct)],
    )


def labels(training: TrainingRows) -> list[str]:
    return [row.label for row in training.rows]


def test_lags_of_tokens_are_known_where_samples_may_be_stale() -> None:
    """Step 5 starts from version 4; no version sampled the demonstration's tokens or the environment's."""
    segments = sample("a", 0, given=(5, 6)).segments
    written = replace(segments[2], versions=version_spans(np.array([2, 4])))
    replied = Segment(
        source=SegmentSource.ENVIRONMENT,
        token_ids=np.array([7]),
        loss_mask=np.zeros(1, np.bool_),
        versions=version_spans(np.array([-1])),
    )
    step = collected([(replace(sample("a", 0), segments=(*segments[:2], written, replied, written)), True)])
    (row,) = training_rows(step, AlgoConfig(), stale_at=5).rows
    assert row.quantities["lag"].tolist() == [0, 0, 2, 0, 0, 2, 0]
    assert row.quantities["lag"].dtype == np.float32
    assert "lag" not in training_rows(step, AlgoConfig()).rows[0].quantities


def test_rows_say_what_a_demonstration_wrote() -> None:
    """All rows, as rows of a batch have the same quantities; a prefix has the first probabilities of its prompt."""
    samples = collected([(sample("a", 0, given=(5, 6)), True), (sample("a", 1), False)])
    started, own = training_rows(samples, AlgoConfig(demonstrations=WITH_DEMONSTRATIONS)).rows
    assert started.token_ids.tolist() == [1, 2, 5, 6, 8, 9]
    assert started.loss_mask.all()
    assert {name: score.tolist() for name, score in started.quantities.items()} == {
        "rollout_logprobs": [0.0, 0.0, -1.0, -1.0],
        "demonstration": [1.0, 1.0, 0.0, 0.0],
        "target_probs": [0.5, 0.25, -1.0, -1.0],
    }
    assert own.quantities["demonstration"].tolist() == [0.0, 0.0]
    assert own.quantities["target_probs"].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        (None, ["a/0", "a/1", "a/2", "b/0", "b/1", "b/2", "c/0"]),
        # Of a's others one of two is correct, of b's both, c has none. The demonstrations' own verdicts do not count.
        (1.0, ["a/0", "a/1", "a/2", "b/0", "b/1", "b/2", "c/0"]),
        (0.5, ["a/0", "a/1", "a/2", "b/1", "b/2", "c/0"]),
        (0.4, ["a/1", "a/2", "b/1", "b/2", "c/0"]),
        (0.0, ["a/1", "a/2", "b/1", "b/2", "c/0"]),
    ],
)
def test_groups_that_do_not_need_their_demonstration_train_without(bound: float | None, expected: list[str]) -> None:
    cases = [
        (sample("a", 0, given=(5,)), True),
        (sample("a", 1), True),
        (sample("a", 2), False),
        (sample("b", 0, given=(5, 6, 7)), False),
        (sample("b", 1), True),
        (sample("b", 2), True),
        (sample("c", 0, given=(5,)), True),
    ]
    cfg = DemonstrationConfig(strategy="fixed", num_prefixed=1, max_group_accuracy=bound)
    training = training_rows(collected(cases), AlgoConfig(demonstrations=cfg))
    assert labels(training) == expected
    # Rewards and reasons stay with their rows.
    places = {s.uid + f"/{s.sample_index}": i for i, (s, _) in enumerate(cases)}
    assert [reward.score for reward in training.rewards] == [places[label] for label in expected]
    assert training.finish_reasons == [cases[places[label]][0].finish_reason for label in expected]


def test_nothing_was_collected() -> None:
    nothing = Collected(rollout=RolloutBatch(prompts={}, samples=()), rewards=[])
    cfg = DemonstrationConfig(strategy="fixed", num_prefixed=1, max_group_accuracy=0.5)
    for demonstrations in (DemonstrationConfig(), cfg):
        training = training_rows(nothing, AlgoConfig(demonstrations=demonstrations))
        assert (training.rows, training.rewards, training.finish_reasons) == ([], [], [])


def test_replayed_routing_needs_experts_of_this_model() -> None:
    dims = Dims(
        num_layers=3,
        hidden=8,
        ffn=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab=10,
        tied=False,
        experts=Experts(num=4, per_token=2, ffn=8, normalized=True, layers=(0, 1, 2)),
    )
    (row,) = training_rows(collected([(sample("a", 0), True)]), AlgoConfig()).rows
    # No engine reads a sample that is a whole demonstration.
    given = replace(sample("a", 1, given=(8, 9)), segments=sample("a", 1, given=(8, 9)).segments[:2])
    assert training_rows(collected([(given, True)]), AlgoConfig(), replayed=dims).rows[0].routed_experts is None

    def with_experts(*shape: int, highest: int = 3) -> list[Row]:
        return [replace(row, routed_experts=np.full((4, *shape), highest, dtype=np.int16))]

    require_routed_experts(with_experts(3, 2), dims)
    require_routed_experts(with_experts(3, 2, highest=-1), dims)
    with pytest.raises(DataError, match=r"row a/0: its rollout recorded no experts to replay; replay a record"):
        require_routed_experts([row], dims)
    for rows in (with_experts(2, 2), with_experts(3, 1), with_experts(3, 2, highest=4)):
        with pytest.raises(DataError, match=r"row a/0: its rollout recorded experts of another model: got .* \(3, 2\)"):
            require_routed_experts(rows, dims)


def test_a_difficulty_from_the_data_is_a_quantity_of_its_row() -> None:
    cfg = AlgoConfig(cpo=CpoConfig(method="seq_kl", difficulty="data", difficulty_field="level"))
    step = collected([(sample("a", 0), True), (sample("b", 1), False)])
    levels = {"a": 2, "b": -1.0}
    prompts = {uid: replace(p, extra_info={"level": levels[uid]}) for uid, p in step.rollout.prompts.items()}
    stated = replace(step, rollout=replace(step.rollout, prompts=prompts))
    assert [row.quantities["cpo_difficulty"].tolist() for row in training_rows(stated, cfg).rows] == [[2, 2], [-1, -1]]
    with pytest.raises(DataError, match=r"prompt a: extra_info.level is None, expected a number .* fields are: none; "):
        training_rows(step, cfg)


def test_a_row_of_every_sample() -> None:
    training = training_rows(collected([(sample("a", 0), True), (sample("b", 1), False)]), AlgoConfig())
    assert labels(training) == ["a/0", "b/1"]
    assert [reward.score for reward in training.rewards] == [0.0, 1.0]
    assert training.finish_reasons == [FinishReason.STOP, FinishReason.LENGTH]
    row = training.rows[0]
    assert (row.token_ids.tolist(), row.num_prompt_tokens) == ([1, 2, 8, 9], 2)
    assert {name: score.tolist() for name, score in row.quantities.items()} == {"rollout_logprobs": [-1.0, -1.0]}


def test_rows_say_what_environments_said_if_the_algorithm_reads_it() -> None:
    said = environment_segment([7, 7, 7], np.array([False, True, True]))
    one = replace(sample("a", 0), segments=(*sample("a", 0).segments, said, policy_segment([9])))
    other = sample("a", 1)
    (row, plain) = training_rows(collected([(one, True), (other, False)]), AlgoConfig(echo_coef=0.1)).rows
    assert row.quantities["observed"].tolist() == [0, 0, 0, 1, 1, 0]
    assert plain.quantities["observed"].tolist() == [0, 0]
    assert row.predicted.tolist() == [True, True, False, True, True, True]
    assert "observed" not in training_rows(collected([(one, True)]), AlgoConfig()).rows[0].quantities
    unmarked = replace(one, segments=(*one.segments[:2], environment_segment([7, 7, 7]), policy_segment([9])))
    with pytest.raises(DataError, match=r"row a/0: was sampled without algo.echo_coef"):
        training_rows(collected([(other, False), (unmarked, True)]), AlgoConfig(echo_coef=0.1))


def test_turns_are_numbered_where_a_conversation_branches() -> None:
    prompt, turn = (sample("a", 0).segments[i] for i in (0, -1))
    num_given, num_own = len(prompt.token_ids), len(turn.token_ids)
    forked = replace(
        sample("a", 0),
        segments=(prompt, turn, environment_segment([]), turn),
        forks=(Fork(num_given + num_own, num_given - 1),),
        episode=Episode(environment="e", num_turns=2, tries=(Tries(0, 2, -1),)),
    )
    linear, branching = training_rows(collected([(sample("b", 0), True), (forked, False)]), AlgoConfig()).rows
    assert branching.quantities["turn"].tolist() == [0] * num_own + [1] * num_own
    assert branching.quantities["after_turn"].tolist() == [-1] * 2 * num_own
    assert branching.quantities["first_try"].tolist() == [0] * 2 * num_own
    # Rows of a batch have the same quantities.
    assert linear.quantities["turn"].tolist() == [0] * linear.num_response_tokens
    assert "turn" not in training_rows(collected([(sample("b", 0), True)]), AlgoConfig()).rows[0].quantities
