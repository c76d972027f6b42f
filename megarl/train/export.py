"""Write a role's model as a Hugging Face model directory, each rank its own slices."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.data.stop_tokens import answer_form, declared_stop_tokens
from megarl.data.tokenizer_files import read_tokenizer
from megarl.errors import WeightSyncError
from megarl.host.reading import read_object
from megarl.host.streams import print_lines
from megarl.host.writing import put_directory, writing
from megarl.record.metrics import RunPaths
from megarl.types.messages import Head, RoleSpec
from megarl.weights.adapters import adapter_spec, lost_in_peft
from megarl.weights.companions import copy_companions, exported_config, write_config
from megarl.weights.families import read_hf_config, read_model_spec
from megarl.weights.peft_files import create_adapter_files
from megarl.weights.safetensors_map import TensorSpec, create_model_files, map_model, untrained_tensors, weight_specs

if TYPE_CHECKING:
    from megarl.cluster.workers import RoleWorkers


def export_role(workers: "RoleWorkers", role: RoleSpec, directory: Path) -> None:
    """Write a trained role: its model as `directory`, its adapters beside it, or both, as `lora.export` says."""
    export = "merged" if role.settings.lora is None else role.settings.lora.export
    if export != "merged":
        export_adapters(workers, role, directory.with_name(f"{directory.name}_adapter"))
    if export != "adapter":
        export_model(workers, role, directory)


def exported(paths: RunPaths) -> Path | None:
    """Return the directory of the policy with which a run has ended, or of its adapters alone; None before the end."""
    return next((path for path in (paths.export, paths.export_adapter) if path.is_dir()), None)


def export_model(workers: "RoleWorkers", role: RoleSpec, directory: Path) -> None:
    """Write a role's model as a Hugging Face directory. The directory appears under its name only once it is complete.

    A critic becomes transformers' model with a scalar head (`score.weight`), which `critic.model_path` accepts.
    """
    spec = read_model_spec(role.model.path, tower=role.tower)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with writing(directory):
        scalar = role.head is Head.SCALAR
        specs = weight_specs(spec, role.model.dtype, scalar_head=scalar)
        untrained = {} if scalar else untrained_tensors(spec)
        kept = {name: TensorSpec(shape=tuple(each.shape), dtype=each.dtype) for name, each in untrained.items()}
        files = create_model_files(partial, {**specs, **kept})
        written = workers.store_weights(files, role=role.role)
        if untrained:
            target = map_model(files, writable=True)
            for name, tensor in untrained.items():
                target[name].copy_(tensor)
        check_complete({name: math.prod(tensor.shape) for name, tensor in specs.items()}, written.num_elements)
        copy_companions(spec.path, partial)
        config = read_hf_config(partial)
        if not scalar:
            name_end_of_answers(partial)
        config = exported_config(config, spec.family, dtype=role.model.dtype, scalar_head=scalar)
        write_config(partial / "config.json", config)
        put_directory(partial, directory)


def export_adapters(workers: "RoleWorkers", role: RoleSpec, directory: Path) -> None:
    """Write a role's adapters as PEFT does. The directory appears under its name only once it is complete."""
    assert role.settings.lora is not None
    spec, partial = read_model_spec(role.model.path, tower=role.tower), directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with writing(directory):
        scalar = role.head is Head.SCALAR
        file = create_adapter_files(partial, spec, role.settings.lora, role.model.dtype, scalar_head=scalar)
        written = workers.store_adapters(file, role=role.role)
        shapes = adapter_spec(spec, role.settings.lora).expected_tensors(scalar_head=scalar)
        check_complete({name: math.prod(shape) for name, shape in shapes.items()}, written.num_elements)
        put_directory(partial, directory)
    if (lost := lost_in_peft(spec, role.settings.lora.targets)) is not None:
        print_lines(
            f"warning: {directory}: peft leaves out the adapters of {lost} in {spec.family.name} models; merge them "
            f"with `megarl convert merge {spec.path} --adapter {directory} --out DIR`, or set lora.export=merged"
        )


def name_end_of_answers(directory: Path) -> None:
    """Add the token with which the chat template ends answers, which were trained to end so, to `eos_token_id` of
    generation_config.json, unless the files name it: other programs do not stop at what a template writes.
    """
    if not (directory / "tokenizer_config.json").is_file():
        return
    tokenizer = read_tokenizer(directory, "model.path")
    end = answer_form(tokenizer).end_id if tokenizer.chat_template else None
    declared, file = declared_stop_tokens(directory), directory / "generation_config.json"
    if end is not None and end not in declared:
        known = read_object(file) if file.is_file() else {}
        write_config(file, {**known, "eos_token_id": [end, *declared]})


def check_complete(expected: Mapping[str, int], written: Mapping[str, int]) -> None:
    """Raise a WeightSyncError unless the ranks together wrote every element of every tensor exactly once."""
    wrong = [
        f"{name} ({written.get(name, 0)}/{expected.get(name, 0)})"
        for name in sorted(expected.keys() | written.keys())
        if written.get(name, 0) != expected.get(name, 0)
    ]
    if wrong:
        raise WeightSyncError(
            f"the trainer's ranks did not write {len(wrong)} tensors completely (elements written/expected): "
            f"{wrong[:3]}; the family's weight table does not fit the model"
        )
