"""A real Slurm with nodes of its own on this machine: controller and daemons, each node in namespaces (host name,
network, processes, shared memory, temporary directory), joined by a bridge. Needs root and Debian's Slurm."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.helpers.waiting import wait_until

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "iproute2", "util-linux")
CPUS_PER_NODE = 8
START_S = 30.0


class LabError(Exception):
    """Slurm did not do what the lab needs."""


def missing() -> str | None:
    """Why there can be no lab here; None if there can."""
    if os.geteuid() != 0:
        return "a lab of Slurm nodes needs root"
    if subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount-proc", "true"], capture_output=True).returncode:
        return "the kernel gives no namespaces for nodes"
    return None


def install() -> None:
    """Debian's Slurm, without starting its services."""
    if shutil.which("slurmctld") and shutil.which("slurmd") and shutil.which("ip"):
        return
    policy = Path("/usr/sbin/policy-rc.d")
    existed = policy.exists()
    if not existed:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
            done = subprocess.run(["apt-get", "-qq", *command], env=environment, capture_output=True, text=True)
            if done.returncode:
                raise LabError(f"apt-get {command[0]} failed: {done.stderr}")
    finally:
        if not existed:
            policy.unlink()


class SlurmLab:
    """Two nodes and a partition of them. `environment` makes Slurm's commands talk to it."""

    def __init__(self, *, num_nodes: int = 2) -> None:
        # Not under /tmp: the nodes' own temporary directory is a short path below it.
        self.root = Path(tempfile.mkdtemp(prefix="slab-", dir="/var/tmp"))
        self.nodes = {f"node{i}": f"10.78.0.{i}" for i in range(1, num_nodes + 1)}
        self.tmp = self.root / "t"
        self._bridge, self._controller = f"lab{os.getpid() % 100000}", "10.78.0.254"
        self._init: dict[str, int] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.root / "slurm.conf"), "MEGARL_TMPDIR": str(self.tmp)}

    def up(self) -> None:
        for name in ("state", "log", "spool", "run", "t"):
            (self.root / name).mkdir()
        (self.root / "slurm.conf").write_text(self._configuration())
        hosts = [f"{address} {node}" for node, address in self.nodes.items()]
        own = f"{self._controller} {socket.gethostname()}"
        (self.root / "hosts").write_text("\n".join(["127.0.0.1 localhost", own, *hosts, ""]))
        self._ip("link", "add", self._bridge, "type", "bridge")
        self._ip("addr", "add", f"{self._controller}/24", "dev", self._bridge)
        self._ip("link", "set", self._bridge, "up")
        self._start(["slurmctld", "-D", "-c"], "slurmctld")
        for i, (node, address) in enumerate(self.nodes.items()):
            space, veth = self._namespace(node), f"{self._bridge}{i}"
            self._ip("netns", "add", space)
            self._ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("link", "set", veth, "master", self._bridge, "up")
            self._ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "lo", "up")
            self._ip("-n", space, "link", "set", "eth0", "up")
            self.start_node(node)
        self._wait_until(
            lambda: self.query("sinfo", "-h", "-t", "idle", "-o", "%D") == str(len(self.nodes)), "idle nodes"
        )

    def down(self) -> None:
        for node in list(self._init):
            self.kill_node(node)
        for process in self._started:
            process.terminate()
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        for node in self.nodes:
            subprocess.run(["ip", "netns", "del", self._namespace(node)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True)
        shutil.rmtree(self.root, ignore_errors=True)

    def start_node(self, node: str) -> None:
        """(Re)start a node: its first process, and slurmd in it."""
        script = (
            f"hostname {node}; mount --bind {self.root}/hosts /etc/hosts; mount -t tmpfs -o size=2g tmpfs /dev/shm; "
            f"mount -t tmpfs tmpfs {self.tmp}; slurmd -D -N {node} & wait $!"
        )
        inside = ["unshare", "--uts", "--ipc", "--mount", "--propagation", "private", "--pid", "--fork"]
        command = [*inside, "--kill-child", "--mount-proc", "bash", "-c", script]
        process = self._start(["nsenter", f"--net=/run/netns/{self._namespace(node)}", *command], f"init-{node}")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        self._wait_until(lambda: bool(children.read_text().split()), f"the first process of {node}")
        self._init[node] = int(children.read_text().split()[0])

    def kill_node(self, node: str) -> None:
        """As a power cut: every process of the node is gone at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._init.pop(node), signal.SIGKILL)

    def set_link(self, node: str, state: str) -> None:
        """Plug the node's network cable in (`up`) or out (`down`)."""
        self._ip("link", "set", f"{self._bridge}{list(self.nodes).index(node)}", state)

    def processes(self, node: str, *, name: str = "") -> list[int]:
        """Processes of a node whose command line contains `name`, as this machine numbers them."""
        space = os.readlink(f"/proc/{self._init[node]}/ns/pid")
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == space:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found += [int(entry.name)] if name in command else []
        return sorted(found)

    def actors(self, node: str, cls: str) -> list[int]:
        """Processes of a node's Ray actors of a class, without what they have forked, such as writers of a checkpoint,
        which have their title.
        """
        found = {pid: Path(f"/proc/{pid}/stat") for pid in self.processes(node, name=f"ray::{cls}")}
        parents = {}
        for pid, stat in found.items():
            with contextlib.suppress(OSError):
                parents[pid] = int(stat.read_text().rpartition(")")[2].split()[1])
        return [pid for pid, parent in parents.items() if parent not in found]

    def files(self, node: str) -> list[str]:
        """What lies in the node's shared memory and temporary directory; a run's directory as `mr-ID`.

        A user's compiled kernels stay there for the next job.
        """
        root = Path(f"/proc/{self._init[node]}/root")
        found = [file for place in ("dev/shm", str(self.tmp)[1:]) for file in (root / place).iterdir()]
        found = [file for file in found if file.name != f"megarl-cache-{os.getuid()}"]
        return sorted(f"mr-{(file / 'run').read_text()}" if (file / "run").exists() else file.name for file in found)

    def query(self, *command: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LabError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout.strip()

    def sbatch(
        self, script: Path, *arguments: str, options: Sequence[str], cwd: Path, exports: Mapping[str, str] | None = None
    ) -> int:
        """Submit a job; returns its id."""
        command = ["sbatch", "--parsable", *options, str(script), *arguments]
        environment = self.environment | dict(exports or {})
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cwd, check=False)
        if done.returncode:
            raise LabError(f"sbatch: {done.stderr}")
        return int(done.stdout)

    def job(self, job_id: int) -> Mapping[str, str]:
        """What Slurm says of a job."""
        # Of a heterogeneous job there is a line for each component, its own first.
        text, *_ = self.query("scontrol", "-o", "show", "job", str(job_id)).splitlines()
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def wait(self, job_id: int, *, timeout_s: float) -> Mapping[str, str]:
        """The job once it has left Slurm's hands."""
        busy = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED")

        def output() -> str:
            file = Path(self.job(job_id)["StdOut"])
            return file.read_text() if file.exists() else ""

        def has_ended() -> bool:
            return self.job(job_id)["JobState"] not in busy

        wait_until(has_ended, f"the end of job {job_id}", timeout_s=timeout_s, seen=output, most_pause_s=0.5)
        return self.job(job_id)

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, what, timeout_s=START_S, seen=lambda: f"logs in {self.root}/log")

    def _start(self, command: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        with (self.root / "log" / f"{name}.log").open("ab") as log:
            # Nothing of it survives this process, however that ends.
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def _namespace(self, node: str) -> str:
        return f"{self._bridge}-{node}"

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def _configuration(self) -> str:
        root, last = self.root, len(self.nodes)
        port = 26000 + os.getpid() % 900
        return f"""
ClusterName=lab
SlurmctldHost={socket.gethostname()}({self._controller})
SlurmctldPort={port}
SlurmdPort={port + 1000}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldTimeout=30
SlurmdTimeout=20
KillWait=10
MinJobAge=600
JobRequeue=0
NodeName=node[1-{last}] NodeAddr=10.78.0.[1-{last}] CPUs={CPUS_PER_NODE} Sockets=1 CoresPerSocket={CPUS_PER_NODE} \
ThreadsPerCore=1 RealMemory=16000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES OverSubscribe=FORCE:2 MaxTime=60 State=UP
"""
