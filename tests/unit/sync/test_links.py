"""The estimated time of weight syncs, by arithmetic with round rates."""

from dataclasses import replace

import pytest

from megarl.sync.plan.build import Plan, WeightMessage
from megarl.sync.plan.links import LinkSettings, LinkStatistics, Medium, Rates, fastest_link_settings, link_statistics

# Bytes per second: each link is ten times as fast as the next.
RATES = Rates(device=1e5, nvlink=1e4, pcie=1e3, pageable=1e2, network=1e2, tcp=10.0)
GROUPED = LinkSettings(grouped=True, nearby=True)
# Ranks 0 and 1 on host x, rank 2 on host y; engine workers 3, 4 and 5 on their devices.
HOSTS = dict(enumerate("xxyxxy"))
BESIDE = {3: 0, 4: 1, 5: 2}


def estimate(
    messages: list[tuple[int, int, int, int]], link_settings: LinkSettings, beside: dict[int, int]
) -> LinkStatistics:
    """Of messages given as (bucket, source, receiver, bytes)."""
    messages = [
        WeightMessage(b, 0, source, receiver, beside.get(receiver) == source, (), size)
        for b, source, receiver, size in messages
    ]
    plan = Plan(specs={}, needs={}, messages=tuple(messages))
    return link_statistics(plan, link_settings, hosts=HOSTS, beside=beside, rates=RATES)


def bytes_of(found: LinkStatistics) -> dict[Medium, tuple[int, int]]:
    return {load.medium: (load.num_bytes, load.busiest_bytes) for load in found.loads if load.num_bytes}


# Within device 0, from rank 0 to device 1, and from both ranks of host x to device 2.
MESSAGES = [(0, 0, 3, 1000), (0, 0, 4, 200), (0, 0, 5, 30), (1, 1, 5, 40)]


@pytest.mark.parametrize(
    ("link_settings", "sizes", "seconds", "bound"),
    [
        # The network is busy for 0.3 and 0.4 s. What came over a group is copied into what a worker shares.
        (GROUPED, {"same device": (1270, 1000), "NVLink": (200, 200), "network": (70, 70)}, 0.7, 0.7),
        (
            replace(GROUPED, nearby=False),
            {"same device": (1070, 1000), "PCIe": (200, 200), "network": (70, 70)},
            0.7,
            0.7,
        ),
        # Device 0: 1000 bytes over PCIe in the first bucket, in the second 40 bytes over the network.
        (replace(GROUPED, ipc=False), {"PCIe": (1270, 1000), "NVLink": (200, 200), "network": (70, 70)}, 1.4, 1.0),
        # Gloo: 3 and 4 s over TCP into host y. Rank 0 also copies 200 + 30 bytes to the host.
        (
            LinkSettings(grouped=False, nearby=False),
            {"same device": (1000, 1000), "PCIe": (270, 230), "network": (70, 70)},
            7.0,
            7.0,
        ),
        # The first bucket's 200 bytes take 2 s, less than the network.
        (
            LinkSettings(grouped=False, nearby=False, page_locked=False),
            {"same device": (1000, 1000), "PCIe": (270, 230), "network": (70, 70)},
            7.0,
            7.0,
        ),
    ],
)
def test_the_busiest_link_of_each_bucket_counts(
    link_settings: LinkSettings, sizes: dict[str, tuple[int, int]], seconds: float, bound: float
) -> None:
    found = estimate(MESSAGES, link_settings, BESIDE)
    assert bytes_of(found) == sizes
    assert found.seconds == pytest.approx(seconds)
    assert found.bound_seconds == pytest.approx(bound)


def test_page_locked_segments_are_faster() -> None:
    """300 bytes of rank 0 and 500 of rank 1 to the other's device; both directions work at the same time."""
    messages = [(0, 0, 4, 300), (0, 1, 3, 500)]
    link_settings = LinkSettings(grouped=False, nearby=False)
    assert estimate(messages, link_settings, BESIDE).seconds == pytest.approx(0.5)
    assert estimate(messages, replace(link_settings, page_locked=False), BESIDE).seconds == pytest.approx(5.0)


def test_workers_with_devices_of_their_own_need_no_copy() -> None:
    """Two messages to worker 3 in one bucket share its link; another bucket of another device comes on top."""
    found = estimate([(0, 0, 3, 100), (0, 1, 3, 200), (1, 0, 4, 100)], GROUPED, {})
    assert bytes_of(found) == {Medium.NVLINK: (400, 300)}
    assert (found.seconds, found.bound_seconds) == (pytest.approx(0.04), pytest.approx(0.03))


@pytest.mark.parametrize(
    ("grouped", "source", "nearby"), [(True, 0, True), (False, 0, False), (True, 2, True)], ids=["near", "gloo", "far"]
)
def test_the_faster_way_within_hosts_is_chosen(grouped: bool, source: int, nearby: bool) -> None:
    """Without messages within hosts both take the same time."""
    plan = Plan(specs={}, needs={}, messages=(WeightMessage(0, 0, source, 4, False, (), 1 << 20),))
    chosen = fastest_link_settings(plan, grouped, ipc=True, hosts=HOSTS, beside=BESIDE)
    assert (chosen.grouped, chosen.nearby) == (grouped, nearby)
