"""Send the trainer's weights to the engines: trainer ranks send each engine worker the tensor slices that it lacks."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.cluster.actors import EngineActor, RankActor
from megarl.cluster.processes import wait_all
from megarl.cluster.remotes import PendingCall, Process, R, results
from megarl.cluster.sync_plan import gloo_warning
from megarl.config.generation import SyncConfig
from megarl.errors import EngineDiedError, WeightSyncError
from megarl.host.device.platform import platform
from megarl.host.listeners import LOOPBACK
from megarl.host.streams import print_lines
from megarl.parallel.worker import RankWorker
from megarl.rollout.engine import Received, VllmEngine
from megarl.sync.plan.assign import Holding
from megarl.sync.plan.build import build_plan
from megarl.sync.transport.casts import SCALED, scale_of
from megarl.sync.transport.process_plans import process_plans_of
from megarl.sync.transport.rendezvous import Rendezvous, give_up
from megarl.weights.safetensors_map import TensorSpec

_DOING = "syncing weights"
# The metric that counts the bytes that all engine workers receive in a sync, but for those in shared memory.
WIRE_BYTES = "sync/wire_bytes"
# Scales are counted as float32.
_SCALE_BYTES = 4
_SECRET_BYTES = 32


class BridgeSync:
    """The weight transfer from the actor's trainer ranks to the workers of all engines, by a plan that is made once.

    specs: shape and dtype of each tensor as sent. needs: tensor slices that each worker of an engine loads. shares: for
    each engine, the ranks whose devices its workers use.
    """

    def __init__(
        self,
        ranks: Sequence[Process[RankActor]],
        engines: Sequence[Process[EngineActor]],
        specs: Mapping[str, TensorSpec],
        needs: Sequence[Holding],
        settings: SyncConfig,
        *,
        shares: Sequence[Sequence[int]],
        segments: Path,
        timeout_s: float,
    ) -> None:
        self._ranks, self._engines, self._timeout_s = list(ranks), list(engines), timeout_s
        self._num_workers, self._transfer = len(needs), 0
        self._scaled = [name for name, spec in specs.items() if spec.dtype == SCALED]
        # Number of syncs since everything was last sent in full; None: both sides may differ, so send all.
        self._full_every = settings.delta_full_every if settings.delta else None
        self._since_full: int | None = None
        if lacking := sorted({name for needed in needs for name in needed} - specs.keys()):
            raise WeightSyncError(
                f"engines need {len(lacking)} tensors that the trainer does not send: {lacking[:3]}; the family's "
                f"weight table does not fit the model"
            )
        held = self._wait([p.call(RankWorker.held_weights) for p in ranks])
        receivers = range(len(ranks), len(ranks) + len(engines) * self._num_workers)
        beside = {
            self._sink(engine, worker): rank
            for engine, its_ranks in enumerate(shares)
            for worker, rank in enumerate(its_ranks)
        }
        self.plan = build_plan(
            specs,
            dict(enumerate(held)),
            {receiver: needs[i % self._num_workers] for i, receiver in enumerate(receivers)},
            neighbours={receiver: [rank] for receiver, rank in beside.items()},
            hosts=dict(enumerate(self._hosts())),
        )
        if warning := gloo_warning(self.plan, settings, platform()):
            print_lines(f"warning: {warning}")
        self._open(settings, beside, segments)

    def push(self, version: int, *, verify: bool) -> dict[str, float]:
        """Send the trainer's current weights to the engines, which generate with them as `version`; return metrics.

        A worker receives only slices that it needs, if possible from the trainer rank that shares its device.

        Raises:
            WeightSyncError: a tensor is missing on either side, or (with `verify`) its checksums differ.
        """
        self._transfer += 1
        scales: dict[str, float] = {}
        if self._scaled:
            # The largest magnitude of each tensor that is sent in float8, on any rank.
            calls = [p.call(RankWorker.largest_weights) for p in self._ranks]
            largest = wait_all(calls, timeout_s=self._timeout_s, doing=_DOING)
            scales = {name: scale_of(max(rank.get(name, 0.0) for rank in largest)) for name in self._scaled}
        full = self._since_full is None or self._since_full + 1 == self._full_every
        since_full, self._since_full = 0 if self._since_full is None or full else self._since_full + 1, None
        send, receive, transfer = RankWorker.send_over_bridge, VllmEngine.receive_over_bridge, self._transfer
        sends = [p.call(send, transfer, with_checksums=verify, scales=scales, full=full) for p in self._ranks]
        receives = [
            p.call(receive, transfer, version=version, with_checksums=verify, scales=scales) for p in self._engines
        ]
        try:
            wait_all([*sends, *receives], timeout_s=self._timeout_s, doing=_DOING)
        except EngineDiedError:
            give_up(self._rendezvous, self._transfer)
            raise
        self._since_full = since_full
        received = [worker for engine in results(receives) for worker in engine]
        if verify:
            self._compare(results(sends), received)
        scale_bytes = _SCALE_BYTES * len(scales) * len(received)
        return {WIRE_BYTES: float(scale_bytes + sum(worker.wire_bytes for worker in received))}

    def close(self) -> None:
        """Make the ranks delete their shared-memory segments."""
        calls = [p.call(RankWorker.close_bridge) for p in self._ranks]
        wait_all(calls, timeout_s=self._timeout_s, doing="closing the bridge for weights")

    def _compare(self, sent: Sequence[Mapping[int, Mapping[str, int]]], received: Sequence[Received]) -> None:
        """Raise WeightSyncError if, for any engine worker, the checksums of sent and received tensors differ."""
        for receiver, worker in zip(self.plan.needs, received, strict=True):
            names = [name for name, boxes in self.plan.needs[receiver].items() if boxes]
            parts = [sums.get(receiver, {}) for sums in sent]
            sums = {name: sum(part.get(name, 0) for part in parts) % (1 << 64) for name in names}
            wrong = [name for name in sorted(names) if sums[name] != worker.checksums.get(name)]
            if wrong:
                raise WeightSyncError(
                    f"{len(wrong)} tensors differ between trainer and engine after a sync: {wrong[:3]}"
                )

    def _sink(self, engine: int, worker: int) -> int:
        """Return the number of an engine's worker as a receiver in the plan; trainer ranks have the first numbers."""
        return len(self._ranks) + engine * self._num_workers + worker

    def _hosts(self) -> list[str]:
        """Return the host of every process, by its number in the plan."""
        hosts = [rank.location.host for rank in self._ranks]
        num = self._num_workers
        return [*hosts, *(each.location.host_of(worker, num) for each in self._engines for worker in range(num))]

    def _open(self, settings: SyncConfig, beside: Mapping[int, int], segments: Path) -> None:
        first, hosts = self._ranks[0], self._hosts()
        host = LOOPBACK if len(set(hosts)) == 1 else first.location.address
        (address,) = self._wait([first.call(RankWorker.offer_sync_rendezvous, host)])
        self._rendezvous = Rendezvous(
            address=address,
            rank=0,
            size=len(hosts),
            timeout_s=self._timeout_s,
            secret=secrets.token_bytes(_SECRET_BYTES),
        )
        shares = process_plans_of(
            self.plan,
            settings,
            self._rendezvous,
            hosts=hosts,
            num_ranks=len(self._ranks),
            beside=beside,
            segments=segments,
        )
        opens = [p.call(RankWorker.open_bridge, shares[rank]) for rank, p in enumerate(self._ranks)]
        for engine, process in enumerate(self._engines):
            receivers = [self._sink(engine, worker) for worker in range(self._num_workers)]
            opens.append(process.call(VllmEngine.open_bridge, [shares[receiver] for receiver in receivers]))
        self._wait(opens)

    def _wait(self, calls: Sequence[PendingCall[R]]) -> list[R]:
        return wait_all(calls, timeout_s=self._timeout_s, doing="opening the bridge for weights")
