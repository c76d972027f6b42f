"""Measure how far an optimizer step moves the weights of each layer."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.host.device.platform import platform
from megarl.parallel.building import named_shards
from megarl.parallel.roles import LoadedRole
from megarl.weights.rules import TOWER
from megarl.weights.tables import Partition

# How many elements of each tensor are looked at, from all over it; of smaller tensors, all are.
NUM_SAMPLED = 1 << 16
# The beginnings of names of parameters outside of layers → what metrics call them.
_OTHERS = {"embedding.": "embedding", "decoder.final_layernorm": "final_norm", TOWER: "vision", "": "head"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSample:
    """A copy of some elements of a weight, or of this rank's shard of it, beside these elements themselves.

    share: the number of elements that each of them stands for; 0 if another rank counts the same elements.
    """

    layer: str
    share: float
    weight: torch.Tensor
    before: torch.Tensor


def sample_weights(loaded: LoadedRole) -> list[WeightSample]:
    """Copy some of the float32 weights that this rank's optimizer updates.

    None are looked at whose float32 form only Transformer Engine's Adam, or the host, has.
    """
    assert loaded.optimizer is not None
    places, samples = _places(loaded), []
    for weight in itertools.chain.from_iterable(group["params"] for group in loaded.optimizer.param_groups):
        size = weight.numel()
        if weight.dtype is not torch.float32 or not size or loaded.spec.settings.optimizer.is_precision_aware:
            continue
        some = weight.detach().view(-1)[:: -(-size // NUM_SAMPLED)]
        layer, counts = places.get(id(weight), ("", False))
        samples.append(WeightSample(layer=layer, share=counts * size / len(some), weight=some, before=some.clone()))
    return samples


def update_ratios(loaded: LoadedRole, samples: Sequence[WeightSample]) -> dict[str, float]:
    """Return ‖change‖ / ‖weights before‖ of each layer's trained weights, over all ranks of the role, as metrics."""
    names = [*(f"layer_{i}" for i in range(loaded.model_spec.dims.num_layers)), *_OTHERS.values()]
    squares = torch.zeros(2, len(names), dtype=torch.float64, device=platform().device())
    for sample in samples:
        if sample.share:
            change = sample.weight - sample.before
            norms = torch.stack([torch.linalg.vector_norm(each) for each in (change, sample.before)])
            squares[:, names.index(sample.layer)] += sample.share * norms.double().square()
    dist.all_reduce(squares)
    pairs = zip(names, *squares.tolist(), strict=True)
    return {f"{loaded.spec.role}/update_ratio/{name}": (moved / whole) ** 0.5 for name, moved, whole in pairs if whole}


def _places(loaded: LoadedRole) -> dict[int, tuple[str, bool]]:
    """Return, by the `id` of what the optimizer updates, the layer's name and whether this rank counts the weight."""
    # With the distributed optimizer, each replica has another part of a shard; it takes parts of float32 weights as
    # views, which no attribute of the weights leads to.
    views: dict[int, torch.Tensor] = {}
    for each in getattr(loaded.optimizer, "chained_optimizers", [loaded.optimizer]):
        groups = (getattr(each, name, ()) for name in ("model_fp32_groups", "shard_fp32_groups"))
        for weight, shard in zip(*map(itertools.chain.from_iterable, groups), strict=True):
            views[id(weight)] = shard
    places = {}
    adapters = [] if loaded.adapters is None else [loaded.adapters]
    for spec in (loaded.model_spec, *adapters):
        for chunk in loaded.chunks:
            layout, count = chunk.layout, spec.dims.dim("experts") // chunk.layout.config.ep
            first = layout.ep_group.rank() * count
            rules = spec.parameter_rules(range(first, first + count))
            for name, _, weight in named_shards(chunk, of_adapters=spec in adapters):
                rule, main = rules[name].rule, getattr(weight, "main_param", None)
                tp, replicas = layout.tp_group, layout.replica_group
                if rules[name].expert is not None:
                    tp, replicas = layout.etp_group, layout.expert_replica_group
                is_part = id(weight) in views or getattr(weight, "main_param_sharded", False)
                counts = (is_part or replicas.rank() == 0) and not spec.is_copy(rule)
                counts = counts and (rule.partition is not Partition.REPLICATED or tp.rank() == 0)
                layer = next(each for start, each in _OTHERS.items() if name.startswith(start))
                if name.startswith("decoder.layers."):
                    layer = f"layer_{name.split('.')[2]}"
                places[id(views.get(id(weight), weight if main is None else main))] = (layer, counts)
    return places
