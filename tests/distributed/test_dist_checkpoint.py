"""A checkpoint continues training: bit for bit under the layout that wrote it, to rounding under another one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model
from tests.helpers.checkpoint_ranks import (
    count_gathered,
    load_attacked,
    load_train,
    save_with_file_limit,
    save_with_slow_writer,
    train_save_train,
)
from tests.helpers.hf_models import make_model
from tests.helpers.hostile_pickles import ATTACKS
from tests.helpers.rank_pool import RankError, RankPool
from tests.helpers.rows import random_rows

Pools: TypeAlias = Callable[[int], RankPool]
History: TypeAlias = list[tuple[float, float]]

ROWS = random_rows([(5, 12), (3, 20), (9, 7), (4, 15), (6, 18), (2, 9), (8, 14), (7, 11)], holes=False)
TP2_DP2 = LayoutConfig(tp=2, dp=2, sequence_parallel=True)
TP2 = LayoutConfig(tp=2)
# Two ranks share a key/value head.
TP4 = LayoutConfig(tp=4, sequence_parallel=True)
DP2 = LayoutConfig(dp=2)
PP2 = LayoutConfig(pp=2)
ONE = LayoutConfig()


def actor_config(layout: LayoutConfig, *, distributed: bool = True) -> ActorConfig:
    optimizer = OptimizerConfig(lr=1e-2, distributed=distributed)
    return ActorConfig(layout=layout, optimizer=optimizer, micro_batch_tokens=64)


def history_of(results: Sequence[History]) -> History:
    """(loss, gradient norm) per step; the ranks that report agree."""
    (history,) = {tuple(history) for history in results if history}
    assert len(history) == 3
    return list(history)


def save(pools: Pools, actor: ActorConfig, model: ModelConfig, directory: Path, *, portable: bool = False) -> History:
    """Write a checkpoint after step 3 while steps 4 to 6 run; their history."""
    pool = pools(actor.layout.world_size)
    return history_of(pool.run(train_save_train, actor, model, ROWS, str(directory), portable=portable))


def load(pools: Pools, actor: ActorConfig, model: ModelConfig, directory: Path, *, same_layout: bool) -> History:
    pool = pools(actor.layout.world_size)
    return history_of(pool.run(load_train, actor, model, ROWS, str(directory), same_layout=same_layout))


def assert_close(got: History, expected: History) -> None:
    for step, want in zip(got, expected, strict=True):
        assert step == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
def test_tp2_dp2_continues_itself_and_as_pp2(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path, tied: bool
) -> None:
    model = ModelConfig(path=str(checkpoint(tied=tied)), dtype="float32")
    expected = save(rank_pool, actor_config(TP2_DP2), model, tmp_path, portable=True)
    assert load(rank_pool, actor_config(TP2_DP2), model, tmp_path, same_layout=True) == expected
    assert_close(load(rank_pool, actor_config(PP2), model, tmp_path, same_layout=False), expected)


@pytest.mark.long
def test_a_sharded_checkpoint_continues_itself_and_with_fewer_replicas(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """It has the shards as the ranks hold them, so nothing else about the layout may change."""
    model = ModelConfig(path=str(checkpoint(tied=True)), dtype="float32")
    expected = save(rank_pool, actor_config(TP2_DP2), model, tmp_path)
    assert load(rank_pool, actor_config(TP2_DP2), model, tmp_path, same_layout=True) == expected
    assert_close(load(rank_pool, actor_config(TP2), model, tmp_path, same_layout=False), expected)


@pytest.mark.parametrize("portable", [True, pytest.param(False, marks=pytest.mark.long)])
def test_stages_that_share_an_embedding_continue_themselves_and_as_one_rank(
    rank_pool: Pools, tmp_path: Path, portable: bool
) -> None:
    """The embedding has a bucket of its own, before which there is padding, as sizes are no multiples of 64."""
    model = ModelConfig(path=str(make_model(tmp_path / "model", "qwen3", tied=True)), dtype="float32")
    actor = actor_config(LayoutConfig(tp=2, pp=2, first_stage_layers=3, sequence_parallel=True))
    expected = save(rank_pool, actor, model, tmp_path, portable=portable)
    assert load(rank_pool, actor, model, tmp_path, same_layout=True) == expected
    if portable:
        assert_close(load(rank_pool, actor_config(ONE), model, tmp_path, same_layout=False), expected)


def test_only_a_portable_checkpoint_gathers_optimizer_states_and_on_one_rank(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """12 bytes of a parameter: two moments and the main parameter. Buckets are padded to 128 elements per replica."""
    model, pool = ModelConfig(path=str(checkpoint(tied=True)), dtype="bfloat16"), rank_pool(2)
    gathered = []
    for portable in (False, True):
        directory = tmp_path / str(portable)
        directory.mkdir()
        gathered.append(pool.run(count_gathered, actor_config(DP2), model, str(directory), portable=portable))
    (num_parameters, _), _ = gathered[0]
    assert gathered[0] == [(num_parameters, 0)] * 2
    (_, on_first), (_, on_second) = gathered[1]
    assert on_second == 0
    assert 0 <= on_first - 12 * num_parameters < 12 * 4096


def test_ranks_that_share_key_value_heads_continue_themselves_and_as_one_rank(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = ModelConfig(path=str(checkpoint(tied=True)), dtype="float32")
    expected = save(rank_pool, actor_config(TP4), model, tmp_path, portable=True)
    assert load(rank_pool, actor_config(TP4), model, tmp_path, same_layout=True) == expected
    assert_close(load(rank_pool, actor_config(ONE), model, tmp_path, same_layout=False), expected)


@pytest.mark.long
@pytest.mark.parametrize("distributed", [True, False])
def test_one_rank_continues_as_tp2_and_dp2(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path, distributed: bool
) -> None:
    """Vocabulary padding grows with tp: 384 rows on one rank, 512 on two."""
    model = ModelConfig(path=str(checkpoint(tied=False)), dtype="float32")
    actor = actor_config(ONE, distributed=distributed)
    expected = save(rank_pool, actor, model, tmp_path, portable=True)
    assert load(rank_pool, actor, model, tmp_path, same_layout=True) == expected
    for layout in (TP2, DP2):
        other = actor_config(layout, distributed=distributed)
        assert_close(load(rank_pool, other, model, tmp_path, same_layout=False), expected)


@pytest.mark.long
@pytest.mark.parametrize(("num_layers", "pipeline_layout"), [(4, None), (6, "Et|tt|tt|tL")])
def test_virtual_stages_continue_as_plain_ones(
    rank_pool: Pools, tmp_path: Path, num_layers: int, pipeline_layout: str | None
) -> None:
    sizes = TinyModelConfig(
        hidden_size=64, num_layers=num_layers, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=96
    )
    make_tiny_model(tmp_path / "model", sizes, seed=0)
    model = ModelConfig(path=str(tmp_path / "model"), dtype="float32")
    layout = LayoutConfig(pp=2, virtual_pp=2, overlap_p2p=True, pipeline_layout=pipeline_layout)
    virtual, saved = actor_config(layout), tmp_path / "saved"
    expected = save(rank_pool, virtual, model, saved, portable=True)
    assert load(rank_pool, virtual, model, saved, same_layout=True) == expected
    assert_close(load(rank_pool, actor_config(PP2), model, saved, same_layout=False), expected)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"grad_reduce_in_fp32": False}, marks=pytest.mark.long),
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
        pytest.param({"grad_reduce_in_fp32": False, "distributed": False}, marks=pytest.mark.long),
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_replicas_with_other_settings_continue_themselves(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Weights that are on their way when the checkpoint is begun are in it, those of the other replica as well."""
    model = ModelConfig(path=str(checkpoint(tied=False, dtype="bfloat16")), dtype="bfloat16")
    actor = actor_config(DP2)
    actor = replace(actor, optimizer=replace(actor.optimizer, **settings))
    expected = save(rank_pool, actor, model, tmp_path)
    assert load(rank_pool, actor, model, tmp_path, same_layout=True) == expected


@pytest.mark.long
def test_bfloat16_keeps_its_main_parameters(rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Continuing from the bfloat16 weights alone would lose the low bits of the float32 ones."""
    model = ModelConfig(path=str(checkpoint(tied=True, dtype="bfloat16")), dtype="bfloat16")
    expected = save(rank_pool, actor_config(TP2), model, tmp_path)
    assert load(rank_pool, actor_config(TP2), model, tmp_path, same_layout=True) == expected


@pytest.mark.long
@pytest.mark.parametrize("distributed", [True, False])
def test_before_the_first_update(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path, distributed: bool
) -> None:
    """A role that is not updated yet, such as an actor while its critic warms up."""
    model, pool = ModelConfig(path=str(checkpoint(tied=True)), dtype="float32"), rank_pool(1)
    actor = actor_config(ONE, distributed=distributed)
    expected = pool.run(train_save_train, actor, model, ROWS, str(tmp_path), start=0)
    assert pool.run(load_train, actor, model, ROWS, str(tmp_path), same_layout=True, start=0) == expected


@pytest.mark.long
def test_a_write_that_fails_raises(rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The writer is a process of its own; its error must not pass for the end of its work."""
    model = ModelConfig(path=str(checkpoint(tied=True)), dtype="float32")
    with pytest.raises(RankError, match=r"WorkerError: cannot write .*: rank 0: .* check the health of this storage"):
        rank_pool(1).run(save_with_file_limit, actor_config(ONE), model, str(tmp_path), 1 << 16)


def test_a_rank_may_write_for_longer_than_a_collective_may_take(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Those that have written wait for it, but not within one collective operation."""
    model = ModelConfig(path=str(checkpoint(tied=True)), dtype="float32")
    saved = rank_pool(2).run(save_with_slow_writer, actor_config(TP2), model, str(tmp_path), limit_s=6.0, writing_s=9.0)
    assert saved == [True, True]


@pytest.mark.long
def test_a_checkpoint_of_another_model_is_refused(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    tied, untied = (ModelConfig(path=str(checkpoint(tied=tied)), dtype="float32") for tied in (True, False))
    save(rank_pool, actor_config(ONE), tied, tmp_path)
    with pytest.raises(RankError, match=r"output_layer\.weight"):
        load(rank_pool, actor_config(ONE), untied, tmp_path, same_layout=True)


def test_ranks_run_nothing_that_a_checkpoint_names(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Not even where the driver has not looked."""
    model, mark = ModelConfig(path=str(checkpoint(tied=True)), dtype="float32"), tmp_path / "mark"
    (errors,) = rank_pool(1).run(load_attacked, actor_config(ONE), model, str(tmp_path), mark)
    assert not mark.exists()
    # A tensor is read, and dropped before the layers get it.
    assert errors.pop("extra states") == ""
    assert sorted(errors) == sorted(ATTACKS)
    assert [name for name, error in errors.items() if "posix.open" not in error] == []
