"""What a worker hands to vLLM's manager of adapters, and that no tensor is left over."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.lora import LoraConfig
from megarl.rollout.engine import ADAPTERS_ID
from megarl.weights.adapters import adapter_spec, peft_config
from megarl.weights.families import read_model_spec
from megarl.weights.peft_files import PREFIX
from tests.helpers.small_model import write_config
from tests.unit.plan.test_experts import EXPERTS


class Manager:
    """Notes what it is told. modules: the layers that have room for adapters."""

    def __init__(self, modules: set[str]) -> None:
        self.modules, self.model = dict.fromkeys(modules), SimpleNamespace()
        self.calls, self.scales = list[tuple[str, int]](), dict[str, float]()

    def remove_adapter(self, number: int) -> None:
        self.calls.append(("remove", number))

    def add_adapter(self, adapters: Any) -> None:
        self.calls.append(("add", adapters.id))
        self.adapters = adapters
        self.scales = {name: each.scaling for name, each in adapters.loras.items()}

    def activate_adapter(self, number: int) -> None:
        self.calls.append(("activate", number))
        self.ranks = {each.lora_a.shape[0] for each in self.adapters.loras.values()}


@pytest.mark.parametrize("lacking", [set(), {"model.layers.3.self_attn.o_proj"}])
def test_adapters_are_replaced_and_let_go(lacking: set[str], tmp_path: Path) -> None:
    """Experts have rank 2 where others have 4, and the same scale 6/4."""
    # vLLM is imported in the tests alone: every process of a parallel session collects this file.
    from megarl.rollout.worker_extension import replace_adapters

    spec = read_model_spec(write_config(tmp_path, **EXPERTS))
    lora = LoraConfig(rank=4, alpha=6.0)
    tensors = {f"{PREFIX}{n}": torch.ones(s) for n, s in adapter_spec(spec, lora).expected_tensors().items()}
    layers = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors}
    manager = Manager(layers - lacking)
    worker_manager: Any = SimpleNamespace(
        _adapter_manager=manager, lora_config=SimpleNamespace(lora_dtype=torch.float32)
    )
    problem = replace_adapters(worker_manager, tensors, peft_config(spec, lora), torch.device("cpu"))
    expected = f"the engine has no place for adapters of 1 layers: {sorted(lacking)}" if lacking else ""
    assert problem == expected
    assert manager.calls == [(call, ADAPTERS_ID) for call in ("remove", "add", "activate")]
    assert manager.scales == dict.fromkeys(layers, 1.5)
    assert manager.ranks == {4, 2}
    # The layers have copies: the tensors are not kept as well.
    assert manager.adapters.loras == {}
