"""Ask how much memory this host gives to a run."""

import os
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int:
    """Return this host's memory in bytes, or as much as this container may use of it."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits()])


def memory_limits() -> list[int]:
    """Return the limit of this container's memory in bytes, if it has one."""
    limits = [file.read_text(encoding="utf-8").strip() for file in map(Path, _CGROUP_LIMITS) if file.is_file()]
    return [int(limit) for limit in limits if limit.isdigit()][:1]
