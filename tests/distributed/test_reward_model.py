"""A reward model scores conversations as transformers does, packed or row by row."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from megarl.config.schema import LayoutConfig
from megarl.data.packing import plan_micro_batches
from megarl.types import row_read_at_end
from megarl.types.messages import Head, Role, RoleSpec
from tests.helpers import layout_training
from tests.helpers.checkpoints import VOCAB_SIZE, add_value_head
from tests.helpers.compare import assert_within
from tests.helpers.critic_ranks import CriticCase, run_critic
from tests.helpers.layout_training import (
    OUTPUT,
    Pools,
    trained_role,
)
from tests.helpers.replays import merge

# Both of a pair, and not all pairs at once.
MICRO_BATCH_TOKENS = 90

LAYOUTS = {
    **layout_training.LAYOUTS,
    "tp2": LayoutConfig(tp=2),
    "pp2 vpp2": LayoutConfig(pp=2, virtual_pp=2, overlap_p2p=True),
}


def of_layouts(*short: str) -> list[object]:
    """All layouts; those that are not named are long tests."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.long) for name in LAYOUTS]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_value_head(checkpoint(tied=False, num_layers=4), tmp_path_factory.mktemp("reward"))


def conversations(count: int) -> list[np.ndarray]:
    """Token ids without the padding token, from a single one to dozens."""
    rng = np.random.default_rng(1)
    return [rng.integers(3, VOCAB_SIZE, length) for length in (1, *rng.integers(2, 40, count - 1))]


def role(path: Path, layout: LayoutConfig, *, trainable: bool = True, tokens: int = MICRO_BATCH_TOKENS) -> RoleSpec:
    return trained_role(path, layout, tokens, role=Role.REWARD, head=Head.SCALAR, trainable=trainable)


def padded_scores(path: Path, tokens: Sequence[np.ndarray]) -> np.ndarray:
    """What transformers says of all at once, padded on the right."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    assert model.config.num_labels == 1
    ids = torch.full((len(tokens), max(map(len, tokens))), model.config.pad_token_id)
    for i, own in enumerate(tokens):
        ids[i, : len(own)] = torch.from_numpy(own)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=ids != model.config.pad_token_id).logits[:, 0].numpy()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "row by row"])
@pytest.mark.parametrize("name", of_layouts("tp1", "tp2-sp"))
def test_scores_are_those_of_transformers(rank_pool: Pools, model: Path, name: str, packed: bool) -> None:
    layout, tokens = LAYOUTS[name], conversations(12)
    rows = [row_read_at_end("r", i, ids) for i, ids in enumerate(tokens)]
    lengths, multiple = [row.num_tokens for row in rows], layout.pp if layout.virtual_pp > 1 else 1
    plan = plan_micro_batches(lengths, layout.dp, 150 if packed else max(lengths), multiple=multiple)
    if not packed and layout.dp == 1:
        plan = [[[i] for i in range(len(rows))]]
    case = CriticCase(critic=role(model, layout, trainable=False), rows=rows, micro_batches=plan, requests=(), files=())
    outcomes = rank_pool(layout.world_size).run(run_critic, case)
    outputs = merge([o.outputs.quantities["values"] for o in outcomes if o.outputs is not None], len(rows))
    expected = padded_scores(model, tokens)
    assert expected.std() > 1000 * OUTPUT
    assert_within("scores", np.concatenate(outputs), expected, atol=OUTPUT)
