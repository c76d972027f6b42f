"""Estimate how long a weight sync takes, from the bytes that each device sends and receives over each kind of link.

Links carry both directions at once, and different links work at the same time. A bucket (step of the sync) takes as
long as its busiest link; the bound is what the busiest link takes for all buckets together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from megarl.sync.plan.assign import Hosts
from megarl.sync.plan.build import Plan


class Medium(StrEnum):
    """A kind of link that bytes take from one process to another."""

    DEVICE = "same device"
    NVLINK = "NVLink"
    PCIE = "PCIe"
    NETWORK = "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second of one direction of a device's links; tcp is that of a host.

    device: half of what one copy reaches, because messages are copied into and out of what processes share. pageable:
    between a device and memory of its host that is not page-locked, in the slower direction. device, pcie and pageable
    were measured on an H200 (docs/performance.md); nvlink (NVLink 4) and network (an adapter of 400 Gb/s per device)
    are specified; tcp is a guess.
    """

    device: float = 2108e9 / 2
    nvlink: float = 450e9
    pcie: float = 55e9
    pageable: float = 9e9
    network: float = 400e9 / 8
    tcp: float = 5e9


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Choices of what carries the messages of a weight sync.

    grouped: messages between hosts go over NCCL, else over gloo. nearby: those within a host go over NCCL too, else
    through the host's memory. ipc: processes share their device's memory. page_locked: whether host memory is.
    """

    grouped: bool
    nearby: bool
    ipc: bool = True
    page_locked: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoad:
    """The bytes over one kind of link: of all devices, and in the busier direction of the busiest device (over TCP of
    the busiest host), and the seconds that this takes.
    """

    medium: Medium
    num_bytes: int
    busiest_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatistics:
    """The estimated time of a weight sync: of all buckets, one after another, and of the busiest link (`bound`)."""

    link_settings: LinkSettings
    loads: tuple[LinkLoad, ...]
    seconds: float
    bound_seconds: float


class _Hop(NamedTuple):
    """The links out of and into places (devices, or hosts) that the messages marked in `chosen` take, at a rate."""

    medium: Medium
    chosen: np.ndarray
    places: tuple[np.ndarray, np.ndarray]
    rate: float


def _hops(
    of: Mapping[str, np.ndarray],
    link_settings: LinkSettings,
    num_places: int,
    hosts: Hosts,
    beside: Mapping[int, int],
    rates: Rates,
) -> list[_Hop]:
    """Return the hops of all messages, given by columns; places are numbered as processes."""
    host, target = np.zeros(num_places, dtype=np.int64), np.arange(num_places)
    numbers = {name: i for i, name in enumerate(dict.fromkeys(hosts.values()))}
    for process in range(num_places):
        host[process] = numbers.get(hosts.get(process), 0)
        target[process] = beside.get(process, process)
    source, device, local = of["source"], target[of["receiver"]], of["local"] == 1
    far = host[source] != host[of["receiver"]]
    near = ~far & ~local
    grouped = near & link_settings.nearby | far & link_settings.grouped
    # Put by the source, or by the rank beside the receiver that passes it on, into what the receiver shares.
    handed = local | grouped & (device != of["receiver"])
    pcie = rates.pcie if link_settings.page_locked else rates.pageable
    ends, inside, between = (source, device), (device, device), (host[source], host[of["receiver"]])
    return [
        _Hop(Medium.DEVICE, handed & link_settings.ipc, inside, rates.device),
        _Hop(Medium.NVLINK, near & grouped, ends, rates.nvlink),
        _Hop(Medium.PCIE, handed & (not link_settings.ipc), inside, pcie),
        _Hop(Medium.PCIE, near & ~grouped, ends, pcie),
        _Hop(Medium.PCIE, far & ~grouped, ends, rates.pageable),
        _Hop(Medium.NETWORK, far & grouped, ends, rates.network),
        _Hop(Medium.NETWORK, far & ~grouped, between, rates.tcp),
    ]


def link_statistics(
    plan: Plan, link_settings: LinkSettings, *, hosts: Hosts, beside: Mapping[int, int], rates: Rates | None = None
) -> LinkStatistics:
    """Estimate the time of a plan whose messages go certain link_settings.

    hosts: of every process. beside: by receiver, the source on its device; other receivers have devices of their own.
    """
    of = plan.columns
    num_places = 1 + int(max(of["source"].max(initial=0), of["receiver"].max(initial=0)))
    hops = _hops(of, link_settings, num_places, hosts, beside, rates or Rates())
    num_buckets = 1 + int(of["bucket"].max(initial=0))
    longest, loads = np.zeros(num_buckets), list[LinkLoad]()
    for medium in Medium:
        seconds, sizes = np.zeros((2, num_buckets * num_places)), np.zeros((2, num_places))
        for hop in (hop for hop in hops if hop.medium is medium):
            weights, bucket = of["num_bytes"][hop.chosen], of["bucket"][hop.chosen]
            for i, place in enumerate(hop.places):
                where = place[hop.chosen]
                seconds[i] += np.bincount(bucket * num_places + where, weights / hop.rate, seconds.shape[1])
                sizes[i] += np.bincount(where, weights, num_places)
        busy = seconds.reshape(2, num_buckets, num_places)
        longest = np.maximum(longest, busy.max(axis=(0, 2)))
        most = float(busy.sum(axis=1).max())
        loads.append(
            LinkLoad(medium=medium, num_bytes=int(sizes[1].sum()), busiest_bytes=int(sizes.max()), seconds=most)
        )
    bound = max(load.seconds for load in loads)
    return LinkStatistics(
        link_settings=link_settings, loads=tuple(loads), seconds=float(longest.sum()), bound_seconds=bound
    )


def fastest_link_settings(
    plan: Plan, grouped: bool, ipc: bool, *, hosts: Hosts, beside: Mapping[int, int]
) -> LinkSettings:
    """Choose whether messages within hosts go over NCCL, if those between hosts may, by the estimated time; if it is
    the same, they do, because this takes no memory of the host.
    """
    group, memory = (LinkSettings(grouped=grouped, nearby=nearby, ipc=ipc) for nearby in (True, False))
    if not grouped:
        return memory
    both = [link_statistics(plan, link_settings, hosts=hosts, beside=beside) for link_settings in (group, memory)]
    return min(both, key=lambda each: each.seconds).link_settings
