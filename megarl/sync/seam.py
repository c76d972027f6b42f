"""Weights from the trainer's ranks to the engines, through one file in shared memory per host.

The file is a safetensors file of full Hugging Face tensors. Every rank writes the slices it owns; nobody gathers
the model. Engines read the file through vLLM's layerwise reload. Both sides are checked: names against the family
table, parameters against what their loaders consumed, and on request every tensor's checksum.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megarl.errors import WeightSyncError
from megarl.sync.wire.file import SharedFile, WeightTransport
from megarl.types.messages import StoreResult
from megarl.weights.safetensors_map import TensorSpec

# The metric of what all workers of all engines received in a sync, without what they share memory with.
WIRE_BYTES = "sync/wire_bytes"


class WeightWriters(Protocol):
    """The trainer's side."""

    def store_weights(self, files: Sequence[Path], *, with_checksums: bool = False) -> StoreResult: ...


class WeightReaders(Protocol):
    """The engines' side; checksums come from every worker of every engine."""

    def load_weights(self, files: Sequence[Path], *, version: int, with_checksums: bool) -> list[dict[str, int]]: ...


class PolicySync(Protocol):
    """What carries the policy to the engines, whatever the transport."""

    def push(self, version: int, *, verify: bool) -> dict[str, float]:
        """Make the engines generate with the trainer's current weights, as `version`; returns metrics.

        Raises:
            WeightSyncError: a tensor is missing on either side, or (with `verify`) its checksums differ.
        """

    def close(self) -> None:
        """Free what the transport holds outside its processes."""


class WeightSync:
    """`push` makes the engines generate with the trainer's current weights.

    Ranks and engines open `path` on their hosts; `transport` makes the files the same (default: there is one host).
    """

    def __init__(
        self,
        writers: WeightWriters,
        readers: WeightReaders,
        path: Path,
        specs: Mapping[str, TensorSpec],
        *,
        transport: WeightTransport | None = None,
    ) -> None:
        self._writers, self._readers, self._path = writers, readers, path
        self._transport = transport or SharedFile(path)
        self._transport.create(specs)
        self._num_elements = {name: math.prod(spec.shape) for name, spec in specs.items()}
        self._num_bytes = sum(spec.num_bytes for spec in specs.values())

    def push(self, version: int, *, verify: bool) -> dict[str, float]:
        """See `PolicySync`. Every worker reads the whole model."""
        self._transport.clear()
        sent = self._writers.store_weights([self._path], with_checksums=verify)
        check_complete(self._num_elements, sent.num_elements)
        self._transport.deliver()
        workers = self._readers.load_weights([self._path], version=version, with_checksums=verify)
        for received in workers if verify else []:
            compare_checksums(self._num_elements.keys(), sent.checksums, received)
        return {WIRE_BYTES: float(self._num_bytes * len(workers))}

    def close(self) -> None:
        """Remove the shared files."""
        self._transport.remove()


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
