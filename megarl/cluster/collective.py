"""Weight sync without files: the trainer's ranks send to the engines' workers, device to device where there are any."""

import functools
import math
from collections.abc import Mapping, Sequence

from megarl.cluster.processes import wait_all
from megarl.cluster.roster import Process
from megarl.sync.seam import WIRE_BYTES, check_complete, compare_checksums
from megarl.sync.wire.collective import Meeting
from megarl.types.messages import StoreResult
from megarl.weights.safetensors_map import TensorSpec


class CollectiveSync:
    """As `WeightSync`, over a group of all ranks of the actor and all workers of the engines (`WeightChannel`).

    Each of them needs a device of its own: NCCL takes no device twice.
    """

    def __init__(
        self,
        ranks: Sequence[Process],
        engines: Sequence[Process],
        specs: Mapping[str, TensorSpec],
        *,
        engine_tp: int,
        timeout_s: float,
    ) -> None:
        self._ranks, self._engines, self._timeout_s = list(ranks), list(engines), timeout_s
        self._num_bytes = sum(spec.num_bytes for spec in specs.values())
        self._num_elements = {name: math.prod(spec.shape) for name, spec in specs.items()}
        first = self._ranks[0]
        offer = (first, first.actor.call.remote("offer_channel", first.location.address))
        (port,) = wait_all([offer], timeout_s=timeout_s, doing="opening the channel for weights")
        size = len(self._ranks) + engine_tp * len(self._engines)
        # An engine's workers count from its first on.
        places = [*range(len(self._ranks)), *range(len(self._ranks), size, engine_tp)]
        joins = []
        for process, rank in zip([*self._ranks, *self._engines], places, strict=True):
            meeting = Meeting(address=first.location.address, port=port, rank=rank, size=size, timeout_s=timeout_s)
            joins.append((process, process.actor.call.remote("open_channel", meeting, specs)))
        answers = wait_all(joins, timeout_s=timeout_s, doing="opening the channel for weights")
        # Before anything is sent: what a rank owns does not change.
        self._check(answers[: len(self._ranks)])

    def push(self, version: int, *, verify: bool) -> dict[str, float]:
        """See `PolicySync`. Every worker receives the whole model."""
        sends = [(p, p.actor.call.remote("send_weights", with_checksums=verify)) for p in self._ranks]
        receives = [
            (p, p.actor.call.remote("receive_weights", version=version, with_checksums=verify)) for p in self._engines
        ]
        answers = wait_all([*sends, *receives], timeout_s=self._timeout_s, doing="syncing weights")
        sent = self._check(answers[: len(sends)])
        workers = [worker for engine in answers[len(sends) :] for worker in engine]
        for received in workers if verify else []:
            compare_checksums(self._num_elements.keys(), sent.checksums, received)
        return {WIRE_BYTES: float(self._num_bytes * len(workers))}

    def close(self) -> None:
        """The group ends with its processes."""

    def _check(self, parts: Sequence[StoreResult]) -> StoreResult:
        """What all ranks send together, every element of it once."""
        sent = functools.reduce(StoreResult.merged, parts)
        check_complete(self._num_elements, sent.num_elements)
        return sent
