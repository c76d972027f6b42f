"""Checkpoints of actor and critic: each continues under another layout, apart or together, whatever they were."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from megarl.types.messages import Head, Role, RoleSpec
from tests.helpers.checkpoints import add_value_head
from tests.helpers.critic_ranks import Continued, load_roles, save_roles
from tests.helpers.rank_pool import RankPool
from tests.helpers.rows import random_rows

pytestmark = pytest.mark.long

Pools: TypeAlias = Callable[[int], RankPool]

ROWS = [
    row.with_quantities(returns=np.where(row.loss_mask, np.float32(i % 3), np.float32(0)))
    for i, row in enumerate(random_rows([(5, 12), (3, 20), (9, 7), (4, 15), (6, 18), (2, 9), (8, 14), (7, 11)]))
]
TP2, DP2, PP2 = LayoutConfig(tp=2, sequence_parallel=True), LayoutConfig(dp=2), LayoutConfig(pp=2)


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[Role, Path]:
    path = checkpoint(tied=True)
    return {Role.ACTOR: path, Role.CRITIC: add_value_head(path, tmp_path_factory.mktemp("critic"))}


def specs(models: dict[Role, Path], layout: LayoutConfig, *roles: Role) -> list[RoleSpec]:
    settings = ActorConfig(layout=layout, optimizer=OptimizerConfig(lr=1e-2), micro_batch_tokens=64)
    return [
        RoleSpec(
            role=role,
            model=ModelConfig(path=str(models[role]), dtype="float32"),
            settings=settings,
            head=Head.SCALAR if role is Role.CRITIC else Head.LM,
        )
        for role in roles
    ]


def losses(results: Sequence[Continued], role: Role) -> list[float]:
    """Of both steps; the ranks that report agree."""
    (history,) = {tuple(result.losses[role]) for result in results if role in result.losses}
    assert len(history) == 2
    return list(history)


def test_roles_that_shared_processes_continue_apart(rank_pool: Pools, models: dict[Role, Path], tmp_path: Path) -> None:
    pool, directory = rank_pool(2), str(tmp_path)
    saved = pool.run(save_roles, specs(models, TP2, Role.ACTOR, Role.CRITIC), ROWS, directory, num_drawn=1)
    together = pool.run(
        load_roles, specs(models, TP2, Role.ACTOR, Role.CRITIC), ROWS, directory, [Role.ACTOR, Role.CRITIC]
    )
    assert together == saved
    # The actor stays as it was, random numbers too; the critic gets processes and a layout of its own.
    actor = pool.run(load_roles, specs(models, TP2, Role.ACTOR), ROWS, directory, [Role.ACTOR])
    assert losses(actor, Role.ACTOR) == losses(saved, Role.ACTOR)
    assert [result.drawn for result in actor] == [result.drawn for result in saved]
    for layout in (DP2, PP2):
        critic = pool.run(load_roles, specs(models, layout, Role.CRITIC), ROWS, directory, [Role.ACTOR])
        assert losses(critic, Role.CRITIC) == pytest.approx(losses(saved, Role.CRITIC), rel=1e-6)
        assert critic[0].drawn != saved[0].drawn


def test_roles_that_were_apart_continue_together(rank_pool: Pools, models: dict[Role, Path], tmp_path: Path) -> None:
    """As groups of processes do, both write into one directory; the generators are those of the role that stays."""
    pool, directory = rank_pool(2), str(tmp_path)
    actor = pool.run(save_roles, specs(models, TP2, Role.ACTOR), ROWS, directory, num_drawn=1)
    critic = pool.run(save_roles, specs(models, PP2, Role.CRITIC), ROWS, directory, num_drawn=2)
    for layout, same in ((TP2, Role.ACTOR), (PP2, Role.CRITIC)):
        merged = pool.run(load_roles, specs(models, layout, Role.ACTOR, Role.CRITIC), ROWS, directory, [same])
        assert losses(merged, Role.ACTOR) == pytest.approx(losses(actor, Role.ACTOR), rel=1e-6)
        assert losses(merged, Role.CRITIC) == pytest.approx(losses(critic, Role.CRITIC), rel=1e-6)
        stays = actor if same is Role.ACTOR else critic
        assert [result.drawn for result in merged] == [result.drawn for result in stays]
