"""What an update with adapters leaves out: products and memory for weights that stay as they are."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megarl.config.lora import LoraConfig
from megarl.config.schema import ActorConfig, HeadConfig, LayoutConfig, ModelConfig
from megarl.types import Row
from megarl.types.messages import Role, UpdateRequest
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankContext, RankPool
from tests.helpers.ranks import load_worker
from tests.helpers.requests import update_request, with_advantages
from tests.helpers.rows import random_rows

RANK = 3
GetPool = Callable[[int], RankPool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Shapes of the matrices on a rank by name, those of all products of an update, and elements kept for it."""

    matrices: dict[str, tuple[int, ...]]
    products: set[tuple[int, ...]]
    gradients: int
    moments: int


def update_costs(
    context: RankContext, actor: ActorConfig, model: ModelConfig, rows: list[Row], request: UpdateRequest
) -> Costs:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    products = set[tuple[int, ...]]()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm"):
                products.add(tuple(out.shape))
            return out

    worker = load_worker(context, actor, model)
    with Recorder():
        worker.update(rows, [list(range(len(rows)))], request)
    loaded = worker.roles[Role.ACTOR]
    parameters = dict(loaded.chunks[0].named_parameters())
    buffers = [each for ddp in loaded.ddp for each in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    inner = [each.optimizer for each in getattr(loaded.optimizer, "chained_optimizers", [loaded.optimizer])]
    states = [each for optimizer in inner for state in optimizer.state.values() for each in state.values()]
    return Costs(
        matrices={name: tuple(p.shape) for name, p in parameters.items() if p.dim() == 2},
        products=products,
        gradients=sum(buffer.grad_data.numel() for buffer in buffers),
        moments=sum(each.numel() for each in states if isinstance(each, torch.Tensor)),
    )


@pytest.mark.parametrize("memory_mode", ["in_chunk", pytest.param("keep", marks=pytest.mark.long), "recompute"])
def test_frozen_weights_have_neither_gradients_nor_moments(
    rank_pool: GetPool, memory_mode: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    rows = with_advantages(random_rows([(5, 9), (4, 7)]))
    found = {}
    for lora in (None, LoraConfig(rank=RANK)):
        actor = ActorConfig(layout=LayoutConfig(), lora=lora, head=HeadConfig(regime=memory_mode))  # type: ignore[arg-type]
        config = ModelConfig(path=str(model), dtype="float32", vocab_multiple=1)
        found[lora is None] = rank_pool(1).run(update_costs, actor, config, rows, update_request(rows))[0]
    full, adapters = found[True], found[False]
    # Neither a token's product nor an adapter's has the shape of a weight here.
    weights = {shape for name, shape in adapters.matrices.items() if ".lora." not in name}
    assert weights == set(full.matrices.values())
    assert all({shape, shape[::-1]} & full.products for shape in weights)
    assert not {either for shape in weights for either in (shape, shape[::-1])} & adapters.products
    sizes = [math.prod(shape) for name, shape in adapters.matrices.items() if ".lora." in name]
    # Megatron begins each parameter at a multiple of 64 elements, and ends the buffer at one of 128.
    starts = sum(64 * math.ceil(size / 64) for size in sizes)
    assert adapters.gradients == 128 * math.ceil(starts / 128)
    assert adapters.moments == 2 * sum(sizes)
