"""Checkpoints of models with experts continue under other splits of the experts."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, MoeConfig, OptimizerConfig
from tests.helpers.checkpoint_ranks import load_train, train_save_train
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.rows import random_rows

ROWS = random_rows([(5, 12), (3, 20), (9, 7), (4, 15), (6, 18), (2, 9), (8, 14), (7, 11)], holes=False)
EP2 = LayoutConfig(dp=2, ep=2)
OTHERS = {
    "one": LayoutConfig(),
    "tp2-sp ep2": LayoutConfig(tp=2, sequence_parallel=True, ep=2),
    "tp2-sp etp2": LayoutConfig(tp=2, sequence_parallel=True, etp=2),
    "pp2": LayoutConfig(pp=2),
}
History = list[tuple[float, float]]


def actor_config(layout: LayoutConfig, moe: MoeConfig) -> ActorConfig:
    return ActorConfig(layout=layout, optimizer=OptimizerConfig(lr=1e-3), moe=moe, micro_batch_tokens=64)


def history_of(results: Sequence[History]) -> History:
    (history,) = {tuple(history) for history in results if history}
    return list(history)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "freeze_router"),
    # Layers that checkpoints stack, then layers of two kinds.
    [("mixtral", False), ("qwen3_moe-mixed", True), ("deepseek_v3", False)],
)
def test_experts_continue_over_other_ranks(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, name: str, freeze_router: bool
) -> None:
    path = make_model(tmp_path / "model", name, tied=False, num_hidden_layers=4)
    model = ModelConfig(path=str(path), dtype="float32")
    moe, saved = MoeConfig(aux_loss_coef=0.01, freeze_router=freeze_router), tmp_path / "saved"

    def load(layout: LayoutConfig, *, same_layout: bool) -> History:
        actor, pool = actor_config(layout, moe), rank_pool(layout.world_size)
        return history_of(pool.run(load_train, actor, model, ROWS, str(saved), same_layout=same_layout))

    expected = history_of(
        rank_pool(2).run(train_save_train, actor_config(EP2, moe), model, ROWS, str(saved), portable=True)
    )
    assert load(EP2, same_layout=True) == expected
    for layout in OTHERS.values():
        for step, want in zip(load(layout, same_layout=False), expected, strict=True):
            assert step == pytest.approx(want, rel=1e-6)
