"""bfloat16 parameters move by float32 steps, and the reference does not move."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from tests.helpers import ranks
from tests.helpers.rank_pool import RankPool
from tests.helpers.requests import update_request, with_advantages
from tests.helpers.rows import random_rows

GetPool = Callable[[int], RankPool]
GetCheckpoint = Callable[..., Path]

LENGTHS = [(4, 6), (2, 9), (7, 3)]
# Steps of the norm's bfloat16 weights, which are in [0.5, 2), are 2⁻⁸ and 2⁻⁷: half of one is 4 learning rates.
LEARNING_RATE = 4.5e-4
NUM_STEPS = 12


@pytest.mark.parametrize("distributed", [True, False])
def test_bfloat16_weights_follow_float32_ones(rank_pool: GetPool, checkpoint: GetCheckpoint, distributed: bool) -> None:
    model = ModelConfig(path=str(checkpoint(tied=False, dtype="bfloat16")), dtype="bfloat16")
    actor = ActorConfig(optimizer=OptimizerConfig(distributed=distributed, weight_decay=0.0))
    rows = with_advantages(random_rows(LENGTHS))
    requests = [update_request(rows, step=step, lr=LEARNING_RATE) for step in range(NUM_STEPS)]
    history = rank_pool(1).run(ranks.final_norm_over_steps, actor, model, rows, requests)[0]

    first, second, last = history[0], history[1], history[-1]
    assert first.model.dtype == torch.bfloat16
    assert first.main.dtype == torch.float32
    assert torch.equal(first.main, first.model.float())
    # Adam's first step is one learning rate against the gradient, whatever its size.
    torch.testing.assert_close((second.main - first.main).abs(), torch.full((64,), LEARNING_RATE), rtol=1e-2, atol=0)
    # Rounding hides it from the model, until enough of them have added up.
    assert torch.equal(second.model, first.model)
    moved = last.model != first.model
    assert moved.sum() > len(moved) / 4
    for copies in history:
        assert torch.equal(copies.model, copies.main.bfloat16())


@pytest.mark.parametrize("layout", [LayoutConfig(), LayoutConfig(tp=2, sequence_parallel=True)], ids=["tp1", "tp2-sp"])
def test_reference_stays_frozen(rank_pool: GetPool, checkpoint: GetCheckpoint, layout: LayoutConfig) -> None:
    model = ModelConfig(path=str(checkpoint(tied=True)), dtype="float32")
    rows = with_advantages(random_rows(LENGTHS))
    request = update_request(rows)
    results = rank_pool(layout.world_size).run(
        ranks.models_around_update, ActorConfig(layout=layout), model, rows, request
    )
    for before, after in results:
        assert before.actor.keys() == before.reference.keys() == after.reference.keys()
        for name, value in before.reference.items():
            assert torch.equal(value, before.actor[name]), name
            assert torch.equal(value, after.reference[name]), name
            assert not torch.equal(value, after.actor[name]), name
        for models in (before, after):
            assert not models.shared_addresses
            assert not models.trainable_reference


def test_every_group_has_the_configured_time_out(rank_pool: GetPool) -> None:
    for seconds in rank_pool(2).run(ranks.group_timeouts, LayoutConfig(tp=2)):
        assert seconds == [ranks.COLLECTIVE_TIMEOUT_S] * 2


def test_deterministic_runs_ask_transformer_engine_and_torch_for_it(
    rank_pool: GetPool, checkpoint: GetCheckpoint
) -> None:
    model = ModelConfig(path=str(checkpoint(tied=True)), dtype="float32")
    (told,) = rank_pool(1).run(ranks.deterministic_settings, model, [True, False])
    assert told == [("0", True), ("1", False)]
