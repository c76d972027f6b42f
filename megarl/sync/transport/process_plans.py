"""Divide a sync plan into the shares of its processes: whose messages they are, and which transport carries each."""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megarl.config.generation import SyncConfig
from megarl.config.plugins import active_plugins
from megarl.host.device.platform import Platform, platform
from megarl.sync.plan.assign import Hosts
from megarl.sync.plan.build import Plan, WeightMessage
from megarl.sync.plan.links import LinkSettings, fastest_link_settings
from megarl.sync.transport.rendezvous import Rendezvous
from megarl.sync.transport.table import TRANSPORTS, transport_for
from megarl.sync.transport.transports import Link, Members, ProcessPlan, Staging, Transport


def link_settings_of(
    plan: Plan, settings: SyncConfig, here: Platform, *, hosts: Hosts, beside: Mapping[int, int]
) -> LinkSettings:
    """Return what may carry a plan's messages: what the settings say, else what the planner takes to be fastest."""
    ipc = here.has_ipc if settings.cuda_ipc is None else settings.cuda_ipc
    return fastest_link_settings(plan, settings.group_between_hosts(here) == "device", ipc, hosts=hosts, beside=beside)


def carried(
    plan: Plan, settings: SyncConfig, *, hosts: Hosts, beside: Mapping[int, int]
) -> dict[str, defaultdict[int, list[WeightMessage]]]:
    """Choose the transport of every message. Return, by the transport's name and by process, the messages that the
    process sends, receives or passes on over it, in the plan's order.
    """
    found = defaultdict[str, defaultdict[int, list[WeightMessage]]](lambda: defaultdict(list))
    link_settings = link_settings_of(plan, settings, platform(), hosts=hosts, beside=beside)

    @functools.cache
    def transport_of(same_host: bool, same_device: bool, beside_rank: bool) -> Transport:
        return transport_for(
            Link(
                same_host=same_host,
                same_device=same_device,
                beside_rank=beside_rank,
                host_group=settings.group_between_hosts(platform()),
                cuda_ipc=link_settings.ipc,
                delta=settings.delta,
                nearby=link_settings.nearby,
            )
        )

    for message in plan.messages:
        source, receiver = message.source, message.receiver
        transport = transport_of(hosts[source] == hosts[receiver], message.local, receiver in beside)
        its = found[transport.name]
        its[source].append(message)
        its[receiver].append(message)
        if transport.members is Members.RANKS:
            its[beside[receiver]].append(message)
    return found


def staging_of(plan: Plan, settings: SyncConfig) -> dict[int, Staging]:
    """Return what every process of a plan allocates to stage messages; the same functions size transports' memory."""
    beside = {receiver: min(sources) for receiver, sources in plan.neighbours.items()}
    found = dict[int, Staging]()
    for name, by_process in carried(plan, settings, hosts=plan.hosts, beside=beside).items():
        for process, messages in by_process.items():
            other, its = found.get(process, Staging()), TRANSPORTS.get(name).staging(messages, process)
            found[process] = Staging(device=other.device + its.device, host=other.host + its.host)
    return found


def most_staging(plan: Plan, settings: SyncConfig) -> Staging:
    """Return the most that any process of a plan allocates to stage messages, of its device and of host memory."""
    found = staging_of(plan, settings).values()
    return Staging(device=max(each.device for each in found), host=max(each.host for each in found))


def process_plans_of(
    plan: Plan,
    settings: SyncConfig,
    rendezvous: Rendezvous,
    *,
    hosts: Sequence[str],
    num_ranks: int,
    beside: Mapping[int, int],
    segments: Path,
) -> list[ProcessPlan]:
    """Return the process plan of every process, by its number in the plan.

    rendezvous: as one of the processes sees it. hosts: of every process; the trainer's ranks come first. beside: by
    engine worker, the rank that shares its device. segments: path prefix of shared-memory files.
    """
    over = carried(plan, settings, hosts=dict(enumerate(hosts)), beside=beside)
    # A group forms when all of its members open it, also those that it brings no message.
    size = num_ranks if any(TRANSPORTS.get(name).members is Members.RANKS for name in over) else len(hosts)
    for by_process in (its for name, its in over.items() if TRANSPORTS.get(name).members is not Members.ENDS):
        for process in range(size):
            by_process.setdefault(process, [])
    return [
        ProcessPlan(
            messages=tuple(plan.of_source(process) if process < num_ranks else plan.of_receiver(process)),
            specs=plan.specs,
            needs=plan.needs.get(process, {}),
            segments=str(segments),
            rendezvous=replace(rendezvous, rank=process, size=size),
            transports={name: tuple(its[process]) for name, its in over.items() if process in its},
            beside=beside,
            plugins=active_plugins(),
        )
        for process in range(len(hosts))
    ]
