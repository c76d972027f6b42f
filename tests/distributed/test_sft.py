"""Chats train, and are measured, as in plain torch: in every layout, packed in any way, with uneven numbers of rows."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from megarl.algos.objectives import SftAlgorithm
from megarl.config.schema import LayoutConfig
from megarl.data.demonstrations import SftDataset
from megarl.data.packing import plan_micro_batches
from megarl.train.passes import RolePasses
from megarl.train.supervised import validate_sft
from megarl.types import FloatArray, Row
from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.helpers import layout_training
from tests.helpers.compare import assert_within
from tests.helpers.critic_ranks import CriticCase
from tests.helpers.dense_trainer import DenseSft
from tests.helpers.layout_training import (
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

# The longest chat has 90 tokens, all seven have 278.
SPLIT, ALONE = 100, 1000

LAYOUTS = {**layout_training.LAYOUTS, "dp4": LayoutConfig(dp=4)}
# Two ranks with different numbers of rows, in several micro-batches; and four that share two key/value heads.
QUICK = [("dp2", SPLIT), ("tp4-sp", ALONE)]
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.long, id=" ".join(map(str, case)))
    for case in ((name, tokens) for name in LAYOUTS for tokens in (SPLIT, ALONE))
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> SftDataset:
    """Seven chats of one to four answers, of which every third is left out."""
    rng = np.random.default_rng(5)
    lines = []
    for num_answers in (1, 2, 3, 4, 1, 2, 1):
        texts = ["".join(rng.choice(list("0123456789+= "), rng.integers(1, 12))).strip() + "!" for _ in range(8)]
        turns = [{"role": ("user", "assistant")[i % 2], "content": texts[i]} for i in range(2 * num_answers)]
        turns = [turn | {"weight": int(i % 6 != 3)} for i, turn in enumerate(turns)]
        lines.append(json.dumps({"messages": turns}) + "\n")
    path = tmp_path_factory.mktemp("chats") / "a.jsonl"
    path.write_text("".join(lines))
    return SftDataset([path], make_byte_tokenizer(), max_prompt_tokens=100, max_response_tokens=200)


def sft_case(path: Path, layout: LayoutConfig, tokens: int, rows: list[Row], directory: Path) -> CriticCase:
    plan = plan_micro_batches([row.num_tokens for row in rows], layout.dp, tokens)
    requests = update_requests(SftAlgorithm(), rows)
    return training_case(trained_role(path, layout, tokens), rows, plan, requests, directory)


class MeasuredPasses:
    """A scorer that repeats what the ranks said."""

    def __init__(self, logprobs: Sequence[FloatArray]) -> None:
        self.logprobs = logprobs

    def forward(self, rows: Sequence[Row], *, step: int) -> Mapping[str, Sequence[FloatArray]]:
        return {"logprobs": self.logprobs}


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_every_layout_trains_as_plain_torch(
    rank_pool: Pools, checkpoint: Callable[..., Path], chats: SftDataset, tmp_path: Path, name: str, tokens: int
) -> None:
    path, layout, rows = checkpoint(tied=False), LAYOUTS[name], chats.rows(range(len(chats)))
    # Answers that are left out lie between others.
    assert any((np.diff(np.flatnonzero(row.loss_mask)) > 1).any() for row in rows)
    case = sft_case(path, layout, tokens, rows, tmp_path)
    per_rank = [sum(map(len, batches)) for batches in case.micro_batches]
    assert layout.dp == 1 or len(set(per_rank)) > 1
    assert tokens == ALONE or layout.dp > 2 or all(len(batches) > 1 for batches in case.micro_batches)
    outcomes = run_training(rank_pool, case)
    dense = DenseSft(path, ADAM)

    nll = np.concatenate([-dense.logprobs(row).detach().numpy()[row.loss_mask] for row in rows])
    measured = merge([outcome.outputs.quantities["logprobs"] for outcome in outcomes if outcome.outputs], len(rows))
    result = validate_sft(chats, cast(RolePasses, MeasuredPasses(measured)), step=0)
    assert_within("held-out cross-entropy", result.metrics["val/sft/nll"], nll.mean(), atol=LOSS)
    assert_within("perplexity", result.metrics["val/sft/perplexity"] / np.exp(nll.mean()), 1.0, atol=LOSS)
    assert result.metrics["val/sft/num_tokens"] == len(nll)

    for number, (lr, files) in enumerate(zip(LEARNING_RATES, case.files, strict=True)):
        step = dense.step(rows, lr)
        metrics = outcomes[0].updates[number].metrics
        assert_within("loss", metrics["actor/loss"], step.loss, atol=LOSS)
        assert_within("nll", metrics["sft/nll"], step.loss, atol=LOSS)
        assert_same_grad_norm(metrics["actor/grad_norm"], step)
        if number == 0:
            before = merge([outcome.updates[0].before for outcome in outcomes], len(rows))
            for row, got, expected in zip(rows, before, step.before, strict=True):
                assert_within("log-probs", got[row.loss_mask], expected[row.loss_mask], atol=OUTPUT)
        assert_same_files(files, step)


@pytest.mark.long
def test_a_replica_without_rows_keeps_in_step(
    rank_pool: Pools, checkpoint: Callable[..., Path], chats: SftDataset, tmp_path: Path
) -> None:
    path, rows = checkpoint(tied=False), chats.rows([0])
    case = sft_case(path, LAYOUTS["dp2"], SPLIT, rows, tmp_path)
    outcomes = run_training(rank_pool, case)
    assert sorted(len(outcome.outputs.quantities["logprobs"]) for outcome in outcomes if outcome.outputs) == [0, 1]
    dense = DenseSft(path, ADAM)
    for number, lr in enumerate(LEARNING_RATES):
        step = dense.step(rows, lr)
        assert_within("loss", outcomes[0].updates[number].metrics["actor/loss"], step.loss, atol=LOSS)
