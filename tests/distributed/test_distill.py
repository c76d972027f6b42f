"""Distillation through the workers of every layout: from samples as k2 in the loss, over the vocabulary as float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.algos.build import build_algorithm
from megarl.config.algo import AdvantageConfig, AlgoConfig, DistillConfig, KLConfig
from megarl.config.lora import LoraConfig
from megarl.config.schema import HeadConfig, LayoutConfig
from megarl.train.forward import with_advantages
from megarl.types import AlgoState, Reward, Row, scored_batch
from megarl.types.messages import Role, RoleSpec, Teaching, UpdateRequest
from megarl.weights.families import read_model_spec
from tests.distributed.test_adapters import LORA, write_adapters
from tests.helpers.checkpoints import load_hf, make_checkpoint
from tests.helpers.distill_ranks import (
    TEMPERATURE,
    DistillCase,
    assembled,
    likely_tokens,
    teacher_logprobs,
    update_gradients,
)
from tests.helpers.expert_checkpoint import make_moe
from tests.helpers.family_parity import split_rows
from tests.helpers.layout_training import LAYOUTS, Pools, trained_role
from tests.helpers.rows import random_rows

ALONE = AdvantageConfig(estimator="none")
SAMPLED = AlgoConfig(advantage=ALONE, distill=DistillConfig(teacher="model", coef=0.5))
BETA = 0.3
DIVERGENCES = ("reverse", "forward", "jsd")
# Every rank has a part of the hidden states, of the vocabulary and of the gradients' sums.
QUICK = ("tp2-sp", "in_chunk")
K2 = AlgoConfig(kl=KLConfig(where="loss", estimator="k2", coef=0.5))


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the policies' vocabulary and weights of its own, three layers deep."""
    return make_checkpoint(tmp_path_factory.mktemp("teacher"), tied=True, seed=5, num_layers=4)


def roles_of(student: Path, teacher: Path, layout: LayoutConfig) -> tuple[RoleSpec, ...]:
    actor = trained_role(student, layout, 60)
    # Whole gradients on every replica.
    settings = replace(actor.settings, optimizer=replace(actor.settings.optimizer, distributed=False))
    teaching = trained_role(teacher, layout, 60, role=Role.TEACHER, trainable=False)
    return replace(actor, settings=settings), teaching


def request_of(cfg: AlgoConfig, rows: Sequence[Row]) -> UpdateRequest:
    algorithm = build_algorithm(cfg, max_response_tokens=64)
    return UpdateRequest(
        step=1,
        objective=algorithm,
        state=algorithm.initial_state(),
        denominators=algorithm.denominators(rows),
        temperature=TEMPERATURE,
        lr=1e-3,
        teaching=teaching_of(cfg.distill),
    )


def dense(divergence: str, mode: str = "exact") -> AlgoConfig:
    beta = BETA if divergence == "jsd" else 0.5
    distill = DistillConfig(teacher="model", mode=mode, divergence=divergence, beta=beta)  # type: ignore[arg-type]
    return AlgoConfig(advantage=ALONE, distill=distill)


def teaching_of(cfg: DistillConfig) -> Teaching | None:
    if not cfg.is_dense:
        return None
    role = Role.TEACHER if cfg.mode == "exact" else None
    return Teaching(role=role, divergence=cfg.divergence, beta=cfg.beta, reads_hints=cfg.teacher == "hint")


def taught_rows() -> list[Row]:
    """Rows of a step without rewards."""
    rows = random_rows([(3, 9), (5, 14), (2, 6), (8, 20)], seed=4)
    algorithm = build_algorithm(SAMPLED, max_response_tokens=64)
    rows = [row.with_quantities(teacher_logprobs=np.zeros(row.num_response_tokens, np.float32)) for row in rows]
    batch = scored_batch(rows, [Reward(score=0.0, correct=False)] * len(rows))
    return with_advantages(rows, algorithm.advantages(batch, AlgoState()))


@pytest.mark.parametrize(
    "name", ["tp2-sp", pytest.param("cp2", marks=pytest.mark.long), pytest.param("dp2", marks=pytest.mark.long)]
)
def test_log_ratios_of_samples_have_the_gradient_of_k2(
    rank_pool: Pools, checkpoint: Callable[..., Path], teacher: Path, name: str
) -> None:
    layout, student = LAYOUTS[name], checkpoint(tied=True)
    rows, pool = taught_rows(), rank_pool(LAYOUTS[name].world_size)
    case = DistillCase(roles=roles_of(student, teacher, layout), rows=rows, micro_batches=split_rows(4, layout.dp))
    said = {i: values for rank in pool.run(teacher_logprobs, case) for i, values in rank.items()}
    rows = [row.with_quantities(teacher_logprobs=said[i], ref_logprobs=said[i]) for i, row in enumerate(rows)]
    case = replace(case, rows=rows, requests=[request_of(cfg, rows) for cfg in (SAMPLED, K2)])
    shapes = read_model_spec(student).expected_tensors()
    by_rank = pool.run(update_gradients, case)
    sampled, k2 = (assembled([rank[i] for rank in by_rank], shapes) for i in range(2))
    assert max(g.abs().max().item() for g in k2.values()) > 1e-3
    error = max((sampled[n] - k2[n]).abs().max().item() for n in k2)
    assert error <= 1e-7, f"max |Δ gradient| is {error:.1e}"


def dense_gradients(
    student: Path, teacher: Path, rows: Sequence[Row], divergence: str, beta: float
) -> dict[str, torch.Tensor]:
    """Gradients of the mean divergence over loss tokens, by transformers and autograd in float64."""
    policy, other = load_hf(student, torch.float64), load_hf(teacher, torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        tokens, kept = torch.from_numpy(row.token_ids)[None], torch.from_numpy(row.loss_mask)
        places = slice(row.num_prompt_tokens - 1, -1)
        log_p = (policy(tokens).logits[0, places][kept] / TEMPERATURE).log_softmax(-1)
        with torch.no_grad():
            read = row.as_taught
            places = slice(read.num_prompt_tokens - 1, -1)
            logits = other(torch.from_numpy(read.token_ids)[None]).logits
            log_q = (logits[0, places][kept] / TEMPERATURE).log_softmax(-1)
        if divergence == "reverse":
            value = log_p.exp() * (log_p - log_q)
        elif divergence == "forward":
            value = log_q.exp() * (log_q - log_p)
        else:
            log_m = ((1 - beta) * log_p.exp() + beta * log_q.exp()).log()
            value = (1 - beta) * log_p.exp() * (log_p - log_m) + beta * log_q.exp() * (log_q - log_m)
        total = total + value.sum()
    (total / sum(row.num_loss_tokens for row in rows)).backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


EXACT_LAYOUTS = {
    "tp2": LayoutConfig(tp=2),
    **{name: LAYOUTS[name] for name in ("tp2-sp", "cp2", "pp2")},
}
EXACT_CASES = [
    pytest.param(
        name, memory_mode, id=f"{name} {memory_mode}", marks=() if (name, memory_mode) == QUICK else pytest.mark.long
    )
    for name in EXACT_LAYOUTS
    for memory_mode in ("recompute", "keep", "in_chunk")
]


@pytest.mark.parametrize(("name", "memory_mode"), EXACT_CASES)
def test_divergences_over_the_vocabulary_have_the_gradients_of_float64(
    rank_pool: Pools, checkpoint: Callable[..., Path], teacher: Path, name: str, memory_mode: str
) -> None:
    layout, student = EXACT_LAYOUTS[name], checkpoint(tied=False)
    rows, pool = taught_rows(), rank_pool(layout.world_size)
    actor, teaching = roles_of(student, teacher, layout)
    head = HeadConfig(regime=memory_mode, chunk_tokens=5)  # type: ignore[arg-type]
    actor = replace(actor, settings=replace(actor.settings, head=head))
    case = DistillCase(
        roles=(actor, teaching),
        rows=rows,
        micro_batches=split_rows(4, layout.dp),
        requests=[request_of(dense(divergence), rows) for divergence in DIVERGENCES],
    )
    shapes = read_model_spec(student).expected_tensors()
    by_rank = pool.run(update_gradients, case)
    for i, divergence in enumerate(DIVERGENCES):
        found = assembled([rank[i] for rank in by_rank], shapes)
        expected = dense_gradients(student, teacher, rows, divergence, BETA)
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        error = max((found[n] - expected[n]).abs().max().item() for n in expected) / largest
        assert error <= 1e-5, f"{divergence}: max |Δ gradient| is {error:.1e} of the largest"


@pytest.mark.long
def test_a_teacher_with_experts_teaches_a_policy_without(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    teacher, student, rows = make_moe(tmp_path / "experts", seed=5), checkpoint(tied=False), taught_rows()
    case = DistillCase(
        roles=roles_of(student, teacher, LAYOUTS["tp2-sp"]),
        rows=rows,
        micro_batches=split_rows(4, 1),
        requests=[request_of(dense("forward"), rows)],
    )
    by_rank = [rank[0] for rank in rank_pool(2).run(update_gradients, case)]
    found = assembled(by_rank, read_model_spec(student).expected_tensors())
    expected = dense_gradients(student, teacher, rows, "forward", BETA)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    error = max((found[n] - expected[n]).abs().max().item() for n in expected) / largest
    assert error <= 1e-5, f"max |Δ gradient| is {error:.1e} of the largest"


@pytest.mark.parametrize("name", ["cp2", pytest.param("tp2-sp", marks=pytest.mark.long)])
def test_the_likeliest_of_all_tokens_teach_as_the_whole_distribution(
    rank_pool: Pools, checkpoint: Callable[..., Path], teacher: Path, name: str
) -> None:
    layout, student = LAYOUTS[name], checkpoint(tied=False)
    rows, pool, spec = taught_rows(), rank_pool(layout.world_size), read_model_spec(student)
    roles, batches = roles_of(student, teacher, layout), split_rows(4, layout.dp)
    case = DistillCase(roles=roles, rows=rows, micro_batches=batches)
    said = {i: each for rank in pool.run(likely_tokens, case, spec.dims.vocab) for i, each in rank.items()}
    rows = [replace(row, likely=said[i]) for i, row in enumerate(rows)]
    requests = [request_of(dense(d, mode), rows) for d in DIVERGENCES for mode in ("topk", "exact")]
    by_rank = pool.run(update_gradients, replace(case, rows=rows, requests=requests))
    for i, divergence in enumerate(DIVERGENCES):
        top, exact = (assembled([rank[2 * i + k] for rank in by_rank], spec.expected_tensors()) for k in range(2))
        error = max((top[n] - exact[n]).abs().max().item() for n in exact)
        error /= max(gradient.abs().max().item() for gradient in exact.values())
        assert error <= 1e-5, f"{divergence}: max |Δ gradient| is {error:.1e} of the largest"
    metrics = by_rank[0][0].metrics
    assert metrics["distill/mass_in_top_k"] == pytest.approx(1.0, abs=1e-5)
    for what in ("loss", "reverse_kl", "forward_kl", "teacher_entropy", "agreement"):
        assert metrics[f"distill/{what}"] == pytest.approx(by_rank[0][1].metrics[f"distill/{what}"], rel=1e-4), what


def hinted(rows: Sequence[Row]) -> list[Row]:
    """The rows with prompts of other lengths for their teacher, in all but one."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(1, 60, count).astype(np.int32) for count in (11, 4, 9)]
    return [*(row.with_hinted_prompt(prompt) for row, prompt in zip(rows, prompts, strict=False)), rows[3]]


def asks_hinted(rows: Sequence[Row], role: Role) -> list[UpdateRequest]:
    """Updates with each divergence from a teacher that reads hints."""
    requests = []
    for divergence in DIVERGENCES:
        cfg = dense(divergence)
        request = request_of(replace(cfg, distill=replace(cfg.distill, teacher="hint")), rows)
        assert request.teaching is not None
        requests.append(replace(request, teaching=replace(request.teaching, role=role)))
    return requests


HINTED_CASES = [
    pytest.param(name, memory_mode, role, id=f"{name} {memory_mode} {role}", marks=marks)
    for name, memory_mode, role, marks in (
        (*QUICK, Role.ACTOR, ()),
        ("tp2", "keep", Role.TEACHER, pytest.mark.long),
        ("tp2-sp", "recompute", Role.TEACHER, pytest.mark.long),
        ("cp2", "in_chunk", Role.ACTOR, pytest.mark.long),
        ("cp2", "keep", Role.TEACHER, pytest.mark.long),
        ("pp2", "in_chunk", Role.ACTOR, pytest.mark.long),
        ("pp2", "recompute", Role.TEACHER, pytest.mark.long),
        ("dp2", "in_chunk", Role.ACTOR, pytest.mark.long),
    )
]


@pytest.mark.parametrize(("name", "memory_mode", "role"), HINTED_CASES)
def test_a_teacher_that_reads_other_prompts_has_the_gradients_of_float64(
    rank_pool: Pools, checkpoint: Callable[..., Path], teacher: Path, name: str, memory_mode: str, role: Role
) -> None:
    layout, student = {**LAYOUTS, **EXACT_LAYOUTS}[name], checkpoint(tied=False)
    rows, pool = hinted(taught_rows()), rank_pool(layout.world_size)
    actor, teaching = roles_of(student, teacher, layout)
    head = HeadConfig(regime=memory_mode, chunk_tokens=5)  # type: ignore[arg-type]
    actor = replace(actor, settings=replace(actor.settings, head=head))
    case = DistillCase(
        roles=(actor,) if role is Role.ACTOR else (actor, teaching),
        rows=rows,
        micro_batches=split_rows(4, layout.dp),
        requests=asks_hinted(rows, role),
    )
    shapes = read_model_spec(student).expected_tensors()
    by_rank = pool.run(update_gradients, case)
    for i, divergence in enumerate(DIVERGENCES):
        found = assembled([rank[i] for rank in by_rank], shapes)
        expected = dense_gradients(student, student if role is Role.ACTOR else teacher, rows, divergence, BETA)
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        error = max((found[n] - expected[n]).abs().max().item() for n in expected) / largest
        assert largest > 1e-3
        assert error <= 1e-5, f"{divergence}: max |Δ gradient| is {error:.1e} of the largest"


@pytest.mark.long
@pytest.mark.parametrize("name", ["tp2-sp", "pp2"])
def test_a_policy_without_its_adapters_teaches_as_the_model_that_it_began_with(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    layout, model, rows = LAYOUTS[name], checkpoint(tied=False), hinted(taught_rows())
    write_adapters(tmp_path / "actor", model)
    actor, apart = roles_of(model, model, layout)
    lora = LoraConfig(**LORA, path=str(tmp_path / "actor"))  # type: ignore[arg-type]
    actor = replace(actor, settings=replace(actor.settings, lora=lora))
    shared = replace(apart, model=actor.model, base_of=Role.ACTOR)
    pool, metrics = rank_pool(layout.world_size), list[dict[str, float]]()
    for roles, role in (((actor, apart), Role.TEACHER), ((actor, shared), Role.TEACHER), ((actor,), Role.ACTOR)):
        case = DistillCase(
            roles=roles, rows=rows, micro_batches=split_rows(4, 1), requests=asks_hinted(rows, role), with_slices=False
        )
        # Of the last stage.
        metrics.append(pool.run(update_gradients, case)[-1][0].metrics)
    separate, base, itself = (each["distill/loss"] for each in metrics)
    assert base == pytest.approx(separate, rel=1e-6)
    assert abs(itself - separate) > 1e-3


@pytest.mark.parametrize("name", ["tp2-sp", pytest.param("pp2", marks=pytest.mark.long)])
def test_a_policy_that_reads_no_hint_learns_nothing_of_itself(
    rank_pool: Pools, checkpoint: Callable[..., Path], name: str
) -> None:
    layout, rows = LAYOUTS[name], taught_rows()
    rows = [row.with_hinted_prompt(row.token_ids[: row.num_prompt_tokens]) for row in rows]
    case = DistillCase(
        roles=roles_of(checkpoint(tied=False), checkpoint(tied=False), layout)[:1],
        rows=rows,
        micro_batches=split_rows(4, 1),
        requests=asks_hinted(rows, Role.ACTOR),
    )
    for found in (each for rank in rank_pool(2).run(update_gradients, case) for each in rank):
        assert max(values.abs().max().item() for _, _, values in found.slices) == 0


def test_a_policy_learns_nothing_of_itself(rank_pool: Pools, checkpoint: Callable[..., Path]) -> None:
    layout, student, rows = LAYOUTS["tp2-sp"], checkpoint(tied=False), taught_rows()
    case = DistillCase(
        roles=roles_of(student, student, layout),
        rows=rows,
        micro_batches=split_rows(4, 1),
        requests=[request_of(dense(divergence), rows) for divergence in DIVERGENCES],
    )
    for found in (each for rank in rank_pool(2).run(update_gradients, case) for each in rank):
        assert max(values.abs().max().item() for _, _, values in found.slices) == 0
        assert found.metrics["distill/loss"] == 0
        assert found.metrics["distill/agreement"] == 1
