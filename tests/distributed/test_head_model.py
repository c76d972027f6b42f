"""An update of a model is the same in each memory mode of the log-prob head, and the one that plain torch computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pytest
import torch

from megarl.algos.build import build_algorithm
from megarl.config.schema import HeadConfig, LayoutConfig, ModelConfig
from megarl.types import Row
from megarl.types.messages import ForwardResult, UpdateRequest, UpdateResult
from tests.helpers import head_ranks
from tests.helpers.checkpoints import VOCAB_SIZE, load_hf
from tests.helpers.compare import assert_within
from tests.helpers.dense_trainer import DensePolicy, DenseStep, Objective
from tests.helpers.head_ranks import REGIMES, HeadUpdate, HeadUpdates
from tests.helpers.rank_pool import RankPool
from tests.helpers.replay_checks import GRAD_NORM_RELATIVE, LOSS_PER_ADVANTAGE, assert_same_logprobs
from tests.helpers.replays import (
    ADAM,
    LEARNING_RATES,
    TEMPERATURE,
    TIED,
    Case,
    Replay,
    make_replay,
    merge,
    planned,
)

GetPool = Callable[[int], RankPool]
GetCheckpoint = Callable[..., Path]
Dtype: TypeAlias = Literal["float32", "bfloat16"]

# Two chunks and more in each micro-batch.
CHUNK_TOKENS = 7
# Every memory mode by name, and what `auto` takes of them without memory for logits.
SETTINGS = {
    **{memory_mode: HeadConfig(regime=memory_mode, chunk_tokens=CHUNK_TOKENS) for memory_mode in REGIMES},
    "auto": HeadConfig(memory_mib=0, chunk_tokens=CHUNK_TOKENS),
}
CHOSEN = {**{memory_mode: memory_mode for memory_mode in REGIMES}, "auto": "in_chunk"}

TP2_SP = LayoutConfig(tp=2, sequence_parallel=True)
CASES = {
    "tp1": Case(layout=LayoutConfig(), plan=planned(1)),
    "tp2": Case(layout=LayoutConfig(tp=2), plan=planned(1)),
    "tp2-sp": Case(layout=TP2_SP, plan=planned(1)),
    "pp2": Case(layout=LayoutConfig(pp=2), plan=planned(1)),
    "cp2": Case(layout=LayoutConfig(cp=2), plan=planned(1)),
    "dp2 plain optimizer": Case(layout=LayoutConfig(dp=2), plan=planned(2), distributed=False),
    "tp2-sp pp2": Case(layout=replace(TP2_SP, pp=2), plan=planned(1)),
    "tp2-sp cp2": Case(layout=replace(TP2_SP, cp=2), plan=planned(1)),
    "tp2-sp dp2": Case(layout=replace(TP2_SP, dp=2), plan=planned(2)),
}
TIED_ALGORITHM, UNTIED_ALGORITHM = "token-mean+kl+entropy", "seq-mean-token-mean+entropy"
SHORT = {("tp2-sp", TIED_ALGORITHM)}
PAIRS = [
    pytest.param(case, algorithm, marks=() if (case, algorithm) in SHORT else pytest.mark.long)
    for case in CASES
    for algorithm in (TIED_ALGORITHM, UNTIED_ALGORITHM, "token-mean")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A replay; the update of plain torch, and the log-probs after it."""

    replay: Replay
    step: DenseStep
    after: list[np.ndarray]


@pytest.fixture(scope="module")
def expected(
    rank_pool: GetPool, checkpoint: GetCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Expected]:
    made: dict[tuple[str, Dtype], Expected] = {}

    def get(name: str, dtype: Dtype = "float32") -> Expected:
        if (name, dtype) not in made:
            record = tmp_path_factory.mktemp("head") / "r.parquet"
            path = checkpoint(tied=TIED[name], dtype=dtype, num_layers=2)
            replay = make_replay(name, path, record, rank_pool(1))
            step, after = dense_steps(replay, dtype)
            made[name, dtype] = Expected(replay=replay, step=step, after=after.before)
        return made[name, dtype]

    return get


def dense_steps(replay: Replay, dtype: Dtype) -> list[DenseStep]:
    """The update, and one more of the weights that it led to, rounded as the model's: what that says before it."""
    objective = Objective(
        per_row=replay.cfg.aggregation == "seq-mean-token-mean",
        entropy_coef=replay.cfg.entropy_coef,
        kl_coef=replay.cfg.kl.coef if replay.cfg.kl.where == "loss" else 0.0,
        temperature=TEMPERATURE,
        policy_loss=replay.cfg.policy_loss.name,
    )
    trainer = DensePolicy(replay.path, objective, ADAM)
    first = trainer.step(replay.rows, LEARNING_RATES[0])
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
    return [first, trainer.step(replay.rows, LEARNING_RATES[0])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the replicas of a layout said together of one update, and the regimes that all heads worked in."""

    metrics: dict[str, float]
    before: list[np.ndarray]
    after: list[np.ndarray]
    regimes: set[str]


def run_updates(
    pool: RankPool, replay: Replay, case: Case, settings: Sequence[HeadConfig], dtype: Dtype = "float32"
) -> list[Outcome]:
    """The same update under each setting."""
    algorithm = build_algorithm(replay.cfg, max_response_tokens=64)
    request = UpdateRequest(
        step=0,
        objective=algorithm,
        state=algorithm.initial_state(),
        denominators=algorithm.denominators(replay.rows),
        temperature=TEMPERATURE,
        lr=LEARNING_RATES[0],
    )
    updates = HeadUpdates(
        actor=case.actor,
        model=ModelConfig(path=str(replay.path), dtype=dtype),
        rows=replay.rows,
        micro_batches=case.plan(replay.rows),
        request=request,
        settings=settings,
    )
    by_rank = pool.run(head_ranks.head_updates, updates)
    return [outcome_of(results, len(replay.rows)) for results in zip(*by_rank, strict=True)]


def outcome_of(ranks: Sequence[HeadUpdate], num_rows: int) -> Outcome:
    results: list[UpdateResult] = [rank.result for rank in ranks if rank.result is not None]
    passes: list[ForwardResult] = [rank.after for rank in ranks if rank.after is not None]
    assert all(result.metrics == results[0].metrics for result in results)
    return Outcome(
        metrics=dict(results[0].metrics),
        before=merge([result.before for result in results], num_rows),
        after=merge([each.quantities["logprobs"] for each in passes], num_rows),
        regimes={memory_mode for rank in ranks for memory_mode in rank.regimes},
    )


def assert_same_update(got: Outcome, expected: Expected) -> None:
    step = expected.step
    loss_atol = LOSS_PER_ADVANTAGE * expected.replay.mean_abs_advantage
    assert_within("loss", got.metrics["actor/loss"], step.loss, atol=loss_atol)
    norm_atol = GRAD_NORM_RELATIVE * step.grad_norm
    assert_within("grad norm", got.metrics["actor/grad_norm"], step.grad_norm, atol=norm_atol)
    assert_same_logprobs("actor", got.before, step.before)
    assert_same_logprobs("updated actor", got.after, expected.after)


@pytest.mark.parametrize(("case", "algorithm"), PAIRS)
def test_every_memory_mode_is_the_same_update(
    rank_pool: GetPool, expected: Callable[..., Expected], case: str, algorithm: str
) -> None:
    exact = expected(algorithm)
    layout = CASES[case].layout
    outcomes = run_updates(rank_pool(layout.world_size), exact.replay, CASES[case], list(SETTINGS.values()))
    for name, outcome in zip(SETTINGS, outcomes, strict=True):
        print(name)
        assert outcome.regimes == {CHOSEN[name]}
        assert_same_update(outcome, exact)
    # The update moves log-probs by far more than the tolerance.
    moved = np.abs(np.concatenate(exact.after) - np.concatenate(exact.step.before))
    assert moved.mean() > 1e-3


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.long) for case in ("tp1", "tp2-sp", "pp2", "cp2", "tp2-sp cp2")],
)
def test_every_memory_mode_is_the_same_update_on_nuclei(
    rank_pool: GetPool, checkpoint: GetCheckpoint, tmp_path: Path, case: str
) -> None:
    """Response tokens that were sampled from two to 41 tokens, or from all; their old log-probs too."""
    path = checkpoint(tied=TIED[TIED_ALGORITHM], num_layers=2)
    whole = make_replay(TIED_ALGORITHM, path, tmp_path / "r.parquet", rank_pool(1))
    rng, rows = np.random.default_rng(2), []
    for row in whole.rows:
        labels = row.token_ids[row.num_prompt_tokens :]
        nucleus = np.full((len(labels), 41), -1, dtype=np.int32)
        for i in np.flatnonzero(np.arange(len(labels)) % 4):
            others = np.setdiff1d(rng.choice(VOCAB_SIZE, 1 + 13 * (i % 4), replace=False), labels[i])
            nucleus[i, : 1 + len(others)] = [labels[i], *others]
        rows.append(replace(row, nucleus=nucleus))
    replay = replace(whole, rows=rows)
    # How far renormalising takes the log-probs: −ln S, here several nats.
    shifts = [
        (b - a).astype(np.float32)
        for a, b in zip(*(dense_steps(r, "float32")[0].before for r in (whole, replay)), strict=True)
    ]
    assert np.concatenate(shifts).max() > 3
    shifted = ("old_logprobs", "ref_logprobs")
    rows = [
        row.with_quantities(**{name: row.quantities[name] + shift for name in shifted})
        for row, shift in zip(rows, shifts, strict=True)
    ]
    replay = replace(replay, rows=rows)
    step, after = dense_steps(replay, "float32")
    exact = Expected(replay=replay, step=step, after=after.before)
    outcomes = run_updates(rank_pool(CASES[case].layout.world_size), replay, CASES[case], list(SETTINGS.values()))
    for name, outcome in zip(SETTINGS, outcomes, strict=True):
        print(name)
        assert_same_update(outcome, exact)


def test_a_loss_that_is_no_sum_over_tokens_recomputes(rank_pool: GetPool, expected: Callable[..., Expected]) -> None:
    """GSPO has one ratio per row. Where there is room for the logits they are kept."""
    exact = expected("gspo")
    settings = [SETTINGS["auto"], HeadConfig(chunk_tokens=CHUNK_TOKENS)]
    outcomes = run_updates(rank_pool(1), exact.replay, CASES["tp1"], settings)
    assert [outcome.regimes for outcome in outcomes] == [{"recompute"}, {"keep"}]
    for outcome in outcomes:
        assert_same_update(outcome, exact)


def logprobs_of_transformers(path: Path, rows: Sequence[Row]) -> list[np.ndarray]:
    """[R] log-probs of a bfloat16 model on dense float64 softmaxes of its logits, 0 outside the loss mask."""
    model, found = load_hf(path, torch.bfloat16), []
    for row in rows:
        tokens = torch.from_numpy(row.token_ids)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, row.num_prompt_tokens - 1 : -1].double() / TEMPERATURE
        logprobs = logits.log_softmax(-1).gather(1, tokens[row.num_prompt_tokens :, None])[:, 0].numpy()
        found.append(np.where(row.loss_mask, logprobs, 0.0))
    return found


def distance(got: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Largest difference of log-probs."""
    return float(np.abs(np.concatenate(got) - np.concatenate(expected)).max())


@pytest.mark.long
def test_bfloat16(rank_pool: GetPool, expected: Callable[..., Expected]) -> None:
    """As near to float64 as transformers in bfloat16; the regimes see the same logits, and agree."""
    exact = expected(TIED_ALGORITHM, "bfloat16")
    settings = [SETTINGS[memory_mode] for memory_mode in REGIMES]
    outcomes = run_updates(rank_pool(2), exact.replay, CASES["tp2-sp"], settings, "bfloat16")
    error = distance(logprobs_of_transformers(exact.replay.path, exact.replay.rows), exact.step.before)
    print(f"transformers: {error:.2e}")
    for outcome in outcomes:
        assert outcome.metrics["actor/grad_norm"] == pytest.approx(exact.step.grad_norm, rel=2**-7)
        assert_within("log-probs", distance(outcome.before, exact.step.before), 0.0, atol=2 * error)
        assert_within("updated log-probs", distance(outcome.after, exact.after), 0.0, atol=2 * error)
        assert_same_logprobs("actor", outcome.before, outcomes[0].before)
        # Sums of weight gradients differ by float32's errors alone.
        norm = outcomes[0].metrics["actor/grad_norm"]
        assert outcome.metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert distance(exact.after, exact.step.before) > 2 * error
