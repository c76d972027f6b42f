"""Where a process of the run is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Ray's id, the address and the name of the host; there, the process id, the directory that takes stacks, and the
    ids of the devices that Ray gave the process."""

    host: str
    address: str
    device_ids: tuple[str, ...]
    hostname: str = ""
    pid: int = 0
    stacks: str = ""


NOWHERE = Location(host="", address="", device_ids=())
