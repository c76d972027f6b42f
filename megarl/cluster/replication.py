"""The weight transport between hosts: one process of each host keeps its file, all take part in the sum."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megarl.cluster.processes import wait_all, wait_living
from megarl.cluster.roster import Process
from megarl.sync.wire.file import SharedFile, WeightTransport
from megarl.weights.safetensors_map import TensorSpec

_DOING = "moving weights between hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKeeper:
    """The process that keeps its host's file, and the file's path there."""

    process: Process
    path: Path


class ReplicatedFiles:
    """A `WeightTransport` over several hosts."""

    def __init__(self, keepers: Sequence[FileKeeper], *, timeout_s: float, over_devices: bool = False) -> None:
        self._keepers, self._timeout_s, self._over_devices = list(keepers), timeout_s, over_devices

    def create(self, specs: Mapping[str, TensorSpec]) -> None:
        self._call("create", [(str(keeper.path), specs) for keeper in self._keepers])
        first = self._keepers[0].process
        port = self._wait([(first, first.actor.call_host_file.remote("offer", first.location.address))])[0]
        meeting, count = (first.location.address, port), len(self._keepers)
        joins = [(*meeting, rank, count, self._timeout_s) for rank in range(count)]
        self._call("join", joins, over_devices=self._over_devices)

    def clear(self) -> None:
        self._call("clear")

    def deliver(self) -> None:
        self._call("deliver")

    def remove(self) -> None:
        calls = [(k.process, k.process.actor.call_host_file.remote("remove")) for k in self._keepers]
        wait_living(calls, timeout_s=self._timeout_s, doing=_DOING)

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, **kwargs: Any) -> list[Any]:
        """A method of every keeper's `HostFile`, each with its own arguments."""
        processes = [keeper.process for keeper in self._keepers]
        given = arguments or [()] * len(processes)
        calls = [
            (p, p.actor.call_host_file.remote(method, *own, **kwargs)) for p, own in zip(processes, given, strict=True)
        ]
        return self._wait(calls)

    def _wait(self, calls: Sequence[tuple[Process, Any]]) -> list[Any]:
        return wait_all(calls, timeout_s=self._timeout_s, doing=_DOING)


def weight_transport(
    processes: Sequence[Process], path: Path, *, timeout_s: float, over_devices: bool
) -> WeightTransport:
    """The transport that these ranks and engines need; `path` is the same on every host."""
    hosts: dict[str, Process] = {}
    for process in processes:
        hosts.setdefault(process.location.host, process)
    if hosts.keys() == {ray.get_runtime_context().get_node_id()}:
        return SharedFile(path)
    keepers = [FileKeeper(process=p, path=path) for p in hosts.values()]
    return ReplicatedFiles(keepers, timeout_s=timeout_s, over_devices=over_devices)
