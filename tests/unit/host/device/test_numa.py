"""Which CPUs and memory are next to which devices, on hosts that are made up."""

import ctypes
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.host.device.accelerators import nvidia_addresses
from megarl.host.device.numa import NumaBinding, NumaTopology, bind_process, choose_binding, parse_cpus, read_topology

GPU_0, GPU_1, GPU_7 = "0000:19:00.0", "0000:3b:00.0", "0000:db:00.0"
# Two sockets of four cores with two threads each, as Linux numbers them.
SOCKETS = {0: frozenset({0, 1, 2, 3, 8, 9, 10, 11}), 1: frozenset({4, 5, 6, 7, 12, 13, 14, 15})}
TWO = NumaTopology(cpus=SOCKETS, nodes={GPU_0: 0, GPU_1: 0, GPU_7: 1})


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8-11\n", SOCKETS[0]), ("5", {5}), ("0,2-2,4\n", {0, 2, 4}), ("\n", set())]
)
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize(
    ("addresses", "allowed", "expected"),
    [
        ([GPU_0], range(16), NumaBinding(cpus=SOCKETS[0], memory_node=0)),
        ([GPU_7], range(16), NumaBinding(cpus=SOCKETS[1], memory_node=1)),
        # Slurm has given the job half of each socket.
        ([GPU_7], [0, 1, 4, 5, 12], NumaBinding(cpus=frozenset({4, 5, 12}), memory_node=1)),
        # An engine over both sockets may use all CPUs, and no memory is nearer than other memory.
        ([GPU_1, GPU_7], range(16), NumaBinding(cpus=frozenset(range(16)), memory_node=None)),
        # No CPU next to the device is the job's.
        ([GPU_7], [0, 1], None),
        # A virtual machine does not say where the device is (-1), or shows no such device.
        (["0000:00:05.0"], range(16), None),
        ([], range(16), None),
    ],
)
def test_bindings_on_two_sockets(addresses: list[str], allowed: Any, expected: NumaBinding | None) -> None:
    topology = NumaTopology(cpus=SOCKETS, nodes={**TWO.nodes, "0000:00:06.0": -1})
    assert choose_binding(topology, addresses, allowed) == expected
    assert choose_binding(topology, [*addresses, "0000:00:06.0"], allowed) is None


def test_one_node_leaves_nothing_to_choose() -> None:
    one = NumaTopology(cpus={0: frozenset(range(8))}, nodes={GPU_0: 0})
    assert choose_binding(one, [GPU_0], range(8)) is None


@pytest.fixture
def sys_of(tmp_path: Path) -> Path:
    """/sys of a host with two sockets and, as Grace has it, a third node that is a device's memory."""
    for node, text in {"node0": "0-3,8-11\n", "node1": "4-7,12-15\n", "node2": "\n"}.items():
        (tmp_path / "devices/system/node" / node).mkdir(parents=True)
        (tmp_path / "devices/system/node" / node / "cpulist").write_text(text)
    for address, node in {GPU_0: 0, GPU_7: 1}.items():
        (tmp_path / "bus/pci/devices" / address).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / address / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_the_topology_is_read_from_linux(sys_of: Path) -> None:
    assert read_topology([GPU_0, GPU_1, GPU_7], sys_of) == NumaTopology(cpus=SOCKETS, nodes={GPU_0: 0, GPU_7: 1})


@pytest.mark.parametrize("library", ["none", "without nodes", "whole"])
def test_a_process_is_bound_to_cpus_and_memory(sys_of: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []

    def load(name: str) -> Any:
        if library == "none":
            raise OSError(name)
        available = 0 if library == "whole" else -1
        return SimpleNamespace(numa_available=lambda: available, numa_set_preferred=lambda node: done.append(node))

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: done.append(set(cpus)))
    monkeypatch.setattr(ctypes, "CDLL", load)
    bind_process([GPU_7], sys_of)
    assert done == [set(SOCKETS[1]), *([1] if library == "whole" else [])]
    done.clear()
    assert bind_process([GPU_1], sys_of) is None
    assert done == []


def test_nvidia_smi_knows_where_devices_are(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "0, GPU-aa, 00000000:19:00.0\n7, GPU-bb, 00000000:DB:00.0\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=listing))
    assert nvidia_addresses(["7", "0"]) == [GPU_7, GPU_0]
    assert nvidia_addresses(["GPU-bb", "MIG-cc"]) == [GPU_7]

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    assert nvidia_addresses(["0"]) == []
