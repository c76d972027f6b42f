"""Read adapters from directories that PEFT wrote, and make those with which training begins."""

import hashlib
import json
from pathlib import Path

import torch

from megarl.config.lora import LoraConfig
from megarl.errors import ConfigError
from megarl.host.reading import read_object
from megarl.weights.adapters import adapter_spec, peft_config
from megarl.weights.families import ModelSpec
from megarl.weights.safetensors_map import create_file, map_model, weight_specs

# What PEFT calls its files, and puts before the names of tensors.
ADAPTER_CONFIG, ADAPTER_FILE, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# Keys of PEFT's config with which adapters are more, or other, than W + s·B·A.
_VARIANTS = ("use_dora", "use_rslora", "lora_bias", "modules_to_save", "fan_in_fan_out")


def read_adapters(base: ModelSpec, config: LoraConfig) -> dict[str, torch.Tensor]:
    """Map the tensors of a directory that PEFT wrote for a base model, by the names in `adapter_spec`.

    Raises:
        ConfigError: the directory's adapters have another rank, scale or targets than `config` says.
    """
    assert config.path is not None
    file = Path(config.path) / ADAPTER_CONFIG
    written = read_object(file, remedy="export the adapters again", error=ConfigError)
    expected = peft_config(base, config)
    for key in ("r", "lora_alpha", "alpha_pattern"):
        if (written.get(key) or {}) != expected[key]:
            raise ConfigError(f"{file}: {key}: got {written.get(key)!r}, expected {expected[key]}, as actor.lora says")
    if variants := [key for key in _VARIANTS if written.get(key)]:
        raise ConfigError(f"{file}: {variants[0]}: got {written[variants[0]]!r}; such adapters are not supported")
    tensors = {name.removeprefix(PREFIX): t for name, t in map_model([Path(config.path) / ADAPTER_FILE]).items()}
    shapes = adapter_spec(base, config).expected_tensors()
    if wrong := sorted(shapes.keys() ^ tensors.keys()):
        kind = "has no" if wrong[0] in shapes else "has the unexpected"
        raise ConfigError(
            f"{config.path}: {kind} tensor {wrong[0]}, and {len(wrong) - 1} more differ; set actor.lora.targets to the "
            f"layers that these adapters belong to"
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ConfigError(f"{config.path}: tensor {name} has shape {tuple(tensors[name].shape)}, expected {shape}")
    return tensors


def create_adapter_files(directory: Path, base: ModelSpec, config: LoraConfig, dtype: str) -> Path:
    """Write a directory for a model's adapters as PEFT reads it; its tensors, which it returns the file of, are 0."""
    directory.mkdir(parents=True, exist_ok=True)
    specs = weight_specs(adapter_spec(base, config), dtype)
    create_file(directory / ADAPTER_FILE, {f"{PREFIX}{name}": spec for name, spec in specs.items()})
    text = json.dumps(peft_config(base, config), indent=2) + "\n"
    (directory / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
    return directory / ADAPTER_FILE


def initial_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return an adapter's tensor before training, [float32]: B is 0, A uniform within ±1/√in.

    A depends on the seed and its name alone, so that all layouts begin with the same.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return (2 * torch.rand(shape, generator=generator) - 1) / shape[1] ** 0.5
