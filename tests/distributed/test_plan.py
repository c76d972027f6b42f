"""The plan's parameters and bytes against what real ranks hold."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from megarl.plan.memory import DTYPE_BYTES, gradient_bytes, optimizer_bytes, weight_bytes
from megarl.types.messages import Part
from megarl.weights.families import read_model_spec
from megarl.weights.shards import num_stage_parameters
from tests.helpers.plan_ranks import measure_held
from tests.helpers.rank_pool import RankPool
from tests.helpers.rows import random_rows

pytestmark = pytest.mark.long

# Megatron's buffers start parameters and end buckets at multiples: some hundred elements of the tens of thousands.
PADDING = 0.02


@pytest.mark.parametrize(
    ("layout", "tied", "dtype", "distributed"),
    [
        (LayoutConfig(tp=2, sequence_parallel=True), True, "float32", True),
        (LayoutConfig(pp=2), True, "float32", True),
        (LayoutConfig(pp=2), False, "bfloat16", True),
        (LayoutConfig(dp=2), False, "bfloat16", True),
        (LayoutConfig(dp=2), True, "bfloat16", False),
        (LayoutConfig(cp=2), True, "float32", True),
    ],
    ids=lambda value: str(value).replace("LayoutConfig", "") if isinstance(value, LayoutConfig) else str(value),
)
def test_ranks_hold_what_is_planned(
    rank_pool: Callable[[int], RankPool],
    checkpoint: Callable[..., Path],
    layout: LayoutConfig,
    tied: bool,
    dtype: str,
    distributed: bool,
) -> None:
    path = checkpoint(tied=tied, dtype=dtype)
    actor = ActorConfig(layout=layout, optimizer=OptimizerConfig(distributed=distributed), micro_batch_tokens=64)
    model = ModelConfig(path=str(path), dtype=dtype)  # type: ignore[arg-type]
    held = rank_pool(2).run(measure_held, actor, model, random_rows([(5, 9)] * 4))
    spec, size = read_model_spec(path), DTYPE_BYTES[dtype]
    shards = layout.dp * layout.cp if distributed else 1
    for rank in held:
        count = num_stage_parameters(spec, layout, rank.stage, vocab_multiple=model.vocab_multiple).total
        assert rank.num_parameters == count
        expected = {
            Part.PARAMS: weight_bytes(count, size),
            Part.GRADS: gradient_bytes(count, size, actor.optimizer),
            Part.OPTIMIZER: optimizer_bytes(count, size, shards, actor.optimizer),
        }
        assert rank.part_bytes == pytest.approx(expected, rel=PADDING)
