"""A teacher that follows the actor: its weights are the moving average, also after a checkpoint and elsewhere."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.config.lora import LoraConfig
from megarl.types.messages import Role, RoleSpec, UpdateRequest
from megarl.weights.adapters import adapter_spec
from megarl.weights.families import read_model_spec
from tests.distributed.test_adapters import LORA, write_adapters
from tests.distributed.test_distill import asks_hinted, hinted, taught_rows
from tests.helpers.average_ranks import AverageCase, Followed, Slices, follow
from tests.helpers.expert_checkpoint import make_moe
from tests.helpers.family_parity import split_rows
from tests.helpers.layout_training import LAYOUTS, Pools, trained_role

RATE, STEPS = 0.3, 3
Shapes = dict[str, tuple[int, ...]]


def roles_of(
    model: Path, layout: str, *, dtype: str = "float32", rate: float = RATE, lora: LoraConfig | None = None
) -> tuple[RoleSpec, RoleSpec]:
    actor = trained_role(model, LAYOUTS[layout], 60)
    actor = replace(
        actor,
        model=replace(actor.model, dtype=dtype),
        settings=replace(actor.settings, lora=lora),  # type: ignore[arg-type]
    )
    base = None if lora is None else Role.ACTOR
    return actor, replace(actor, role=Role.TEACHER, trainable=False, base_of=base, update_rate=rate)


def updates(rows: Sequence[object], role: Role, count: int) -> list[UpdateRequest]:
    """Updates with the reverse KL from a teacher that reads hints."""
    return [replace(asks_hinted(rows, role)[0], lr=1e-2) for _ in range(count)]  # type: ignore[arg-type]


def case_of(roles: tuple[RoleSpec, ...], teacher: Role = Role.TEACHER, count: int = STEPS) -> AverageCase:
    rows = hinted(taught_rows())
    return AverageCase(
        roles=roles,
        rows=rows,
        micro_batches=split_rows(4, roles[0].layout.dp),
        requests=updates(rows, teacher, count),
    )


def whole(by_rank: Sequence[Slices], shapes: Shapes) -> dict[str, torch.Tensor]:
    full = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for name, index, values in (each for rank in by_rank for each in rank):
        full[name][index] = values.reshape(full[name][index].shape)
    assert not any(tensor.isnan().any() for tensor in full.values())
    return full


def history(by_rank: Sequence[Followed], role: str, shapes: Shapes) -> list[dict[str, torch.Tensor]]:
    steps = [getattr(each, role) for each in by_rank]
    return [whole(ranks, shapes) for ranks in zip(*steps, strict=True)]


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def assert_follows(by_rank: Sequence[Followed], shapes: Shapes) -> None:
    """The teacher is the average of the actor's weights, by plain torch in float64, and so is its distance."""
    actor, teacher = history(by_rank, "actor", shapes), history(by_rank, "teacher", shapes)
    assert_same(teacher[0], actor[0])
    expected = {name: tensor.double() for name, tensor in actor[0].items()}
    reported = next(each.metrics for each in by_rank if each.metrics)
    for step, metrics in enumerate(reported, start=1):
        for name, tensor in expected.items():
            tensor.mul_(1 - RATE).add_(actor[step][name].double(), alpha=RATE)
            torch.testing.assert_close(teacher[step][name].double(), tensor, rtol=1e-6, atol=1e-9)
        apart = sum(float((actor[step][name].double() - tensor).square().sum()) for name, tensor in expected.items())
        size = sum(float(tensor.double().square().sum()) for tensor in actor[step].values())
        assert metrics["distill/teacher_distance"] == pytest.approx((apart / size) ** 0.5, rel=1e-4)
        assert metrics["distill/teacher_distance"] > 1e-4
    # After it was away from the device.
    assert_same(teacher[-1], teacher[-2])


@pytest.mark.parametrize(
    ("layout", "dtype", "tied", "other"),
    [
        pytest.param("tp2-sp", "bfloat16", True, None),
        pytest.param("tp2-sp", "float32", False, "pp2", marks=pytest.mark.long),
        pytest.param("dp2", "bfloat16", False, "tp2-sp", marks=pytest.mark.long),
        pytest.param("pp2", "bfloat16", True, "dp2", marks=pytest.mark.long),
        pytest.param("cp2", "float32", True, "pp2", marks=pytest.mark.long),
    ],
)
def test_a_teacher_is_the_average_of_the_actor_and_resumes_to_the_bit(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path, layout: str, dtype: str, tied: bool, other: str
) -> None:
    model, pool = checkpoint(tied=tied), rank_pool(2)
    shapes = read_model_spec(model).expected_tensors()
    case = replace(case_of(roles_of(model, layout, dtype=dtype)), directory=str(tmp_path), save_after=STEPS - 2)
    by_rank = pool.run(follow, case)
    assert_follows(by_rank, shapes)
    for each in by_rank:
        # The average in float32 beside weights of 2 bytes.
        assert each.freed == each.own * (3 if dtype == "bfloat16" else 1)
    expected = history(by_rank, "teacher", shapes)
    loaded = replace(case, requests=case.requests[-1:], save_after=None, loads=True)
    again = history(pool.run(follow, loaded), "teacher", shapes)
    assert_same(again[0], expected[STEPS - 1])
    assert_same(again[1], expected[STEPS])
    if other is not None:
        moved = replace(
            loaded,
            roles=roles_of(model, other, dtype=dtype),
            requests=(),
            micro_batches=split_rows(4, LAYOUTS[other].dp),
        )
        assert_same(history(pool.run(follow, moved), "teacher", shapes)[0], expected[STEPS - 1])


def test_weights_that_move_all_the_way_every_second_step(rank_pool: Pools, checkpoint: Callable[..., Path]) -> None:
    """As a reference that is reset; in the steps between, it stays."""
    model = checkpoint(tied=True)
    actor, other = roles_of(model, "tp2-sp", rate=1.0)
    case = case_of((actor, replace(other, update_every=2)), count=5)
    case = replace(case, requests=[replace(each, step=step) for step, each in enumerate(case.requests, start=1)])
    by_rank, shapes = rank_pool(2).run(follow, case), read_model_spec(model).expected_tensors()
    policy, follower = (history(by_rank, role, shapes) for role in ("actor", "teacher"))
    for step, taken in enumerate((0, 0, 2, 2, 4, 4)):
        assert_same(follower[step], policy[taken])
    assert not torch.equal(policy[2]["model.norm.weight"], policy[4]["model.norm.weight"])


@pytest.mark.long
@pytest.mark.parametrize(("layout", "other"), [("tp2-sp", "pp2"), ("dp2", "tp2-sp")])
def test_with_adapters_these_alone_are_averaged(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path, layout: str, other: str
) -> None:
    model, pool = checkpoint(tied=False), rank_pool(2)
    write_adapters(tmp_path / "adapters", model)
    lora = LoraConfig(**LORA, path=str(tmp_path / "adapters"))  # type: ignore[arg-type]
    shapes = adapter_spec(read_model_spec(model), lora).expected_tensors()
    case = case_of(roles_of(model, layout, dtype="bfloat16", lora=lora))
    case = replace(case, directory=str(tmp_path / "saved"), save_after=STEPS - 2)
    by_rank = pool.run(follow, case)
    assert_follows(by_rank, shapes)
    assert all(0 < each.freed < each.own / 2 for each in by_rank)
    expected = history(by_rank, "teacher", shapes)
    loaded = replace(case, requests=case.requests[-1:], save_after=None, loads=True)
    assert_same(history(pool.run(follow, loaded), "teacher", shapes)[1], expected[STEPS])
    moved = replace(
        loaded,
        roles=roles_of(model, other, dtype="bfloat16", lora=lora),
        requests=(),
        micro_batches=split_rows(4, LAYOUTS[other].dp),
    )
    assert_same(history(pool.run(follow, moved), "teacher", shapes)[0], expected[STEPS - 1])


@pytest.mark.long
def test_experts_are_averaged_too(rank_pool: Pools, tmp_path: Path) -> None:
    model = make_moe(tmp_path / "experts", seed=5)
    by_rank = rank_pool(2).run(follow, case_of(roles_of(model, "tp2-sp", dtype="bfloat16")))
    assert_follows(by_rank, read_model_spec(model).expected_tensors())


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_rate_1_the_teacher_is_the_actor_itself_to_the_bit(
    rank_pool: Pools, checkpoint: Callable[..., Path], dtype: str
) -> None:
    model, pool = checkpoint(tied=True), rank_pool(2)
    shapes, roles = read_model_spec(model).expected_tensors(), roles_of(model, "tp2-sp", dtype=dtype, rate=1.0)
    apart = pool.run(follow, case_of(roles))
    itself = pool.run(follow, case_of(roles[:1], Role.ACTOR))
    for got, expected in zip(history(apart, "actor", shapes), history(itself, "actor", shapes), strict=True):
        assert_same(got, expected)
    for got, expected in zip(apart[0].metrics, itself[0].metrics, strict=True):
        assert got["distill/loss"] == expected["distill/loss"] > 0
        assert got["distill/teacher_distance"] == 0
