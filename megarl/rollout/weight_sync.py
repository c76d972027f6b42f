"""Weights from the trainer's ranks to the engines, through one file in shared memory.

The file is a safetensors file of full Hugging Face tensors. Every rank writes the slices it owns; nobody gathers
the model. Engines read the file through vLLM's layerwise reload. Both sides are checked: names against the family
table, parameters against what their loaders consumed, and on request every tensor's checksum.
"""

import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megarl.errors import WeightSyncError
from megarl.parallel.messages import StoreResult
from megarl.safetensors_map import TensorSpec, create_file


class WeightWriters(Protocol):
    """The trainer's side."""

    def store_weights(self, files: Sequence[Path], *, with_checksums: bool = False) -> StoreResult: ...


class WeightReaders(Protocol):
    """The engines' side."""

    def load_weights(self, files: Sequence[Path], *, version: int, with_checksums: bool) -> list[dict[str, int]]: ...


class WeightSync:
    """Owns the shared file; `push` makes the engines generate with the trainer's current weights."""

    def __init__(
        self, writers: WeightWriters, readers: WeightReaders, path: Path, specs: Mapping[str, TensorSpec]
    ) -> None:
        self._writers, self._readers, self._path = writers, readers, path
        needed = sum(spec.num_bytes for spec in specs.values())
        free = shutil.disk_usage(path.parent).free
        if needed > free:
            raise WeightSyncError(
                f"weight sync needs {needed / 2**30:.2f} GiB in {path.parent}, {free / 2**30:.2f} GiB are free; "
                f"enlarge it, or remove what other runs left there"
            )
        create_file(path, specs)
        self._num_elements = {name: math.prod(spec.shape) for name, spec in specs.items()}

    def push(self, version: int, *, verify: bool) -> None:
        """Send the current weights as `version`.

        Raises:
            WeightSyncError: a tensor is missing on either side, or its checksums differ.
        """
        sent = self._writers.store_weights([self._path], with_checksums=verify)
        check_complete(self._num_elements, sent.num_elements)
        for received in self._readers.load_weights([self._path], version=version, with_checksums=verify):
            if verify:
                compare_checksums(self._num_elements.keys(), sent.checksums, received)

    def close(self) -> None:
        """Remove the shared file."""
        self._path.unlink(missing_ok=True)


def check_complete(expected: Mapping[str, int], written: Mapping[str, int]) -> None:
    """Raise unless the ranks together wrote every element of every tensor exactly once."""
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


def compare_checksums(names: Collection[str], sent: Mapping[str, int], received: Mapping[str, int]) -> None:
    """Raise with the first tensors that were not sent, not received, or arrived changed."""
    wrong = [n for n in sorted(names) if sent.get(n) is None or sent.get(n) != received.get(n)]
    if wrong:
        raise WeightSyncError(f"{len(wrong)} tensors differ between trainer and engine after a sync: {wrong[:3]}")
