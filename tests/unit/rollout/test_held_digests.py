"""The digests of weights by which a failed canary says what an engine held."""

from types import SimpleNamespace
from typing import Any

import torch

from megarl.rollout.worker_extension import WeightReceiver
from megarl.weights.slices import checksum


class Packed(torch.nn.Module):
    """As vLLM's layers on CPUs, whose kernels keep the weight; two tensors of the checkpoint make it up."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0))
        self.input_size, self.output_partition_sizes = weight.shape[1], [3, 1]
        self.cpu_linear = lambda x, _weight, bias: x @ weight.t()


class WithAdapters(torch.nn.Module):
    """As vLLM's layers with adapters: it passes questions for other attributes on."""

    def __init__(self, layer: torch.nn.Module, adapters: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.base_layer, self.lora_a_stacked = layer, adapters

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_layer, name)


def test_packed_weights_and_adapters_have_digests_by_part() -> None:
    weight, adapter = torch.randn(4, 5), torch.randn(1, 2)
    model = torch.nn.ModuleDict({"qkv": WithAdapters(Packed(weight), (adapter,)), "norm": torch.nn.LayerNorm(2)})
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    digests = WeightReceiver.held_digests(worker)  # type: ignore[arg-type]
    expected = {
        "qkv.lora_a_stacked.0": adapter,
        "qkv.base_layer.weight.0": weight[:3],
        "qkv.base_layer.weight.1": weight[3:],
        "norm.weight": torch.ones(2),
        "norm.bias": torch.zeros(2),
    }
    assert digests == {name: checksum(each, (), tuple(each.shape)) for name, each in expected.items()}
