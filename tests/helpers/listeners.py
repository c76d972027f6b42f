"""List the TCP sockets on which the processes of a run listen, by what the processes are."""

import re
from pathlib import Path
from typing import NamedTuple

from megarl.host.janitor import RunScope
from megarl.host.listeners import listeners


class Listener(NamedTuple):
    """A socket that accepts connections: what its process is, and the address and port that it is bound to."""

    process: str
    address: str
    port: int


def listeners_of(run_id: str, *own: int) -> list[Listener]:
    """List the listening TCP sockets of this host's processes that belong to a run, and of the processes `own`."""
    found = listeners((*own, *RunScope(run_id=run_id).processes()))
    return sorted({Listener(kind_of(each.pid), each.address, each.port) for each in found})


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
