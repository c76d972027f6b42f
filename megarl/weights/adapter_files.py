"""Read adapters from directories that PEFT wrote, and make those with which training begins."""

import hashlib
import json
import math
from pathlib import Path

from megarl.config.lora import LoraConfig
from megarl.config.torch_later import Tensor, torch
from megarl.errors import ConfigError
from megarl.weights.adapters import adapter_spec, peft_config
from megarl.weights.families import ModelSpec
from megarl.weights.peft_files import ADAPTER_CONFIG, ADAPTER_FILE, PREFIX, read_peft
from megarl.weights.safetensors_map import create_file, weight_specs
from megarl.weights.tables import VALUE_HEAD


def read_adapters(base: ModelSpec, config: LoraConfig, *, scalar_head: bool = False) -> dict[str, Tensor]:
    """Map the adapters in `config.path` to memory, by the names in `adapter_spec`; a scalar head may be among them.

    Raises:
        ConfigError: they have another rank, scale or targets than `config` says, or `read_peft` refuses them.
    """
    assert config.path is not None
    adapters, spec = read_peft(Path(config.path), base), adapter_spec(base, config)
    remedy = "or merge them into the base (megarl convert merge), and train new ones"
    if other := adapters.replaced.keys() - ({VALUE_HEAD} if scalar_head else set()):
        raise ConfigError(f"{config.path}: has {min(other)} as a whole, which this role does not train; {remedy}")
    expected = {
        name.replace(".lora_A.", "."): shape[0] for name, shape in spec.expected_tensors().items() if ".lora_A." in name
    }
    if wrong := sorted(expected.keys() ^ adapters.updates.keys()):
        kind = "has no adapters" if wrong[0] in expected else "has adapters"
        raise ConfigError(
            f"{config.path}: {kind} of {wrong[0]} ({len(wrong)} such in all), but lora.targets="
            f"{list(config.targets)}; set lora.targets to the layers that have adapters, {remedy}"
        )
    scale = config.alpha / config.rank
    for name, update in adapters.updates.items():
        if (rank := update.a.shape[0]) != expected[name]:
            key = "expert_rank" if expected[name] != config.rank else "rank"
            raise ConfigError(
                f"{config.path}: the adapters of {name} have rank {rank}, but lora says {expected[name]}; set "
                f"lora.{key}={rank}, {remedy}"
            )
        if not math.isclose(update.scale, scale):
            raise ConfigError(
                f"{config.path}: the adapters of {name} are scaled by {update.scale:g}, but lora.alpha / lora.rank "
                f"is {scale:g}; set lora.alpha={update.scale * config.rank:g}, {remedy}"
            )
    return dict(adapters.tensors)


def create_adapter_files(
    directory: Path, base: ModelSpec, config: LoraConfig, dtype: str, *, scalar_head: bool = False
) -> Path:
    """Write a directory for a model's adapters as PEFT reads it; its tensors, which it returns the file of, are 0."""
    directory.mkdir(parents=True, exist_ok=True)
    specs = weight_specs(adapter_spec(base, config), dtype, scalar_head=scalar_head)
    create_file(directory / ADAPTER_FILE, {f"{PREFIX}{name}": spec for name, spec in specs.items()})
    text = json.dumps(peft_config(base, config, scalar_head=scalar_head), indent=2) + "\n"
    (directory / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
    return directory / ADAPTER_FILE


def initial_tensor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return an adapter's tensor before training, [float32]: B is 0, A uniform within ±1/√in.

    A depends on the seed and its name alone, so that all layouts begin with the same.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return (2 * torch.rand(shape, generator=generator) - 1) / shape[1] ** 0.5
