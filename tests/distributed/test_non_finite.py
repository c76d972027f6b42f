"""Numbers that are not finite end the step, and the message names the step and the row."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.types import Row
from tests.helpers import ranks
from tests.helpers.rank_pool import RankPool
from tests.helpers.requests import update_request, with_advantages
from tests.helpers.rows import random_rows

GetPool = Callable[[int], RankPool]
GetCheckpoint = Callable[..., Path]

BAD_TOKEN, STEP = 200, 3
LAYOUTS = [LayoutConfig(), LayoutConfig(tp=2), LayoutConfig(tp=2, sequence_parallel=True)]
LAYOUT_IDS = ["tp1", "tp2", "tp2-sp"]
MICRO_BATCHES = [[0, 1], [3, 2]]


def rows_with_bad_token(index: int) -> list[Row]:
    """Four rows, of which only row `index` has `BAD_TOKEN`, in its prompt."""
    rows = random_rows([(3, 4), (2, 5), (4, 2), (5, 6)])
    for i, row in enumerate(rows):
        row.token_ids[row.token_ids == BAD_TOKEN] = 0
        if i == index:
            row.token_ids[0] = BAD_TOKEN
    return with_advantages(rows)


@pytest.fixture
def spoiled(checkpoint: GetCheckpoint, tmp_path: Path) -> Path:
    """A model in which one number, of the embedding of `BAD_TOKEN`, is NaN."""
    source = checkpoint(tied=False)
    weights = load_file(source / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD_TOKEN, 5] = torch.nan
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    return tmp_path


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_IDS)
def test_nan_weight(rank_pool: GetPool, spoiled: Path, layout: LayoutConfig) -> None:
    rows = rows_with_bad_token(2)
    model = ModelConfig(path=str(spoiled), dtype="float32")
    run = rank_pool(layout.world_size).run
    request = update_request(rows, step=STEP)
    arguments = (ranks.non_finite_messages, ActorConfig(layout=layout), model)
    for messages in run(*arguments, rows, MICRO_BATCHES, request):
        for message in messages:
            assert message is not None
            assert message.startswith("step 3: log-probs of row p2/0 are not finite; ")
    # Rows without the token are not touched by it.
    clean = rows_with_bad_token(-1)
    assert run(*arguments, clean, MICRO_BATCHES, request) == [(None, None)] * layout.world_size


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("advantages", np.nan, "step 3: loss of the actor is nan; advantages of row p2/0 are not finite"),
        ("old_logprobs", np.nan, "step 3: loss of the actor is nan; old_logprobs of row p2/0 are not finite"),
        # Still finite as a loss, but not as the sum of squared gradients.
        ("advantages", 1e30, "step 3: gradient norm of the actor is inf; "),
    ],
)
def test_quantities_that_are_not_finite(
    rank_pool: GetPool, checkpoint: GetCheckpoint, name: str, value: float, message: str
) -> None:
    rows = rows_with_bad_token(-1)
    broken = np.where(rows[2].loss_mask, np.float32(value), np.float32(0))
    rows = [row.with_quantities(old_logprobs=np.zeros(row.num_response_tokens, np.float32)) for row in rows]
    rows[2] = rows[2].with_quantities(**{name: broken})
    model = ModelConfig(path=str(checkpoint(tied=False)), dtype="float32")
    got = rank_pool(1).run(
        ranks.non_finite_messages, ActorConfig(), model, rows, MICRO_BATCHES, update_request(rows, step=STEP)
    )[0]
    assert got[0] is None
    assert got[1].startswith(message)
