"""Windows count positions of the row: behind a shared prompt, and where ranks have chunks of each row."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.parallel.backend import shares_prefixes
from megarl.types import Row
from tests.helpers import ranks
from tests.helpers.compare import assert_within
from tests.helpers.family_parity import assert_equals_transformers, load_transformers, run_transformers
from tests.helpers.hf_models import VOCAB_SIZE, make_model
from tests.helpers.rank_pool import RankPool


def rows_of(prompt: list[int], lengths: list[int]) -> list[Row]:
    rng = np.random.default_rng(0)
    return [
        Row(
            uid="shared",
            sample_index=i,
            token_ids=np.array([*prompt, *rng.integers(0, VOCAB_SIZE, length)]),
            num_prompt_tokens=len(prompt),
            loss_mask=np.ones(length, dtype=np.bool_),
        )
        for i, length in enumerate(lengths)
    ]


@torch.no_grad()
def dense_logprobs(path: Path, row: Row) -> np.ndarray:
    tokens = torch.from_numpy(row.token_ids)
    log_p = load_transformers(path)(tokens[None]).logits[0, row.num_prompt_tokens - 1 : -1].log_softmax(-1)
    logprobs: np.ndarray = log_p.gather(1, tokens[row.num_prompt_tokens :, None])[:, 0].numpy()
    return logprobs


@pytest.mark.parametrize(
    "layout", [LayoutConfig(tp=2, sequence_parallel=True), LayoutConfig(cp=2)], ids=["tp2-sp", "cp2"]
)
def test_windows_of_rows_with_one_prompt(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, layout: LayoutConfig
) -> None:
    """Windows of 7 end within the prompt of 11 tokens, which context parallelism does not share."""
    path = make_model(tmp_path / "model", "qwen3-windows", tied=False)
    rows = rows_of(list(range(100, 111)), [2, 30, 5, 5])
    assert shares_prefixes(ActorConfig(layout=layout)) == (layout.cp == 1)
    model = ModelConfig(path=str(path), dtype="float32", vocab_multiple=4)
    arguments = (ActorConfig(layout=layout), model, rows, [[0, 1, 2, 3]])
    got = rank_pool(2).run(ranks.forward_actor, *arguments, temperature=1.0)[0].quantities["logprobs"]
    for i, row in enumerate(rows):
        assert_within("log-probs", got[i], dense_logprobs(path, row), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_backward_computes_again_equals_transformers(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, recompute: Literal["selective", "full"]
) -> None:
    path = make_model(tmp_path / "model", "mistral-window", tied=False)
    layout = LayoutConfig(tp=2, sequence_parallel=True)
    assert_equals_transformers(rank_pool(2), run_transformers(path), layout, tmp_path, recompute=recompute)
