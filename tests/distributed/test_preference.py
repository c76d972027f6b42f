"""A policy trains on preference pairs as plain torch does, in every layout and split, with every objective."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from megarl.algos.preference import preference_objective
from megarl.config.schema import LayoutConfig, TrainPreferenceConfig
from megarl.data.packing import plan_micro_batches
from megarl.types import Row
from megarl.types.messages import MicroBatchPlan
from tests.helpers.compare import assert_within
from tests.helpers.critic_ranks import CriticCase
from tests.helpers.dense_trainer import DensePreference
from tests.helpers.layout_training import (
    LAYOUTS,
    LOSS,
    OUTPUT,
    Pools,
    assert_same_files,
    assert_same_grad_norm,
    run_training,
    trained_role,
    training_case,
    update_requests,
)
from tests.helpers.replays import ADAM, LEARNING_RATES, merge
from tests.helpers.rows import random_rows

BETA = 0.5
# Both of a pair, and not all pairs at once.
SPLIT = 90

OBJECTIVES = ("dpo", "ipo", "kto", "orpo")
# Two ranks that split the vocabulary, and pairs in several micro-batches.
DEFAULT = ("tp2-sp", "kto", SPLIT)
CASES = [
    pytest.param(*case, marks=() if case == DEFAULT else pytest.mark.long, id=" ".join(map(str, case)))
    for case in ((name, objective, tokens) for name in LAYOUTS for objective in OBJECTIVES for tokens in (SPLIT, 1000))
]


def preference_pairs() -> list[Row]:
    """Seven pairs of a prompt and two responses of different lengths, and what the losses read."""
    rng = np.random.default_rng(2)
    prompts, responses = rng.integers(1, 9, 7), rng.integers(1, 30, 14)
    rows = random_rows([(int(prompts[i % 7]), int(num)) for i, num in enumerate(responses)], seed=3, holes=False)
    return [
        row.with_quantities(
            ref_logprobs=rng.normal(-5.5, 0.3, row.num_response_tokens).astype(np.float32),
            batch_kl=np.full(row.num_response_tokens, 0.8, np.float32),
        )
        for row in rows
    ]


def preference_case(path: Path, layout: LayoutConfig, objective: str, tokens: int, directory: Path) -> CriticCase:
    rows, loss = preference_pairs(), preference_objective(TrainPreferenceConfig(objective=objective, beta=BETA))
    lengths = [a.num_tokens + b.num_tokens for a, b in zip(rows[:7], rows[7:], strict=True)]
    plan = MicroBatchPlan(plan_micro_batches(lengths, layout.dp, tokens)).paired(7).ranks
    read = [row.only(loss.reads) for row in rows]
    return training_case(trained_role(path, layout, tokens), read, plan, update_requests(loss, rows), directory)


@pytest.mark.parametrize(("name", "objective", "tokens"), CASES)
def test_every_layout_trains_as_plain_torch(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path, name: str, objective: str, tokens: int
) -> None:
    path, layout = checkpoint(tied=False), LAYOUTS[name]
    case = preference_case(path, layout, objective, tokens, tmp_path)
    assert tokens > SPLIT or all(len(batches) > 1 for batches in case.micro_batches)
    outcomes = run_training(rank_pool, case)
    rows = preference_pairs()
    dense, judge = (DensePreference(path, ADAM, objective=objective, beta=BETA) for _ in range(2))
    for number, (lr, files) in enumerate(zip(LEARNING_RATES, case.files, strict=True)):
        step = dense.step(rows, lr)
        results = [outcome.updates[number] for outcome in outcomes]
        metrics = results[0].metrics
        assert_within("loss", metrics["actor/loss"], step.loss, atol=LOSS)
        assert_same_grad_norm(metrics["actor/grad_norm"], step)
        # With the ranks' own weights: that these are rounded to float32 shows in log-probs by more than the tolerance.
        before: Sequence[np.ndarray] = merge([result.before for result in results], len(rows))
        expected = [judge.logprobs(row).detach().numpy() for row in rows]
        assert_within("log-probs", np.concatenate(before), np.concatenate(expected), atol=OUTPUT)
        assert_same_files(files, step)
        judge.model.load_state_dict({name: value.double() for name, value in load_file(files[0]).items()})
