"""Divide a sync plan into the shares of its processes: whose messages they are, and which wire carries each."""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megarl.config.generation import SyncConfig
from megarl.config.plugins import active_plugins
from megarl.host.device.platform import Platform, platform
from megarl.sync.plan.assign import Hosts
from megarl.sync.plan.build import Parcel, Plan
from megarl.sync.plan.links import Ways, fastest_ways
from megarl.sync.wire.meetings import Meeting
from megarl.sync.wire.table import wire_for
from megarl.sync.wire.wires import Link, Members, Share, Wire


def ways_of(plan: Plan, settings: SyncConfig, here: Platform, *, hosts: Hosts, beside: Mapping[int, int]) -> Ways:
    """Return what the settings, and where these leave a choice the planner's seconds, let carry a plan's messages."""
    ipc = here.has_ipc if settings.cuda_ipc is None else settings.cuda_ipc
    return fastest_ways(plan, settings.host_group == "device", ipc, hosts=hosts, beside=beside)


def shares_of(
    plan: Plan,
    settings: SyncConfig,
    meeting: Meeting,
    *,
    hosts: Sequence[str],
    num_ranks: int,
    beside: Mapping[int, int],
    segments: Path,
) -> list[Share]:
    """Return the share of every process, by its number in the plan.

    meeting: as one of the processes sees it. hosts: of every process; the trainer's ranks come first. beside: by engine
    worker, the rank that shares its device. segments: path prefix of shared-memory files.
    """
    carried = [defaultdict[str, list[Parcel]](list) for _ in hosts]
    used, choose = dict[str, Wire](), functools.cache(wire_for)
    ways = ways_of(plan, settings, platform(), hosts=dict(enumerate(hosts)), beside=beside)
    for message in plan.messages:
        link = Link(
            same_host=hosts[message.source] == hosts[message.sink],
            same_device=message.local,
            beside_rank=message.sink in beside,
            host_group=settings.host_group,
            cuda_ipc=ways.ipc,
            delta=settings.delta,
            nearby=ways.nearby,
        )
        wire = choose(link)
        used[wire.name] = wire
        passing = [beside[message.sink]] if wire.members is Members.RANKS else []
        for process in (message.source, message.sink, *passing):
            carried[process][wire.name].append(message)
    # A group forms when all of its members open it, also those that it brings no message.
    size = num_ranks if any(wire.members is Members.RANKS for wire in used.values()) else len(hosts)
    for name in (name for name, wire in used.items() if wire.members is not Members.ENDS):
        for its in carried[:size]:
            its.setdefault(name, [])
    return [
        Share(
            messages=tuple(plan.of_source(process) if process < num_ranks else plan.of_sink(process)),
            specs=plan.specs,
            needs=plan.needs.get(process, {}),
            segments=str(segments),
            meeting=replace(meeting, rank=process, size=size),
            wires={name: tuple(carried[process][name]) for name in used if name in carried[process]},
            beside=beside,
            plugins=active_plugins(),
        )
        for process in range(len(hosts))
    ]
