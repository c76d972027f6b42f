"""A policy trains on preference pairs as plain torch does, in every layout and split, with every objective."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from safetensors.torch import load_file

from megarl.algos.preference import preference_objective
from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig, TrainPreferenceConfig
from megarl.data.packing import plan_micro_batches
from megarl.types import AlgoState, Row
from megarl.types.messages import MicroBatchPlan, Role, RoleSpec, UpdateRequest
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import create_model_files, weight_specs
from tests.helpers.compare import assert_within
from tests.helpers.critic_ranks import CriticCase, run_critic
from tests.helpers.dense_trainer import DensePreference
from tests.helpers.rank_pool import RankPool
from tests.helpers.replays import ADAM, LEARNING_RATES, merge
from tests.helpers.rows import random_rows

LOSS = 1e-5
LOGPROB = 1e-5
GRAD_NORM_RELATIVE = 1e-4
WEIGHT = 1e-6
BETA = 0.5
# Both of a pair, and not all pairs at once.
SPLIT = 90

Pools: TypeAlias = Callable[[int], RankPool]

LAYOUTS = {
    "tp1": LayoutConfig(),
    "tp2-sp": LayoutConfig(tp=2, sequence_parallel=True),
    "pp2": LayoutConfig(pp=2),
    "cp2": LayoutConfig(cp=2),
    "dp2": LayoutConfig(dp=2),
    "tp2-sp cp2": LayoutConfig(tp=2, sequence_parallel=True, cp=2),
    "pp2 dp2": LayoutConfig(pp=2, dp=2),
}
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
        row.with_scores(
            ref_logprobs=rng.normal(-5.5, 0.3, row.num_response_tokens).astype(np.float32),
            batch_kl=np.full(row.num_response_tokens, 0.8, np.float32),
        )
        for row in rows
    ]


def training_case(path: Path, layout: LayoutConfig, objective: str, tokens: int, directory: Path) -> CriticCase:
    optimizer = OptimizerConfig(
        betas=ADAM.betas, eps=ADAM.eps, weight_decay=ADAM.weight_decay, clip_grad_norm=ADAM.clip_grad_norm
    )
    spec = RoleSpec(
        role=Role.ACTOR,
        model=ModelConfig(path=str(path), dtype="float32"),
        settings=ActorConfig(layout=layout, optimizer=optimizer, micro_batch_tokens=tokens),
    )
    rows, loss = preference_pairs(), preference_objective(TrainPreferenceConfig(objective=objective, beta=BETA))
    lengths = [a.num_tokens + b.num_tokens for a, b in zip(rows[:7], rows[7:], strict=True)]
    plan = MicroBatchPlan(plan_micro_batches(lengths, layout.dp, tokens)).paired(7).ranks
    specs = weight_specs(read_model_spec(spec.model.path), "float32")
    return CriticCase(
        critic=spec,
        rows=[row.only(loss.reads) for row in rows],
        micro_batches=plan,
        requests=[
            UpdateRequest(
                step=step,
                objective=loss,
                state=AlgoState(),
                denominators=loss.denominators(rows),
                temperature=1.0,
                lr=lr,
            )
            for step, lr in enumerate(LEARNING_RATES)
        ],
        files=[[str(file) for file in create_model_files(directory / str(i), specs)] for i in range(2)],
    )


@pytest.mark.parametrize(("name", "objective", "tokens"), CASES)
def test_every_layout_trains_as_plain_torch(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path, name: str, objective: str, tokens: int
) -> None:
    path, layout = checkpoint(tied=False), LAYOUTS[name]
    case = training_case(path, layout, objective, tokens, tmp_path)
    assert tokens > SPLIT or all(len(batches) > 1 for batches in case.micro_batches)
    outcomes = [o for o in rank_pool(layout.world_size).run(run_critic, case) if o.scored is not None]
    assert len(outcomes) == layout.dp
    rows = preference_pairs()
    dense, judge = (DensePreference(path, ADAM, objective=objective, beta=BETA) for _ in range(2))
    for number, (lr, (file,)) in enumerate(zip(LEARNING_RATES, case.files, strict=True)):
        step = dense.step(rows, lr)
        results = [outcome.updates[number] for outcome in outcomes]
        metrics = results[0].metrics
        assert_within("loss", metrics["actor/loss"], step.loss, atol=LOSS)
        assert_within("grad norm", metrics["actor/grad_norm"], step.grad_norm, atol=GRAD_NORM_RELATIVE * step.grad_norm)
        # With the ranks' own weights: that these are rounded to float32 shows in log-probs by more than the tolerance.
        before: Sequence[np.ndarray] = merge([result.before for result in results], len(rows))
        expected = [judge.logprobs(row).detach().numpy() for row in rows]
        assert_within("log-probs", np.concatenate(before), np.concatenate(expected), atol=LOGPROB)
        weights = load_file(file)
        assert weights.keys() == step.weights.keys()
        worst = max((w.double() - step.weights[n]).abs().max().item() for n, w in weights.items())
        assert_within("weights", worst, 0.0, atol=WEIGHT)
        judge.model.load_state_dict({name: value.double() for name, value in weights.items()})
