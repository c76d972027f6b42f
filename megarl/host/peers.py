"""Find out who holds the other ends of this process's connections within its host.

Gloo takes whoever connects first, and numbers its connections one by one, for the peer that it waits for. Processes of
a group pickle objects for each other, so a foreign peer could run code. The kernel knows whose a socket is.
"""

import os
from pathlib import Path

from megarl.errors import WorkerError

_ESTABLISHED = "01"
# An IPv6 socket may be connected to one of IPv4, in whose table this beginning of its addresses is missing.
_MAPPED = "0000000000000000FFFF0000"
# The columns of /proc/net/tcp after the number of the line.
_LOCAL, _REMOTE, _STATE, _UID, _INODE = 1, 2, 3, 7, 9


def check_peers() -> None:
    """Raise WorkerError if a process of another user of this host holds the other end of one of this one's TCP
    connections; nothing is known of ends on other hosts.
    """
    rows = [
        line.replace(_MAPPED, "").split()
        for family in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{family}").read_text(encoding="ascii").splitlines()[1:]
    ]
    rows = [row for row in rows if row[_STATE] == _ESTABLISHED]
    inodes = set[str]()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
        except FileNotFoundError:
            continue
    owners = {(row[_LOCAL], row[_REMOTE]): int(row[_UID]) for row in rows}
    for row in rows:
        uid = owners.get((row[_REMOTE], row[_LOCAL]), os.geteuid())
        if row[_INODE] in inodes and uid != os.geteuid():
            raise WorkerError(
                f"user {uid} of this host has connected to port {int(row[_LOCAL].rpartition(':')[2], 16)} of process "
                f"{os.getpid()}, where only other ranks of this run should; start the run again on a node that you "
                f"share with nobody"
            )
