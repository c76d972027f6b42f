"""Find out how much of this host's memory a run may use."""

import os
from collections.abc import Mapping
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int:
    """Return this host's memory in bytes, or as much as this container may use of it."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits()])


def listed(needs: Mapping[str, int]) -> str:
    """Write in GiB how many bytes are needed in all, and by what.

    >>> listed({"a trainer": 3 << 30, "a checkpoint": 1 << 30, "nothing": 0})
    '4 GiB: 3 for a trainer, 1 for a checkpoint'
    """
    parts = ", ".join(f"{size / 2**30:,.0f} for {what}" for what, size in needs.items() if size)
    return f"{sum(needs.values()) / 2**30:,.0f} GiB: {parts}"


def memory_limits() -> list[int]:
    """Return the limit of this container's memory in bytes, if it has one."""
    limits = [file.read_text(encoding="utf-8").strip() for file in map(Path, _CGROUP_LIMITS) if file.is_file()]
    return [int(limit) for limit in limits if limit.isdigit()][:1]
