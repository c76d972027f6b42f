"""Bind processes to the CPUs and the memory next to their devices, on hosts with several NUMA nodes."""

import contextlib
import ctypes
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

_LIBRARY = "libnuma.so.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaTopology:
    """The CPUs of each NUMA node of a host that has any, and the node of each device by its address on the PCI bus."""

    cpus: Mapping[int, frozenset[int]]
    nodes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaBinding:
    """The CPUs to bind a process to, and the node whose memory it takes first; None: that of whichever CPU asks."""

    cpus: frozenset[int]
    memory_node: int | None


def parse_cpus(text: str) -> frozenset[int]:
    """Read a list of CPUs as Linux writes it, such as 0-3,8,10-11."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))


def read_topology(addresses: Collection[str], root: Path = Path("/sys")) -> NumaTopology:
    """Read the NUMA nodes of this host, and those of devices at addresses such as 0000:19:00.0, as far as they are
    known.
    """
    files = root.glob("devices/system/node/node[0-9]*/cpulist")
    lists = {file.parent.name: parse_cpus(file.read_text(encoding="ascii")) for file in files}
    # Nodes without CPUs are memory of devices.
    cpus = {int(name.removeprefix("node")): found for name, found in lists.items() if found}
    nodes = {address: root / "bus/pci/devices" / address / "numa_node" for address in addresses}
    return NumaTopology(
        cpus=cpus, nodes={a: int(f.read_text(encoding="ascii")) for a, f in nodes.items() if f.is_file()}
    )


def choose_binding(topology: NumaTopology, addresses: Collection[str], allowed: Collection[int]) -> NumaBinding | None:
    """Choose the CPUs next to devices among those that a process may use, and the memory if it is all on one node.

    Returns None where there is nothing to choose: on one node, without devices, for devices whose node is not known (in
    a virtual machine, say), and for those next to no CPU that is allowed.
    """
    nodes = {topology.nodes.get(address, -1) for address in addresses}
    if len(topology.cpus) < 2 or not nodes or not nodes <= topology.cpus.keys():
        return None
    near = frozenset(cpu for node in nodes for cpu in topology.cpus[node]) & frozenset(allowed)
    return NumaBinding(cpus=near, memory_node=min(nodes) if len(nodes) == 1 else None) if near else None


def bind_process(addresses: Collection[str], root: Path = Path("/sys")) -> NumaBinding | None:
    """Bind this process, and those that it will start, next to devices at these addresses; return how, if at all.

    Only threads that start later follow. Memory comes from another node if the nearest has none left.
    """
    binding = choose_binding(read_topology(addresses, root), addresses, os.sched_getaffinity(0))
    if binding is not None:
        os.sched_setaffinity(0, binding.cpus)
        if binding.memory_node is not None:
            # Without the library, Linux takes memory from the node of the CPU that first writes to it.
            with contextlib.suppress(OSError):
                library = ctypes.CDLL(_LIBRARY)
                if library.numa_available() >= 0:
                    library.numa_set_preferred(binding.memory_node)
    return binding
