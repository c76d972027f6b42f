"""Rows of conversations, with holes where an environment wrote, train in every layout as plain torch does it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.algos.build import build_algorithm
from megarl.algos.token_rewards import TURN_REWARDS
from megarl.config.algo import AdvantageConfig, AlgoConfig
from megarl.config.schema import LayoutConfig
from megarl.train.forward import with_advantages
from megarl.types import (
    FinishReason,
    Reward,
    Row,
    Sample,
    Segment,
    SegmentSource,
    environment_segment,
    prompt_segment,
    row_from_sample,
    scored_batch,
    version_spans,
)
from tests.helpers.compare import assert_within
from tests.helpers.dense_trainer import DensePolicy, DenseStep, Objective
from tests.helpers.hf_models import VOCAB_SIZE, make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.replay_checks import (
    GRAD_NORM_RELATIVE,
    LOSS_PER_ADVANTAGE,
    WEIGHT,
    assert_same_logprobs,
    assert_same_weights,
)
from tests.helpers.replays import ADAM, LEARNING_RATES, TEMPERATURE, Case, Replay, planned, run_replay

# By sample of one group: the policy's tokens of each turn. Between two turns the environment writes REPLIES[turn].
TURNS = ((4, 1, 7), (9,), (1, 1, 1, 1), (12, 3), (2, 8, 2), (5, 6, 1, 3))
REPLIES = (3, 11, 1)
CASES = {
    "tp2-sp": ("qwen3", Case(layout=LayoutConfig(tp=2, sequence_parallel=True), plan=planned(1))),
    "pp2": ("qwen3", Case(layout=LayoutConfig(pp=2), plan=planned(1))),
    "cp2": ("qwen3", Case(layout=LayoutConfig(cp=2), plan=planned(1))),
    "ep2": ("qwen3_moe", Case(layout=LayoutConfig(dp=2, ep=2), plan=planned(2))),
}
LONG = ("tp2-sp", "pp2", "cp2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Rows of conversations, what plain torch does with them, and the weights after its last step by file names."""

    replay: Replay
    steps: list[DenseStep]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    @functools.cache
    def get(model: str) -> Expected:
        directory = tmp_path_factory.mktemp(model)
        path = make_model(directory / "model", model, tied=False, num_hidden_layers=4)
        objective = Objective(per_row=False, entropy_coef=0.0, kl_coef=0.0, temperature=TEMPERATURE)
        trainer = DensePolicy(path, objective, ADAM)
        replay = Replay(name="token-mean", path=path, rows=filled_rows(trainer))
        steps = [trainer.step(replay.rows, lr) for lr in LEARNING_RATES]
        trainer.model.float().save_pretrained(directory / "after")
        return Expected(replay=replay, steps=steps, weights=load_file(directory / "after" / "model.safetensors"))

    return get


def conversation(index: int, rng: np.random.Generator) -> Sample:
    """The first turn of the first sample begins with a demonstration of two tokens."""

    def written(n: int, source: SegmentSource, reward: float = 0.0) -> Segment:
        return Segment(
            source=source,
            token_ids=rng.integers(0, VOCAB_SIZE, n),
            loss_mask=np.ones(n, dtype=np.bool_),
            versions=version_spans(np.zeros(n, dtype=np.int64)),
            reward=reward,
        )

    segments = [prompt_segment([5, 6, 7])]
    for turn, length in enumerate(TURNS[index]):
        if turn:
            segments.append(environment_segment(rng.integers(0, VOCAB_SIZE, REPLIES[turn - 1]).tolist()))
        given = 2 if index == turn == 0 else 0
        if given:
            segments.append(written(given, SegmentSource.DEMONSTRATION))
        segments.append(written(length - given, SegmentSource.POLICY, reward=float(rng.normal())))
    return Sample(uid="q", sample_index=index, seed=0, segments=tuple(segments), finish_reason=FinishReason.STOP)


def filled_rows(trainer: DensePolicy) -> list[Row]:
    """Every turn has an advantage of its own; old log-probs are the policy's with noise; holes hold noise alone."""
    rng = np.random.default_rng(5)
    samples = [conversation(i, rng) for i in range(len(TURNS))]
    rows = [row_from_sample(sample).with_quantities(**{TURN_REWARDS: sample.turn_rewards}) for sample in samples]
    rewards = [Reward(score=float(sample.turn_rewards.sum()), correct=False) for sample in samples]
    cfg = AlgoConfig(advantage=AdvantageConfig(estimator="turn_returns", gamma=0.9))
    algorithm = build_algorithm(cfg, max_response_tokens=64)
    rows = with_advantages(rows, algorithm.advantages(scored_batch(rows, rewards), algorithm.initial_state()))
    filled = []
    for row in rows:
        tokens = torch.from_numpy(row.token_ids)
        logits = trainer.model(tokens[None]).logits[0, row.num_prompt_tokens - 1 : -1].detach() / TEMPERATURE
        old = logits.log_softmax(-1).gather(-1, tokens[row.num_prompt_tokens :, None])[:, 0].numpy()
        near = {"old_logprobs": rng.normal(old, 0.3), "advantages": row.quantities["advantages"]}
        noise = rng.normal(0, 9, (2, len(old)))
        quantities = {
            name: np.where(row.loss_mask, values, n).astype(np.float32)
            for (name, values), n in zip(near.items(), noise, strict=True)
        }
        # The reference is the old policy: this objective does not read it.
        filled.append(row.with_quantities(**quantities, ref_logprobs=quantities["old_logprobs"]))
    return filled


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CASES])
def test_a_step_on_conversations_equals_plain_torch(
    rank_pool: Callable[[int], RankPool], expected: Callable[[str], Expected], tmp_path: Path, name: str
) -> None:
    model, case = CASES[name]
    right = expected(model)
    replay = right.replay
    got = run_replay(replay, rank_pool(2), case.actor, case.plan(replay.rows), tmp_path)
    for mine, dense in zip(got.steps, right.steps, strict=True):
        loss_atol = LOSS_PER_ADVANTAGE * replay.mean_abs_advantage
        assert_within("loss", mine.metrics["actor/loss"], dense.loss, atol=loss_atol)
        assert abs(dense.loss) > 100 * loss_atol
        norm_atol = GRAD_NORM_RELATIVE * dense.grad_norm
        assert_within("grad norm", mine.metrics["actor/grad_norm"], dense.grad_norm, atol=norm_atol)
        assert_same_logprobs("actor", mine.logprobs, dense.before)
    assert_same_weights(got.steps[-1].weights, right.weights)
    start = load_file(replay.path / "model.safetensors")
    moved = torch.cat([(right.weights[key] - start[key]).flatten() for key in start])
    assert moved.abs().mean() > 30 * WEIGHT


def test_a_hole_that_trained_would_be_seen(
    rank_pool: Callable[[int], RankPool], expected: Callable[[str], Expected], tmp_path: Path
) -> None:
    """One token of one reply counts: loss and gradient norm leave their tolerances."""
    replay, dense = expected("qwen3").replay, expected("qwen3").steps[0]
    hole = replay.rows[0].loss_mask.tolist().index(False)
    spoiled = replay.rows[0].loss_mask.copy()
    spoiled[hole] = True
    changed = replace(replay, rows=[replace(replay.rows[0], loss_mask=spoiled), *replay.rows[1:]])
    got = run_replay(
        changed, rank_pool(1), Case(layout=LayoutConfig(), plan=planned(1)).actor, planned(1)(changed.rows), tmp_path
    )
    assert abs(got.steps[0].metrics["actor/loss"] - dense.loss) > LOSS_PER_ADVANTAGE * replay.mean_abs_advantage
    norm_error = abs(got.steps[0].metrics["actor/grad_norm"] - dense.grad_norm)
    assert norm_error > GRAD_NORM_RELATIVE * dense.grad_norm
