"""Run a megarl command as a Slurm job: Ray on every host, the driver here, restarts, and requeueing.

This process replaces the batch script (by exec), so that signals that Slurm sends to the script arrive here.
"""

import os
import shlex
import signal
import subprocess
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from megarl.errors import ConfigError
from megarl.host.child_environment import python_module
from megarl.host.clock import awake_s
from megarl.host.directory_lock import DirectoryLock
from megarl.host.exit_codes import EXIT_BAD_INPUT, EXIT_STOPPED
from megarl.host.janitor import HOSTED_RUN_VARIABLE, RunScope, clean_up
from megarl.host.listeners import LOOPBACK
from megarl.host.ray_environment import fresh_token
from megarl.host.sharing import VARIABLE, shared_with, umask_variable
from megarl.host.signals import keep_handlers
from megarl.host.streams import print_lines
from megarl.launch.allocation import Allocation, free_ports, own_address, slurm_says
from megarl.launch.command import JobCommand, read_command
from megarl.launch.status import FAILED, FINISHED, STOPPED, AttemptLog

POLL_S = 0.2
# The seconds that the driver gets to report a lost host once Ray must know of it, and that hosts get to clean up.
LAST_WORDS_S = 20.0
CLEAN_UP_S = 20.0
# After this many seconds, hosts that have not yet started their task are named in the log.
SIGN_OF_LIFE_S = 8.0
# With a time limit shorter than the start of a run, attempts would otherwise be repeated forever.
MAX_FRUITLESS = 3
# Arguments of the user for srun, such as those that start a container; they follow megarl's own, so they win.
SRUN_ARGS_VARIABLE = "MEGARL_SRUN_ARGS"
# How variables begin that Slurm sets for a step alone; a job that was submitted from one has those of that one.
_OF_STEPS = ("SLURM_CPU_BIND", "SLURM_MEM_BIND")
# How long a job that was put back into the queue waits for Slurm to end it.
REQUEUE_S = 120.0


@dataclass(slots=True)
class _Driver:
    """The driver process, if it runs, and the signals that were forwarded to it."""

    process: subprocess.Popen[bytes] | None = None
    signals: list[signal.Signals] = field(default_factory=list)

    def forward(self, signum: int, _: FrameType | None) -> None:
        self.signals.append(signal.Signals(signum))
        say(f"got {self.signals[-1].name}")
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signum)


def say(text: str) -> None:
    """Write a line to the job's log."""
    print_lines(f"[{time.strftime('%H:%M:%S')}] megarl job: {text}")


def run_job(argv: Sequence[str], arguments: Namespace, *, max_restarts: int) -> int:
    """Run a megarl command on all hosts of this job, and return the job's exit code, which is the driver's.

    After a failure the run starts again from its last checkpoint, up to `max_restarts` times in the job's life. After
    SIGUSR1 (the time limit is near) or a preemption the job goes back into the queue and resumes.
    """
    command, allocation = read_command(argv, arguments), Allocation.from_environment()
    command.check_components(allocation.groups)
    # The driver takes it; but nothing is to start on the hosts before.
    DirectoryLock(command.directory, arguments.command).require_free()
    logs = command.logs / f"slurm-{allocation.job_id}"
    attempts = AttemptLog(logs)
    driver, lacks, given = _Driver(), False, allocation.groups
    with keep_handlers(), shared_with(command.share, command.directory):
        for each in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, driver.forward)
        while True:
            started = time.time()
            code = _attempt(command, allocation, logs, driver, number=len(attempts.read()))
            failed = code not in (0, EXIT_BAD_INPUT) and not driver.signals
            attempts.add(started, code, FAILED if failed else STOPPED if driver.signals else FINISHED)
            if not failed:
                break
            left = max_restarts - attempts.num_failures() + 1
            say(f"the run failed with exit code {code}; {max(left, 0)} restart(s) left")
            if left <= 0:
                return code
            # Spare nodes take the places of lost ones.
            allocation = allocation.without_lost()
            if allocation.lost:
                say(f"lost so far: {', '.join(allocation.lost)}")
            if lacks := not command.goes_on(given, allocation.lost):
                break
    if code not in (0, EXIT_BAD_INPUT) and (lacks or _wants_queue(driver.signals, allocation.job_id)):
        if attempts.num_fruitless() >= MAX_FRUITLESS:
            say(f"{MAX_FRUITLESS} times in a row the job had to stop before its first step: raise its time limit")
            return code
        say("back into the queue")
        done = slurm_says("scontrol", "requeue", str(allocation.job_id))
        if done.returncode:
            say(f"scontrol requeue failed: {done.stderr.strip()}; submit the job again, it resumes")
        else:
            # Slurm ends this process during the wait.
            time.sleep(REQUEUE_S)
    return code


def _attempt(command: JobCommand, allocation: Allocation, logs: Path, driver: _Driver, *, number: int) -> int:
    """Start Ray, run the command, stop Ray. Returns the command's exit code, 128 + n after signal n."""
    if driver.signals:
        return EXIT_STOPPED
    run_id = f"{allocation.job_id}-{allocation.num_requeues}-{number}"
    # Where one host is enough, Ray would replace the loopback address by the one at which others reach it.
    (port,), head, one_host = free_ports(1), LOOPBACK, {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    if len(allocation.hosts) > 1:
        head, one_host = own_address(allocation.hosts[0]), {}
    address = f"{head}:{port}"
    # In the environment, which srun hands on, no other user sees it.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_STEPS)} | fresh_token() | one_host
    # Slurm gives tasks, and the files of their output, the umask with which the job was submitted.
    umask = umask_variable(command.share)
    environment |= umask | {"SLURM_UMASK": umask[VARIABLE]}
    here = logs / f"attempt-{number}"
    here.mkdir(parents=True, exist_ok=True)
    say(f"attempt {number} on {', '.join(allocation.hosts)}; Ray at {address}; logs in {here}")
    line = _srun(command, allocation, run_id, address, here)
    hosts = subprocess.Popen(line, env=environment, stdin=subprocess.DEVNULL)
    driver.process = subprocess.Popen(
        [*python_module("megarl.cli"), *command.on(address, allocation.groups)],
        env=environment | {HOSTED_RUN_VARIABLE: run_id, "MEGARL_HOST_ADDRESS": head},
        stdin=subprocess.DEVNULL,
    )
    try:
        # Slurm may know that a host is lost before Ray does.
        patience_s = command.cluster.node_timeout_s + LAST_WORDS_S
        return _wait(driver.process, hosts, {host: here / f"{host}.log" for host in allocation.hosts}, patience_s)
    finally:
        _stop_hosts(hosts, allocation.job_id)
        # Slurm may have killed the host's own janitor; other hosts do this when they are used again.
        clean_up(RunScope(run_id=run_id))


def _srun(command: JobCommand, allocation: Allocation, run_id: str, address: str, logs: Path) -> list[str]:
    """Return the srun command that keeps Ray running on every host, by one task per host.

    Raises ConfigError if the user's arguments for srun cannot be split into words.
    """
    given = os.environ.get(SRUN_ARGS_VARIABLE, "")
    try:
        users = shlex.split(given)
    except ValueError as error:
        raise ConfigError(
            f"{SRUN_ARGS_VARIABLE}: got {given!r}, expected arguments of srun, quoted as in a shell: {error}; correct "
            f"it where the job is submitted, or in slurm/env.sh"
        ) from error
    groups = allocation.groups
    line = ["srun"]
    for i, group in enumerate(groups):
        # Slurm separates the components of a heterogeneous job by colons.
        may_go = group is command.environment_group(groups) and len(group.hosts) > 1
        line += [":"] if i else []
        line += [f"--het-group={i}"] if len(groups) > 1 else []
        line += [
            f"--nodes={len(group.hosts)}",
            f"--ntasks={len(group.hosts)}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={group.cpus_per_host}",
            "--overlap",
            "--mem=0",
            # The run goes on when a node of environments is lost.
            *(["--kill-on-bad-exit=0", "--no-kill"] if may_go else ["--kill-on-bad-exit=1"]),
            # Where a site's default is PMIx, it would wait for tasks to join an MPI.
            "--mpi=none",
            # Slurm expands what % begins.
            f"--output={str(logs).replace('%', '%%')}/%N.log",
            *([f"--exclude={','.join(allocation.lost)}"] if allocation.lost else []),
            *users,
            *python_module("megarl.launch.host"),
            f"--run-id={run_id}",
            f"--job-id={allocation.job_id}",
            f"--head={address}",
            f"--num-cpus={command.cluster.num_cpus or group.cpus_per_host}",
            f"--object-store-mib={command.cluster.object_store_mib}",
            f"--node-timeout-s={command.cluster.node_timeout_s}",
            f"--logs={logs}",
        ]
    return line


def _wait(
    driver: subprocess.Popen[bytes], hosts: subprocess.Popen[bytes], logs: Mapping[str, Path], patience_s: float
) -> int:
    """Wait for the driver and return its exit code. A driver that outlives a host's Ray by `patience_s` is killed.

    `logs` maps each host to the log file that Slurm opens when it starts the host's task.
    """
    lost_at: float | None = None
    look_at: float | None = awake_s() + SIGN_OF_LIFE_S
    while (code := driver.poll()) is None:
        if look_at is not None and awake_s() > look_at:
            look_at = None
            if silent := [host for host, log in logs.items() if not log.exists()]:
                say(f"no sign of life from {', '.join(silent)} so far")
        if lost_at is None and hosts.poll() is not None:
            lost_at = awake_s()
            say(f"srun ended with exit code {hosts.returncode}: the run has lost a host")
        if lost_at is not None and awake_s() > lost_at + patience_s:
            say("the driver did not notice; it is ended")
            driver.kill()
            driver.wait()
        time.sleep(POLL_S)
    return code if code >= 0 else 128 - code


def _stop_hosts(hosts: subprocess.Popen[bytes], job_id: int) -> None:
    """End the job step that runs Ray; its tasks clean up at SIGTERM.

    Signalling srun itself would leave the tasks no time to clean up.
    """
    deadline = awake_s() + CLEAN_UP_S
    while hosts.poll() is None and awake_s() < deadline:
        # Signal repeatedly, because a step that is just starting ignores signals.
        slurm_says("scancel", "--signal=TERM", str(job_id))
        time.sleep(1.0)
    if hosts.poll() is None:
        say("srun did not end; it is killed")
        hosts.kill()
    hosts.wait()


def _wants_queue(signals: Sequence[signal.Signals], job_id: int) -> bool:
    """Return whether to requeue the job: after a preemption or near its time limit, but not if a user cancels it."""
    # The first decides: a step that a user stops may last until the limit is near.
    if signals[0] is signal.SIGUSR1:
        return True
    shown = slurm_says("scontrol", "-o", "show", "job", str(job_id))
    times = [word.partition("=")[2] for word in shown.stdout.split() if word.startswith("PreemptTime=")]
    return any(time not in ("None", "Unknown") for time in times)
