"""Which transport carries the messages of a link, and what each process is told of the transports that it opens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.config.generation import SyncConfig
from megarl.errors import WeightSyncError
from megarl.registry import RegistrationError, noting
from megarl.sync.plan.build import build_plan
from megarl.sync.transport.process_plans import process_plans_of
from megarl.sync.transport.rendezvous import Rendezvous
from megarl.sync.transport.table import TRANSPORTS, register_transport, transport_for
from megarl.sync.transport.transports import Link, ProcessPlan, key_of
from megarl.weights.safetensors_map import TensorSpec

APART = Link(same_host=False, same_device=False, beside_rank=False, host_group="gloo", cuda_ipc=True, delta=False)
BESIDE = replace(APART, beside_rank=True)
NEAR = replace(BESIDE, same_host=True)
NEIGHBOURS = replace(NEAR, same_device=True)


@pytest.mark.parametrize(
    ("link", "transport"),
    [
        (NEIGHBOURS, "CUDA IPC"),
        (replace(NEIGHBOURS, host_group="device", delta=True), "CUDA IPC"),
        (replace(NEIGHBOURS, cuda_ipc=False), "shared memory"),
        # Differences of what need not travel would only cost time.
        (replace(NEIGHBOURS, cuda_ipc=False, delta=True), "shared memory"),
        (NEAR, "shared memory"),
        (replace(NEAR, host_group="device"), "shared memory"),
        (replace(NEAR, delta=True), "differences over shared memory"),
        (APART, "gloo"),
        (BESIDE, "gloo"),
        (replace(APART, delta=True), "differences over gloo"),
        (replace(APART, host_group="device"), "NCCL"),
        (replace(BESIDE, host_group="device"), "NCCL, then CUDA IPC"),
        (replace(BESIDE, host_group="device", cuda_ipc=False), "NCCL, then shared memory"),
        # Within a host, where that is faster than the host's memory.
        (replace(NEAR, host_group="device", nearby=True), "NCCL, then CUDA IPC"),
        (replace(NEAR, host_group="device", nearby=True, cuda_ipc=False), "NCCL, then shared memory"),
        (replace(NEAR, host_group="device", nearby=True, beside_rank=False), "NCCL"),
        (replace(NEIGHBOURS, host_group="device", nearby=True), "CUDA IPC"),
        (replace(NEIGHBOURS, host_group="device", nearby=True, cuda_ipc=False), "shared memory"),
    ],
)
def test_the_first_transport_that_fits_a_link_carries_its_messages(link: Link, transport: str) -> None:
    assert transport_for(link).name == transport


def test_a_transport_of_a_user_comes_before_the_others() -> None:
    own = replace(TRANSPORTS.get("gloo"), name="own", fits=lambda link: link.delta)
    with noting() as noted:
        assert register_transport(own) is own
    try:
        assert transport_for(replace(NEIGHBOURS, delta=True)).name == "own"
        assert transport_for(NEIGHBOURS).name == "CUDA IPC"
        with pytest.raises(RegistrationError, match="transport 'own' is already registered"):
            register_transport(own)
    finally:
        noted[0].undo()


@pytest.mark.parametrize("link", [APART, BESIDE])
def test_a_link_that_no_transport_fits_is_an_error_with_a_remedy(link: Link) -> None:
    """Differences are made in host memory, from which NCCL does not send."""
    with pytest.raises(
        WeightSyncError, match=r"got Link\(same_host=False, .*delta=True, .*\), expected .*set sync\.delta=false"
    ):
        transport_for(replace(link, host_group="device", delta=True))


def make_process_plans(
    settings: SyncConfig, beside: dict[int, int], hosts: Sequence[str] = ("x", "y", "x", "y")
) -> list[ProcessPlan]:
    """Two ranks, on two hosts by default, each have a row, which a worker on either host needs: both need both."""
    specs = {"a": TensorSpec(shape=(2, 1), dtype=torch.float32)}
    rows, both = [((0, 1), (0, 1)), ((1, 2), (0, 1))], ((0, 2), (0, 1))
    plan = build_plan(
        specs,
        {rank: {"a": (rows[rank],)} for rank in (0, 1)},
        {receiver: {"a": (both,)} for receiver in (2, 3)},
        neighbours={receiver: [rank] for receiver, rank in beside.items()},
    )
    rendezvous = Rendezvous(address="tcp://127.0.0.1:1", rank=0, size=1, timeout_s=1.0, secret=b"")
    return process_plans_of(
        plan, settings, rendezvous, hosts=hosts, num_ranks=2, beside=beside, segments=Path("segment")
    )


def carried(process_plan: ProcessPlan) -> dict[str, list[tuple[int, int]]]:
    """By transport, the source and receiver of each message."""
    return {
        transport: sorted(key_of(m)[:2] for m in messages) for transport, messages in process_plan.transports.items()
    }


def test_both_ends_are_told_the_same_transport() -> None:
    shares = make_process_plans(SyncConfig(cuda_ipc=False), {})
    assert [carried(process_plan) for process_plan in shares] == [
        {"shared memory": [(0, 2)], "gloo": [(0, 3)]},
        {"shared memory": [(1, 3)], "gloo": [(1, 2)]},
        {"shared memory": [(0, 2)], "gloo": [(1, 2)]},
        {"shared memory": [(1, 3)], "gloo": [(0, 3)]},
    ]
    assert [(process_plan.rendezvous.rank, process_plan.rendezvous.size) for process_plan in shares] == [
        (i, 4) for i in range(4)
    ]


def test_a_rank_passes_on_what_other_hosts_send_to_the_worker_on_its_device() -> None:
    """Both messages between hosts pass both ranks; the group has no other members."""
    shares = make_process_plans(SyncConfig(cuda_ipc=True, host_group="device"), {2: 0, 3: 1})
    both = [(0, 3), (1, 2)]
    assert [carried(process_plan) for process_plan in shares] == [
        {"CUDA IPC": [(0, 2)], "NCCL, then CUDA IPC": both},
        {"CUDA IPC": [(1, 3)], "NCCL, then CUDA IPC": both},
        {"CUDA IPC": [(0, 2)], "NCCL, then CUDA IPC": [(1, 2)]},
        {"CUDA IPC": [(1, 3)], "NCCL, then CUDA IPC": [(0, 3)]},
    ]
    assert {process_plan.rendezvous.size for process_plan in shares} == {2}


@pytest.mark.parametrize(
    ("settings", "transport"),
    [
        (SyncConfig(cuda_ipc=True, host_group="device"), "NCCL, then CUDA IPC"),
        (SyncConfig(cuda_ipc=True), "shared memory"),
        (SyncConfig(cuda_ipc=True, delta=True), "differences over shared memory"),
    ],
)
def test_ranks_of_one_host_pass_on_what_their_devices_links_carry_faster_than_its_memory(
    settings: SyncConfig, transport: str
) -> None:
    """NVLink is faster than PCIe, so that nothing but the flags is left to the host's memory."""
    shares = make_process_plans(settings, {2: 0, 3: 1}, hosts=["x"] * 4)
    assert [carried(process_plan) for process_plan in shares[2:]] == [
        {"CUDA IPC": [(0, 2)], transport: [(1, 2)]},
        {"CUDA IPC": [(1, 3)], transport: [(0, 3)]},
    ]
    assert {process_plan.rendezvous.size for process_plan in shares} == {2 if transport.startswith("NCCL") else 4}


def test_workers_with_devices_of_their_own_join_the_ranks_of_their_host() -> None:
    shares = make_process_plans(SyncConfig(host_group="device"), {}, hosts=["x"] * 4)
    assert [set(process_plan.transports) for process_plan in shares] == [{"NCCL"}] * 4
