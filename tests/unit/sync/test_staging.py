"""The memory in which processes stage messages: as planned, so allocated, and given back after a sync."""

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.cluster.sync_plan import bridge_plan, plan_input_of
from megarl.config.generation import SyncConfig
from megarl.config.load import from_dict, packaged
from megarl.config.schema import Config
from megarl.sync.plan.build import Plan, WeightMessage
from megarl.sync.transport.point_to_point import Exchange
from megarl.sync.transport.process_plans import staging_of
from megarl.sync.transport.ring import BufferPlace, Ring
from megarl.sync.transport.table import TRANSPORTS
from megarl.sync.transport.transports import Staging
from megarl.weights.families import read_model_spec
from tests.unit.sync.test_ends import NUM_RANKS, make_plan, make_slices, open_ends, run

GIB = 1 << 30


def messages(*messages: Sequence[int]) -> list[WeightMessage]:
    """Of (bucket, source, receiver, bytes); turns count a pair's messages."""
    turns = dict[tuple[int, int], int]()
    made = []
    for bucket, source, receiver, num_bytes in messages:
        turns[source, receiver] = turn = turns.get((source, receiver), -1) + 1
        made.append(WeightMessage(bucket, turn, source, receiver, False, (), num_bytes))
    return made


# Ranks 0 and 1 here; workers 4 and 5 on other hosts, and 6 on this one. In units of 512 bytes: rank 0 sends 1 + 3 in
# bucket 2, then 2, then 4.
SENT = messages((2, 0, 5, 512), (2, 0, 4, 1025), (5, 0, 4, 1024), (9, 0, 5, 2048))


def test_a_bucket_lies_in_one_slot_and_slots_take_turns() -> None:
    """Messages to one receiver lie side by side, each at a multiple of 512."""
    ring = Ring(SENT)
    assert ring.places == {
        (0, 4, 0): BufferPlace(0, 0),
        (0, 5, 0): BufferPlace(0, 1536),
        (0, 4, 1): BufferPlace(1, 0),
        (0, 5, 1): BufferPlace(2, 0),
    }
    assert ring.bucket_bytes == [2048, 1024, 2048]
    assert ring.slot_bytes == [2048, 1024]
    assert Ring([]).slot_bytes == []


def test_every_transport_counts_what_its_end_allocates() -> None:
    """Passed on: worker 6 beside rank 0 gets from ranks 2 and 3 in buckets 2 and 5."""
    assert TRANSPORTS.get("gloo").staging(SENT, 0) == Staging(host=3072)
    assert TRANSPORTS.get("NCCL").staging(SENT, 0) == Staging(device=3072)
    passed = messages((2, 2, 6, 512), (2, 3, 6, 512), (5, 2, 6, 100))
    both = sorted([*SENT, *passed], key=lambda message: message.bucket)
    # Slots of 2048 + 1024 and of 1024 + 512; beyond, of 1024 and of 512.
    assert TRANSPORTS.get("NCCL, then CUDA IPC").staging(both, 0) == Staging(device=4608 + 1536)
    assert TRANSPORTS.get("NCCL, then shared memory").staging(both, 0) == Staging(device=4608, host=1536)
    assert TRANSPORTS.get("NCCL, then CUDA IPC").staging(passed, 6) == Staging()
    # Segments: of (0, 4) 1025 and 1024, of (0, 5) 512 and 2048. Receivers map those of senders.
    assert TRANSPORTS.get("shared memory").staging(SENT, 0) == Staging(host=4609)
    assert TRANSPORTS.get("CUDA IPC").staging(SENT, 0) == Staging(device=4609)
    assert TRANSPORTS.get("shared memory").staging(SENT, 4) == Staging()
    # All is kept, the largest is packed, and each begins with 8 bytes: 1033 + 1032 + 520 + 2056.
    assert TRANSPORTS.get("differences over shared memory").staging(SENT, 0) == Staging(host=4609 + 2048 + 4641)


def test_many_pairs_take_no_more_than_two_buckets() -> None:
    """As with 128 devices: a rank sends to a hundred workers, in a bucket to each."""
    plan = Plan(
        specs={},
        needs={},
        messages=tuple(messages(*((i, 0, 1 + i, 1 << 20) for i in range(100)))),
        hosts={i: i for i in range(101)},
    )
    found = staging_of(plan, SyncConfig(host_group="device"))
    assert found[0] == Staging(device=2 << 20)
    assert set(list(found.values())[1:]) == {Staging(device=1 << 20)}


@pytest.mark.parametrize("transport", ["two hosts", "over devices", "passed on"])
def test_exchanges_allocate_what_is_estimated_and_free_it(
    transport: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of every process; what is NCCL's with CUDA is gloo's here, in host memory."""
    slots = dict[int, dict[int, weakref.ref[torch.Tensor]]]()
    sizes = dict[int, dict[int, int]]()
    bytes_of = Exchange._bytes_of

    def noting(end: Any, message: WeightMessage) -> torch.Tensor:
        buffer = bytes_of(end, message)
        slot = buffer._base
        slots.setdefault(id(end), {})[slot.data_ptr()] = weakref.ref(slot)
        sizes.setdefault(id(end), {})[slot.data_ptr()] = slot.untyped_storage().nbytes()
        return buffer

    monkeypatch.setattr(Exchange, "_bytes_of", noting)
    ranks = make_slices()
    plan = make_plan(ranks, 200)
    senders, receivers = open_ends(plan, transport, tmp_path)
    ends = [end for each in (*senders, *receivers) for end in each._transport._ends if isinstance(end, Exchange)]
    name = {"two hosts": "gloo", "over devices": "NCCL", "passed on": "NCCL, then shared memory"}[transport]
    estimated = {}
    for process, each in enumerate([*senders, *receivers]):
        its = TRANSPORTS.get(name).staging(each._share.transports.get(name, ()), process)
        estimated[process] = its.device if name == "NCCL, then shared memory" else its.device + its.host
    for transfer in (1, 2):
        slots.clear()
        sizes.clear()
        run(senders, receivers, ranks, transfer)
        allocated = {end._rank: sum(sizes.get(id(end), {}).values()) for end in ends}
        assert allocated == {process: size for process, size in estimated.items() if process in allocated}
        assert sum(allocated.values()) == sum(estimated.values()) > 0
        gc.collect()
        assert not [slot for each in slots.values() for slot in each.values() if slot() is not None]
    assert NUM_RANKS in allocated or transport == "passed on"


@pytest.mark.long
def test_a_rank_of_128_stages_at_most_a_gibibyte() -> None:
    """Qwen3-235B-A22B, whose Exchange alone kept 18 to 19 GiB when each pair of processes had buffers of its own."""
    spec = read_model_spec(packaged("configs/model/hf/qwen3-235b-a22b"))
    layout = {"tp": 4, "pp": 8, "dp": 4, "ep": 16, "first_stage_layers": 11, "last_stage_layers": 11}
    tree = {
        "actor": {"layout": layout},
        "rollout": {"engine": {"num_engines": 16, "tp": 8}},
        "placement": {"trainer": {"num_nodes": 16}},
        "sync": {"host_group": "device", "cuda_ipc": True},
    }
    config = from_dict(Config, tree)
    engine = config.rollout.engine
    plan_input = plan_input_of(spec, config.model, config.actor, engine, config.sync)
    found = staging_of(bridge_plan(plan_input, engine, config.placement), config.sync)
    assert len(found) == 256
    assert max(each.device for each in found.values()) <= GIB
    assert max(each.host for each in found.values()) <= GIB
