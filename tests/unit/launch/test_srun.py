"""Arguments of srun that a user gives in MEGARL_SRUN_ARGS, and what slurm/container.sh gives for pyxis.

Slurm is a shim here: programs that note what they are asked for. tests/slurm has a real one.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from megarl.config.schema import ClusterConfig
from megarl.errors import ConfigError
from megarl.host import temp_dir
from megarl.host.ray_environment import health_checks
from megarl.launch import allocation, host, job
from megarl.launch.allocation import Allocation, HostGroup
from megarl.launch.command import JobCommand

ROOT = Path(__file__).parents[3]
CONTAINER = "--container-image=/shared/megarl.sqsh '--container-mounts=/shared,/my data:/data:ro'"


def srun_line(*groups: HostGroup) -> list[str]:
    command = JobCommand(argv=("train",), directory=Path("/runs/a"), cluster=ClusterConfig())
    return job._srun(command, Allocation(job_id=7, groups=groups), "7-0-0", "10.0.0.1:20000", Path("/runs/a/logs"))


def test_they_come_last_of_the_options_of_every_component(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun takes the last of two equal options, and the options of a component up to the colon."""
    groups = [HostGroup(hosts=(f"{name}1", f"{name}2"), cpus_per_host=8) for name in ("trainer", "engine")]
    monkeypatch.delenv("MEGARL_SRUN_ARGS", raising=False)
    plain = srun_line(*groups)
    monkeypatch.setenv("MEGARL_SRUN_ARGS", CONTAINER)
    line = srun_line(*groups)
    given = ["--container-image=/shared/megarl.sqsh", "--container-mounts=/shared,/my data:/data:ro"]
    starts = [i for i, word in enumerate(line) if word == sys.executable]
    assert [line[i - 2 : i] for i in starts] == [given, given]
    assert [word for word in line if word not in given] == plain


def test_hosts_get_the_time_after_which_they_count_as_lost() -> None:
    assert "--node-timeout-s=30.0" in srun_line(HostGroup(hosts=("a", "b"), cpus_per_host=8))


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_the_step_outlives_one_of_several_nodes_of_environments(num_hosts: int) -> None:
    command = JobCommand(argv=("train",), directory=Path("/runs/a"), cluster=ClusterConfig(), environment_nodes=2)
    groups = [HostGroup(hosts=hosts, cpus_per_host=8) for hosts in (("a", "b"), ("c", "d")[:num_hosts])]
    line = job._srun(command, Allocation(job_id=7, groups=tuple(groups)), "7-0-0", "10.0.0.1:7", Path("/runs/a/logs"))
    parts = " ".join(line).split(" : ")
    assert ["--kill-on-bad-exit=1" in part for part in parts] == [True, num_hosts == 1]
    assert ["--no-kill" in part for part in parts] == [False, num_hosts > 1]


def test_tasks_join_no_mpi_of_the_site() -> None:
    """Where MpiDefault is pmix, a step without MPI would wait for others to join."""
    line = srun_line(HostGroup(hosts=("a", "b"), cpus_per_host=8), HostGroup(hosts=("c",), cpus_per_host=8))
    assert line.count("--mpi=none") == 2


def test_a_host_of_two_interfaces_takes_the_one_on_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes a name for the beginning of names, unless it begins with =; Gloo does not."""

    def at(address: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(address=address)]

    interfaces = {"lo": at("127.0.0.1"), "eth10": at("192.168.0.4"), "eth1": at("10.1.0.4")}
    monkeypatch.setattr(allocation.psutil, "net_if_addrs", lambda: interfaces)
    chosen = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert host.interface_variables("10.1.0.4") == chosen
    assert host.interface_variables("127.0.0.1") == {}


def test_kernels_are_kept_on_each_host_in_a_directory_of_this_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(temp_dir, "temp_root", lambda: tmp_path)
    place = tmp_path / f"megarl-cache-{os.getuid()}"
    expected = {
        "TRITON_CACHE_DIR": f"{place}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{place}/inductor",
        "VLLM_CACHE_ROOT": f"{place}/vllm",
    }
    assert temp_dir.local_caches() == temp_dir.local_caches() == expected
    # Whoever may write there could have kernels run.
    place.chmod(0o777)
    assert temp_dir.local_caches() == {}
    place.rmdir()
    place.symlink_to(tmp_path)
    assert temp_dir.local_caches() == {}


def test_env_sh_leaves_the_interface_to_each_host_and_locks_as_much_memory_as_it_may(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/megarl").touch(mode=0o755)
    told = 'set -euo pipefail; . slurm/env.sh; echo "${NCCL_SOCKET_IFNAME-none} $(ulimit -S -l) $(ulimit -H -l)"'
    environment = environment_of(tmp_path, MEGARL_VENV=str(tmp_path), SLURM_JOB_NUM_NODES="2")
    environment.pop("NCCL_SOCKET_IFNAME", None)
    command = ["bash", "-c", f"ulimit -S -l 8; {told}"]
    name, soft, hard = subprocess.check_output(command, cwd=ROOT, env=environment, text=True).split()
    assert (name, soft) == ("none", hard)


@pytest.mark.parametrize(
    ("timeout_s", "half_ms", "silence_ms", "reconnect_s"),
    [(30, 2500, 30000, 60), (6, 500, 20000, 60), (120, 10000, 120000, 240)],
)
def test_a_host_is_lost_after_six_checks_that_take_the_time_together(
    timeout_s: float, half_ms: int, silence_ms: int, reconnect_s: int
) -> None:
    """A check lasts half of a sixth, the pause after it as long; nothing else of Ray gives a host up earlier."""
    assert health_checks(timeout_s) == {
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": str(half_ms),
        "RAY_health_check_timeout_ms": str(half_ms),
        "RAY_health_check_failure_threshold": "6",
        "RAY_grpc_keepalive_timeout_ms": str(silence_ms),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(reconnect_s),
    }


class _Ended:
    """A process that ended with this exit code, or one that ends when it is killed."""

    def __init__(self, returncode: int | None) -> None:
        self.returncode, self.killed_at = returncode, 0.0

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.returncode, self.killed_at = -9, job.awake_s()

    def wait(self) -> None: ...


def test_the_driver_may_speak_until_ray_must_have_told_it_that_a_host_is_lost(
    tmp_path: Path, shim: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun ends at once, as when Slurm knows first that a node has lost power; Ray takes up to 45 s."""
    clock, driver = [0.0], _Ended(None)
    monkeypatch.setattr(job, "awake_s", lambda: clock[0])
    # Not that of other threads.
    sleep = SimpleNamespace(sleep=lambda seconds: clock.append(clock.pop() + seconds))
    monkeypatch.setattr(job, "time", SimpleNamespace(**{**vars(time), **vars(sleep)}))
    started = iter([_Ended(1), driver])
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: next(started))
    monkeypatch.setattr(job, "_stop_hosts", lambda *_: None)
    allocation = Allocation(job_id=7, groups=[HostGroup(hosts=("localhost",), cpus_per_host=8)])
    command = JobCommand(argv=("train",), directory=tmp_path, cluster=ClusterConfig(node_timeout_s=45.0))
    assert job._attempt(command, allocation, tmp_path / "logs", job._Driver(), number=0) == 137
    assert driver.killed_at == pytest.approx(45 + 20, abs=1.0)


def test_an_open_quote_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_SRUN_ARGS", "--container-name='a")
    with pytest.raises(ConfigError, match=r"MEGARL_SRUN_ARGS: got .*--container-name='a.*No closing quotation"):
        srun_line(HostGroup(hosts=("a",), cpus_per_host=8))


def test_tasks_of_the_hosts_get_the_umask_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm would give them the one with which the job was submitted, and write their output with it."""
    given: list[Mapping[str, str]] = []

    def popen(_: object, *, env: Mapping[str, str], **__: object) -> NoReturn:
        given.append(env)
        raise InterruptedError

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setenv("SLURM_UMASK", "0022")
    # Of the step in which the job was submitted: a mask of a few CPUs of another host.
    monkeypatch.setenv("SLURM_CPU_BIND_LIST", "0xF")
    allocation = Allocation(job_id=7, groups=[HostGroup(hosts=("localhost",), cpus_per_host=8)])
    for share in (None, "group"):
        command = JobCommand(argv=("train",), directory=tmp_path, cluster=ClusterConfig(), share=share)
        with pytest.raises(InterruptedError):
            job._attempt(command, allocation, tmp_path / "logs", job._Driver(), number=0)
    assert [(env["SLURM_UMASK"], env["MEGARL_UMASK"]) for env in given] == [("077", "077"), ("027", "027")]
    assert not [name for env in given for name in env if name.startswith("SLURM_CPU_BIND")]


@pytest.fixture
def shim(tmp_path: Path) -> Callable[[str, str], Path]:
    """Makes a program of this name in `tmp_path/bin`, the body of a shell script."""

    def make(name: str, body: str) -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
        return path

    return make


def test_lost_hosts_are_left_out(
    tmp_path: Path, shim: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm says of five hosts that one works, one is down, one does not answer, one is drained, one has failed."""
    listing = "a1 allocated\na2 down*\na3 allocated*\na4 draining\na5 failing"
    noted = shim("sinfo", f'echo "$@" > {tmp_path}/asked; printf "{listing}\n"')
    monkeypatch.setenv("PATH", f"{noted.parent}:{os.environ['PATH']}")
    allocation = Allocation(job_id=7, groups=(HostGroup(hosts=("a1", "a2", "a3", "a4", "a5"), cpus_per_host=8),))
    left = allocation.without_lost()
    assert (left.hosts, left.lost) == (("a1", "a4"), ("a2", "a3", "a5"))
    assert "--nodes=a1,a2,a3,a4,a5" in (tmp_path / "asked").read_text()
    command = JobCommand(argv=("train",), directory=Path("/runs/a"), cluster=ClusterConfig())
    line = job._srun(command, left, "7-0-1", "10.0.0.1:20000", Path("/runs/a/logs"))
    assert {"--nodes=2", "--ntasks=2", "--exclude=a2,a3,a5"} <= set(line)
    assert not [word for word in srun_line(*allocation.groups) if "exclude" in word]
    # Without an answer none is lost.
    shim("sinfo", "exit 1")
    assert allocation.without_lost() == allocation


def environment_of(tmp_path: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MEGARL_"))}
    return kept | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"} | more


@pytest.mark.parametrize("script", ["train", "train_split", "eval"])
def test_they_reach_the_job_from_env_sh_and_from_the_submitters_environment(
    tmp_path: Path, shim: Callable[[str, str], Path], script: str
) -> None:
    shim("megarl", 'echo "$MEGARL_SRUN_ARGS"')
    venv = {"MEGARL_VENV": str(tmp_path), "SLURM_SUBMIT_DIR": str(ROOT)}

    def run(**more: str) -> str:
        command = ["bash", f"slurm/{script}.sbatch", "run.yaml"]
        environment = environment_of(tmp_path, **venv, **more)
        return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout

    assert run() == "\n"
    assert run(MEGARL_SRUN_ARGS=CONTAINER) == CONTAINER + "\n"


CONFIG = """Configuration data as of 2026-11-24T12:00:00
AuthAltTypes            = (null)
AuthInfo                = {auth_info}
AuthType                = auth/munge
PluginDir               = {root}/lib/slurm:{root}/lib/more
PlugStackConfig         = {root}/etc/plugstack.conf
SLURM_CONF              = {root}/etc/slurm.conf
SlurmUser               = slurm(64030)
Slurmctld(primary) at login is UP"""


@pytest.fixture
def slurm(tmp_path: Path, shim: Callable[[str, str], Path]) -> Path:
    """A cluster's Slurm as its login node shows it, with pyxis."""
    for name in ("lib/slurm", "lib/more", "lib/spank", "etc/plugstack.conf.d", "share"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "lib/spank/spank_pyxis.so").touch()
    (tmp_path / "share/pyxis.conf").write_text(f"required {tmp_path}/lib/spank/spank_pyxis.so sbatch_support=1\n")
    (tmp_path / "etc/plugstack.conf.d/pyxis.conf").symlink_to(tmp_path / "share/pyxis.conf")
    (tmp_path / "etc/plugstack.conf").write_text(f"include {tmp_path}/etc/plugstack.conf.d/*\n")
    for name in ("srun", "scancel"):
        shim(name, "exit 1")
    shim("scontrol", f"cat <<END\n{CONFIG.format(root=tmp_path, auth_info='(null)')}\nEND")
    return tmp_path


def container_options(root: Path, *arguments: str) -> list[str]:
    command = [str(ROOT / "slurm/container.sh"), *arguments]
    done = subprocess.run(command, env=environment_of(root), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return done.stdout.split()


def test_slurms_commands_are_mounted_on_the_path_and_what_they_read_where_it_is(slurm: Path) -> None:
    image, mounts, *rest = container_options(slurm, "/shared/megarl.sqsh", "/shared", "/data:/data:ro")
    assert image == "--container-image=/shared/megarl.sqsh"
    assert rest == ["--no-container-remap-root"]
    of_slurm = [
        *(f"{slurm}/bin/{name}:/usr/local/bin/{name}" for name in ("srun", "scontrol", "scancel")),
        *(f"{slurm}/{name}" for name in ("etc", "lib/slurm", "lib/more", "share/pyxis.conf", "lib/spank")),
    ]
    # /tmp has the sockets by which the driver, in one container, reaches Ray, in another; /dev/shm Ray's objects.
    expected = {"/shared", "/data:/data:ro", "/tmp", "/dev/shm", "/run/munge", "/etc/passwd", "/etc/group", *of_slurm}
    found = mounts.removeprefix("--container-mounts=").split(",")
    assert sorted(found) == sorted(expected)


def test_munges_socket_is_where_the_configuration_says(slurm: Path, shim: Callable[[str, str], Path]) -> None:
    text = CONFIG.format(root=slurm, auth_info="cred_expire=5,socket=/var/spool/munge/s.2,ttl=3")
    shim("scontrol", f"cat <<END\n{text}\nEND")
    mounts = container_options(slurm, "/a.sqsh")[1]
    assert "/var/spool/munge," in mounts + ","
    assert "/run/munge" not in mounts


@pytest.mark.parametrize("path", ["/a b.sqsh", "/a,b", "/a\n--wrap=id", "/a'b", "/a*", "/$HOME", "/a\x1b"])
def test_paths_that_would_become_more_than_one_option_are_refused(slurm: Path, path: str) -> None:
    for arguments in ([path], ["/a.sqsh", path]):
        command = [str(ROOT / "slurm/container.sh"), *arguments]
        done = subprocess.run(command, env=environment_of(slurm), capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("container.sh: got ")
        assert done.stderr.count("\n") == 1
        assert "\x1b" not in done.stderr


def test_slurm_expands_nothing_in_the_directory_of_logs() -> None:
    command = JobCommand(argv=("train",), directory=Path("/runs/a"), cluster=ClusterConfig())
    group = HostGroup(hosts=("a",), cpus_per_host=8)
    line = job._srun(command, Allocation(job_id=7, groups=(group,)), "7-0-0", "10.0.0.1:20000", Path("/runs/50%j/logs"))
    assert "--output=/runs/50%%j/logs/%N.log" in line


def test_a_host_without_slurm_is_told_where_to_run_it(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("bash", "env"):
        (tmp_path / "bin" / name).symlink_to(f"/usr/bin/{name}")
    done = subprocess.run(
        [str(ROOT / "slurm/container.sh"), "/a.sqsh"],
        env={"PATH": f"{tmp_path}/bin"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "container.sh: no srun here; run it on a login node, or load Slurm's module first\n"


def test_a_host_that_did_not_get_the_token_starts_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where srun is told to hand no environment on: Ray would then let everybody in."""
    numbers = ["--job-id=99999999", "--num-cpus=1", "--object-store-mib=80", "--node-timeout-s=30"]
    monkeypatch.setattr(sys, "argv", ["host", "--run-id=0", "--head=127.0.0.1:20000", "--logs=/nowhere", *numbers])
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(SystemExit, match=r"RAY_AUTH_TOKEN is not set here, .* \(--export=ALL in MEGARL_SRUN_ARGS\)"):
        host.main()
