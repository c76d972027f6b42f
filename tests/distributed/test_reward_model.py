"""A reward model scores as transformers does and trains as plain torch does, in every layout and split."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from megarl.algos.preference import BradleyTerry
from megarl.config.schema import LayoutConfig
from megarl.data.packing import plan_micro_batches
from megarl.train.passes import RoleUpdater
from megarl.types import AlgoState, Row, row_read_at_end
from megarl.types.messages import Head, MicroBatchPlan, Role, RoleSpec, UpdateRequest, UpdateResult
from tests.helpers import layout_training
from tests.helpers.checkpoints import VOCAB_SIZE, add_value_head
from tests.helpers.compare import assert_within
from tests.helpers.critic_ranks import CriticCase, run_critic
from tests.helpers.dense_trainer import DenseRewardModel, DenseStep
from tests.helpers.layout_training import (
    LOSS,
    OUTPUT,
    Pools,
    assert_same_files,
    assert_same_grad_norm,
    run_training,
    trained_role,
    training_case,
)
from tests.helpers.replays import ADAM, LEARNING_RATES, merge

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


@pytest.fixture(scope="module")
def pairs() -> list[Row]:
    """The chosen of seven pairs, with margins, and the rejected."""
    tokens, margins = conversations(14), (0.0, 0.5, -0.3, 0.0, 1.0, 0.2, 0.0)
    return [
        row_read_at_end(f"pair:{i % 7}", i // 7, ids, margin=margins[i] if i < 7 else 0.0)
        for i, ids in enumerate(tokens)
    ]


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


@dataclass(slots=True)
class Recorder:
    """Ranks that answer nothing and keep what they were asked."""

    plan: Sequence[Sequence[Sequence[int]]] = ()
    requests: list[UpdateRequest] = field(default_factory=list)
    rows: Sequence[Row] = ()

    def update(self, rows: Sequence[Row], plan: MicroBatchPlan, request: UpdateRequest) -> UpdateResult:
        self.rows, self.plan = rows, plan.ranks
        self.requests.append(request)
        return UpdateResult(metrics={}, before={i: np.zeros(1, np.float32) for i in range(len(rows))})


def reward_case(spec: RoleSpec, pairs: Sequence[Row], directory: Path) -> CriticCase:
    """Two steps as the trainer asks for them, but for their rates."""
    recorder = Recorder()
    updater = RoleUpdater(recorder, spec, BradleyTerry(), total_steps=2)  # type: ignore[arg-type]
    for step in range(2):
        updater.update(pairs, AlgoState(), step=step)
    return training_case(spec, recorder.rows, recorder.plan, recorder.requests, directory)


def expected_metrics(step: DenseStep) -> Mapping[str, float]:
    scores = np.concatenate(step.before)
    chosen, rejected = scores[:7], scores[7:]
    return {
        "loss": step.loss,
        "accuracy": float((chosen > rejected).mean()),
        "margin": float((chosen - rejected).mean()),
        "score_chosen": float(chosen.mean()),
        "score_rejected": float(rejected.mean()),
    }


@pytest.fixture(scope="module")
def dense(model: Path, pairs: list[Row]) -> list[DenseStep]:
    trainer = DenseRewardModel(model, ADAM)
    steps = [trainer.step(pairs, lr) for lr in LEARNING_RATES]
    accuracy = expected_metrics(steps[0])["accuracy"]
    assert 0 < accuracy < 1
    assert steps[0].grad_norm > ADAM.clip_grad_norm
    return steps


@pytest.mark.parametrize("micro_batch_tokens", [90, pytest.param(1000, marks=pytest.mark.long)], ids=["split", "whole"])
@pytest.mark.parametrize("name", of_layouts("tp2-sp", "pp2"))
def test_every_layout_trains_as_plain_torch(
    rank_pool: Pools,
    model: Path,
    pairs: list[Row],
    dense: list[DenseStep],
    tmp_path: Path,
    name: str,
    micro_batch_tokens: int,
) -> None:
    layout = LAYOUTS[name]
    case = reward_case(role(model, layout, tokens=micro_batch_tokens), pairs, tmp_path)
    assert micro_batch_tokens > 90 or all(len(batches) > 1 for batches in case.micro_batches)
    outcomes = run_training(rank_pool, case)
    for number, (step, files) in enumerate(zip(dense, case.files, strict=True)):
        results = [outcome.updates[number] for outcome in outcomes]
        got = {k.removeprefix("reward_model/"): v for k, v in results[0].metrics.items()}
        for metric, value in expected_metrics(step).items():
            assert_within(metric, got[metric], value, atol=LOSS)
        assert_same_grad_norm(got["grad_norm"], step)
        before = merge([result.before for result in results], len(pairs))
        assert_within("scores", np.concatenate(before), np.concatenate(step.before), atol=OUTPUT)
        assert_same_files(files, step)
