"""Start runs while another user connects to every port that appears, and count the groups that it joins; as root:

    python -m megarl_lab.bench.forged_joins --out DIR --starts 50
    python -m megarl_lab.bench.forged_joins --out DIR --starts 50 --of groups
    python -m megarl_lab.bench.forged_joins --out DIR --starts 20 --of plain

Each start is a whole run of one step, with an engine of two workers and two trainer ranks, in a network namespace that
has only the runs and the stranger. The stranger speaks gloo: to whom takes it for a peer, it sends a pickle that runs
code. With `--of groups` two processes only make a group as those of runs do, which takes seconds; with `--of plain` as
torch does, which shows how often the stranger is quick enough. Prints a line per start. Exits with 1 if a group was
joined, code ran, or a process failed.
"""

import argparse
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

from megarl_lab.bench.kill_resume import SmallRun, make_inputs

# The stranger: another user, which sees the ports of all others. `sys.argv`: the file that its code would write.
_STRANGER = r"""
import pickle, selectors, socket, struct, sys
class Code:
    def __reduce__(self):
        return exec, (f"import os; open({sys.argv[1]!r}, 'a').write(str(os.getpid()) + '\\n')",)
payload, tables, mine = pickle.dumps(Code()), [open("/proc/net/tcp"), open("/proc/net/tcp6")], str(65534)
waiting, seen, held = selectors.EpollSelector(), set(), {}
def tell(*words):
    print(*words, flush=True)
def look():
    for table in tables:
        table.seek(0)
        for line in table.readlines()[1:]:
            words = line.split()
            if words[3] != "0A" or words[7] == mine or words[9] in seen:
                continue
            seen.add(words[9])
            address, port = words[1].split(":")
            for number in (0, 1):
                caller = socket.socket()
                try:
                    there = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else "127.0.0.1"
                    caller.connect(("127.0.0.1" if there == "0.0.0.0" else there, int(port, 16)))
                    # Gloo numbers the connections of a port.
                    caller.sendall(struct.pack("q", number))
                except OSError:
                    continue
                caller.setblocking(False)
                waiting.register(caller, selectors.EVENT_READ)
                held[caller] = b""
            tell("port", int(port, 16))
def hear(caller):
    try:
        got = caller.recv(1 << 16)
    except BlockingIOError:
        return
    except OSError:
        got = b""
    if not got:
        waiting.unregister(caller)
        del held[caller]
        return
    held[caller] += got
    while len(held[caller]) >= 48:
        size, kind, slot, offset, length, _ = struct.unpack("6Q", held[caller][:48])
        # Other answers, such as HTTP, do not come from a group.
        if not 48 <= size <= 60000 or kind > 8:
            held[caller] = b""
            return
        whole = size if kind < 2 else 48
        if len(held[caller]) < whole:
            return
        held[caller] = held[caller][whole:]
        tell("joined", caller.getpeername()[1], "operation", kind, "length", length)
        try:
            if kind == 3 and length <= 60000:
                said = struct.pack("q", len(payload)) if length == 8 else payload
                said = said[:length].ljust(length, b"\0")
                caller.sendall(struct.pack("6Q", 48 + length, 1, slot, 0, length, 0) + said)
            elif kind == 2:
                caller.sendall(struct.pack("6Q", 48, 3, slot, 0, length, 0))
        except OSError:
            pass
while True:
    look()
    for key, _ in waiting.select(0.001):
        hear(key.fileobj)
"""
_BECOME = """
import encodings.idna, os, pickle, selectors, socket, struct, sys
os.chdir("/"); os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3)
exec(sys.argv.pop(1))
"""
_GROUP = """
import datetime, sys, torch.distributed as dist
from megarl.host.device.gloo import close_gloo
if sys.argv[3] != "plain": close_gloo()
wait = datetime.timedelta(seconds=30)
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2, timeout=wait)
for source in (0, 1, 0, 1):
    dist.broadcast_object_list([source], src=source)
dist.destroy_process_group()
"""
_CLONE_NEWNET = 0x40000000
SETTINGS = (
    "trainer.total_steps=1",
    "actor.optimizer.warmup_steps=0",
    "data.val=[]",
    "rollout.engine={tp: 2, num_engines: 1}",
)


def leave_the_network() -> None:
    """Move this process, and those that it starts, into a network of their own that has only a loopback."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise SystemExit(f"no network namespace: {os.strerror(ctypes.get_errno())}; start this as root")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        # SIOCSIFFLAGS: up and running.
        fcntl.ioctl(control, 0x8914, struct.pack("16sh", b"lo", 0x41))


def attack(out: Path, number: int, of: str) -> tuple[bool, bool, bool]:
    """Start processes beside a stranger, and print a row; return whether it joined, its code ran, or one failed."""
    # The stranger's code would run as the user of the run.
    marks, store, began = out / f"code{number}", out / f"store{number}", time.monotonic()
    stranger = subprocess.Popen(
        [sys.executable, "-c", _BECOME, _STRANGER, str(marks)], stdout=subprocess.PIPE, env={"PATH": os.defpath}
    )
    if of != "runs":
        ranks = [subprocess.Popen([sys.executable, "-c", _GROUP, str(store), str(rank), of]) for rank in range(2)]
    else:
        ranks = [SmallRun(inputs=out, name=f"run{number}", settings=SETTINGS).start()]
    exit_codes = [rank.wait() for rank in ranks]
    stranger.kill()
    told = stranger.communicate()[0].decode().splitlines()
    num_ports, num_joins = (sum(line.startswith(word) for line in told) for word in ("port", "joined"))
    num_codes = len(marks.read_text(encoding="utf-8").split()) if marks.exists() else 0
    seconds = time.monotonic() - began
    print(f"| {number} | {seconds:.0f} | {num_ports} | {num_joins} | {num_codes} | {exit_codes} |", flush=True)
    return bool(num_joins), bool(num_codes), any(exit_codes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="an empty directory to work in")
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--of", choices=("runs", "groups", "plain"), default="runs", help="what is started")
    arguments = parser.parse_args()
    leave_the_network()
    make_inputs(arguments.out)
    print("| start | seconds | ports called | messages of groups | code ran | exit codes |\n|---|---|---|---|---|---|")
    outcomes = [attack(arguments.out, number, arguments.of) for number in range(arguments.starts)]
    num_joined, num_codes, num_ended = map(sum, zip(*outcomes, strict=True))
    print(f"{len(outcomes)} starts: {num_joined} joined, code ran in {num_codes}, {num_ended} ended by a failure")
    raise SystemExit(bool(num_joined or num_codes or num_ended))


if __name__ == "__main__":
    main()
