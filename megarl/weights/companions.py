"""Write the files of a model directory that are not weights."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.weights.hub import SMALL_FILES
from megarl.weights.tables import Family

_WEIGHT_FILES = ("*.index.json",)


def copy_companions(source: Path, target: Path, *, skipped: Sequence[str] = _WEIGHT_FILES) -> None:
    """Copy a model directory's files that are not weights, such as tokenizer files, except those like `skipped`."""
    unwanted = {file for pattern in skipped for file in source.glob(pattern)}
    for file in sorted({file for pattern in SMALL_FILES for file in source.glob(pattern)} - unwanted):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        # Not with its mode: who may read the copy is the run's to say.
        shutil.copyfile(file, copy)


def exported_config(
    config: Mapping[str, object], family: Family, *, dtype: str, scalar_head: bool
) -> dict[str, object]:
    """Return a model's config.json with the exported dtype and, for a critic, the architecture with a scalar head."""
    changed = {**config, "dtype": dtype}
    changed.pop("torch_dtype", None)
    if scalar_head:
        changed |= {
            "architectures": list(family.value_architectures),
            # One label: transformers counts them.
            "id2label": {"0": "value"},
            "label2id": {"value": 0},
        }
    return changed


def write_config(file: Path, config: Mapping[str, object]) -> None:
    """Write a model's config.json or generation_config.json as indented JSON."""
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
