"""List the TCP sockets on which the processes of a run listen, as Linux shows them."""

import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megarl.host.janitor import RunScope

_LISTEN = "0A"


class Listener(NamedTuple):
    """A socket that accepts connections: what its process is, and the address and port that it is bound to."""

    process: str
    address: str
    port: int


def listeners_of(run_id: str, *own: int) -> list[Listener]:
    """List the listening TCP sockets of this host's processes that belong to a run, and of the processes `own`, each
    in its network namespace.
    """
    found = set[Listener]()
    for pid in (*own, *RunScope(run_id=run_id).processes()):
        with suppress(FileNotFoundError, ProcessLookupError):
            bound, kind = _bound(pid), kind_of(pid)
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                # It may have been closed meanwhile, as the one by which this directory is read.
                with suppress(FileNotFoundError):
                    held = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    found |= {Listener(kind, *place) for inode, place in bound.items() if held == f"socket:[{inode}]"}
    return sorted(found)


def kind_of(pid: int) -> str:
    """Return what a process is, without what differs between runs: `raylet`, `RankActor`, `megarl`."""
    words = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    if words[0].startswith("ray::"):
        return re.split(r"[.: ]", words[0].removeprefix("ray::"))[0]
    if "-m" in words:
        return words[words.index("-m") + 1]
    script = next((word for word in words if word.endswith(".py")), words[0])
    if script.endswith("python"):
        script = words[1]
    return "/".join(Path(script).parts[-2:]) if script.endswith(".py") else Path(script).name


def _bound(pid: int) -> dict[str, tuple[str, int]]:
    """Return the addresses and ports at which sockets listen in a process's network namespace, by their inodes."""
    bound = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTEN:
                address, _, port = local.partition(":")
                # In words of 32 bits, each in the order of this machine.
                raw = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
                bound[inode] = (socket.inet_ntop(family, raw), int(port, 16))
    return bound
