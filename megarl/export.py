"""Write a policy as a Hugging Face model directory, each rank its own slices."""

import json
import math
import shutil
from pathlib import Path

from megarl.parallel.weights.families import ModelSpec
from megarl.rollout.weight_sync import WeightWriters, check_complete
from megarl.safetensors_map import TensorSpec, create_model_files, dtype_of

# Everything a model directory holds besides weights: configuration, tokenizer, templates.
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHT_FILES = ("*.index.json",)


def weight_specs(spec: ModelSpec, dtype: str) -> dict[str, TensorSpec]:
    """Names, shapes and types of a model's Hugging Face tensors."""
    return {name: TensorSpec(shape=shape, dtype=dtype_of(dtype)) for name, shape in spec.expected_tensors().items()}


def export_model(workers: WeightWriters, spec: ModelSpec, dtype: str, directory: Path) -> None:
    """Export the actor. The directory appears under its name only when it is complete."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    specs = weight_specs(spec, dtype)
    written = workers.store_weights(create_model_files(partial, specs))
    check_complete({name: math.prod(tensor.shape) for name, tensor in specs.items()}, written.num_elements)
    _copy_companions(spec.path, partial, dtype)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def _copy_companions(source: Path, target: Path, dtype: str) -> None:
    skipped = {file for pattern in _WEIGHT_FILES for file in source.glob(pattern)}
    for file in sorted(file for pattern in _COMPANIONS for file in source.glob(pattern)):
        if file not in skipped:
            shutil.copy(file, target / file.name)
    config_file = target / "config.json"
    config = json.loads(config_file.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    config_file.write_text(json.dumps(config, indent=2) + "\n")
