"""Keep Ray running on one host of a run and clean up after it: `python -m megarl.launch.host`, started by srun."""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from megarl.errors import ConfigError
from megarl.host.device.platform import apply_environment
from megarl.host.janitor import Janitor, clean_up, end_processes, scopes_of
from megarl.host.listeners import LOOPBACK
from megarl.host.ray_environment import RAY_ENVIRONMENT, TOKEN_VARIABLE, health_checks, keep_worker_logs
from megarl.host.sharing import adopt_umask
from megarl.host.streams import escape_unencodable, print_lines, use_utf8_mode
from megarl.host.temp_dir import RAY_DIRECTORY, local_caches
from megarl.launch.allocation import address_towards, free_ports, interface_of

# How long processes get to end; Slurm may kill what is left 3 s after its first signal.
HURRY_S = 1.0


def main() -> None:
    """Start Ray, wait until it ends or SIGTERM comes, and clean up. The exit code is 0 only after SIGTERM."""
    use_utf8_mode()
    escape_unencodable()
    adopt_umask()
    parser = argparse.ArgumentParser(prog="python -m megarl.launch.host", description=__doc__)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--job-id", type=int, required=True)
    parser.add_argument("--head", required=True, help="HOST:PORT of Ray on the first host")
    parser.add_argument("--num-cpus", type=int, required=True, help="logical CPUs, for placement")
    parser.add_argument("--object-store-mib", type=int, required=True)
    parser.add_argument("--node-timeout-s", type=float, required=True, help="silence after which a host is lost")
    parser.add_argument("--logs", type=Path, required=True, help="where logs go, a directory per host")
    arguments = parser.parse_args()
    head, _, port = arguments.head.partition(":")
    address = address_towards(head, int(port))
    # Workers inherit all of this from Ray. Variables that the user exported win.
    os.environ.setdefault("MEGARL_HOST_ADDRESS", address)
    for name, value in (interface_variables(address) | local_caches()).items():
        os.environ.setdefault(name, value)
    os.environ.update(apply_environment())
    for name, value in (RAY_ENVIRONMENT | health_checks(arguments.node_timeout_s)).items():
        os.environ.setdefault(name, value)
    for earlier in scopes_of(f"{arguments.job_id}-"):
        # Clean up after earlier attempts of this job that were killed together with their janitors.
        clean_up(earlier)
    if TOKEN_VARIABLE not in os.environ:
        sys.exit(
            f"{socket.gethostname()}: {TOKEN_VARIABLE} is not set here, but Ray would let everybody in without; make "
            "srun hand the job's environment on (--export=ALL in MEGARL_SRUN_ARGS)"
        )
    try:
        janitor = Janitor(arguments.run_id)
    except ConfigError as error:
        sys.exit(f"{socket.gethostname()}: {error}")
    code = 1
    try:
        with _stop_on_sigterm() as stopped:
            # This process now ignores SIGUSR1, and its children inherit that.
            command = _ray_command(arguments, address, janitor.temp_dir / RAY_DIRECTORY)
            environment = os.environ | {"TMPDIR": str(janitor.temp_dir)}
            code = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, env=environment).returncode
        if not stopped:
            print_lines(f"{socket.gethostname()}: Ray ended by itself with exit code {code}")
    finally:
        end_processes(janitor.scope, settle_s=0, grace_s=HURRY_S)
        keep_worker_logs(janitor.scope, arguments.logs / socket.gethostname())
        janitor.close()
    sys.exit(0 if stopped else code or 1)


class _StoppedError(Exception):
    """The error that ends the wait for Ray when SIGTERM arrives."""


@contextlib.contextmanager
def _stop_on_sigterm() -> Iterator[list[int]]:
    """End the body of this context when SIGTERM arrives, and put it into the yielded list. SIGUSR1 is ignored."""
    received: list[int] = []

    def stop(signum: int, _: FrameType | None) -> None:
        if not received:
            received.append(signum)
            raise _StoppedError

    signal.signal(signal.SIGTERM, stop)
    # SIGUSR1 is meant for the driver, but Slurm may send it to all processes.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with contextlib.suppress(_StoppedError):
        yield received


def interface_variables(address: str) -> dict[str, str]:
    """Return by which interface this host reaches others, at its address on the route to the first host."""
    if address == LOOPBACK:
        return {}
    name = interface_of(address)
    # To NCCL, a name without = is the beginning of names: eth1 is eth10 too.
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def _ray_command(arguments: argparse.Namespace, address: str, temp_dir: Path) -> list[str]:
    head, _, port = arguments.head.partition(":")
    # Each attempt draws other ports, in case a process takes one before Ray does.
    client, agent = free_ports(2)
    own = (
        ["--head", f"--port={port}", f"--ray-client-server-port={client}", "--include-dashboard=false"]
        if address == head
        else [f"--address={arguments.head}"]
    )
    return [
        str(Path(sys.executable).with_name("ray")),
        "start",
        *own,
        f"--node-ip-address={address}",
        f"--dashboard-agent-listen-port={agent}",
        # Any free ports: by default, all jobs on a host take theirs from one small range.
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--num-cpus={arguments.num_cpus}",
        f"--object-store-memory={arguments.object_store_mib << 20}",
        f"--temp-dir={temp_dir}",
        "--disable-usage-stats",
        "--block",
    ]


if __name__ == "__main__":
    main()
