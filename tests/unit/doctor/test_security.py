"""What `megarl doctor --security` says of directories, sockets and files, each safe and not."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megarl.doctor.finding import Finding, Severity
from megarl.doctor.security import (
    check_run,
    check_security,
    core_dumps_finding,
    listeners_finding,
    neighbours_finding,
    open_files_finding,
    shared_directory_finding,
    tokens_finding,
)
from megarl.errors import DataError
from megarl.host.listeners import Listener, listeners
from tests.helpers.second_user import UID


def is_fine(_: Path) -> None:
    """Every checkpoint is plain data."""


def of_run(directory: Path, require_plain_data: Callable[[Path], None] = is_fine) -> dict[str, Finding]:
    return {finding.subject: finding for finding in check_run(directory, require_plain_data)}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    (directory / "config.yaml").write_text("tracker: {api_key: '***masked***', api_key_env: KEY}\n")
    (directory / "config.yaml").chmod(0o600)
    return directory


@pytest.mark.parametrize(
    ("mode", "status"),
    [(0o1777, Severity.OK), (0o700, Severity.OK), (0o777, Severity.UNSAFE), (0o757, Severity.UNSAFE)],
)
def test_a_directory_of_all_users_needs_the_sticky_bit(tmp_path: Path, mode: int, status: Severity) -> None:
    tmp_path.chmod(mode)
    found = shared_directory_finding(tmp_path)
    tmp_path.chmod(0o700)
    assert (found.status, str(tmp_path) in found.found) == (status, status is Severity.UNSAFE)


def test_temporary_files_that_others_may_read(tmp_path: Path) -> None:
    private, bare = tmp_path / "private", tmp_path / "bare"
    private.touch(0o600)
    bare.touch()
    bare.chmod(0o604)
    assert open_files_finding([private]).status is Severity.OK
    found = open_files_finding([private, bare])
    assert (found.status, found.found) == (Severity.WARN, f"1 of 2 are open to others: {bare}")


def test_sockets_of_a_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("0.0.0.0", 0)) as anywhere:
        own = {each.port: each for each in listeners([os.getpid()])}
        ports = {name: each.getsockname()[1] for name, each in (("here", here), ("anywhere", anywhere))}
        assert (own[ports["here"]].address, own[ports["here"]].is_local) == ("127.0.0.1", True)
        assert (own[ports["anywhere"]].address, own[ports["anywhere"]].is_local) == ("0.0.0.0", False)
    assert not {each.port for each in listeners([os.getpid()])} & set(ports.values())
    with pytest.raises(psutil.NoSuchProcess):
        psutil.Process(2**22 + 1)
    assert listeners([2**22 + 1]) == []


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("127.0.0.1", Severity.OK),
        ("127.9.9.9", Severity.OK),
        ("::1", Severity.OK),
        ("::ffff:127.0.0.1", Severity.OK),
        ("::", Severity.WARN),
        ("10.0.0.7", Severity.WARN),
    ],
)
def test_sockets_that_other_hosts_reach(address: str, status: Severity) -> None:
    found = listeners_finding([Listener(pid=7, process="raylet", address=address, port=80)])
    assert found.status is status
    assert (f"raylet at {address}:80" in found.found) is (status is Severity.WARN)


def test_files_with_tokens(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert tokens_finding(tmp_path).found == "0, all private"
    netrc = tmp_path / ".netrc"
    netrc.touch(0o600)
    assert tokens_finding(tmp_path).status is Severity.OK
    netrc.chmod(0o644)
    found = tokens_finding(tmp_path)
    assert (found.status, found.advice) == (Severity.WARN, f"chmod 600 {netrc}")
    # Nobody reads anything below a home that is closed.
    tmp_path.chmod(0o700)
    assert tokens_finding(tmp_path).status is Severity.OK


def test_core_dumps_and_neighbours() -> None:
    assert [core_dumps_finding(limit).status for limit in (0, -1, 1 << 20)] == [
        Severity.OK,
        Severity.WARN,
        Severity.WARN,
    ]
    me = os.getuid()
    # Services, and nobody, are no neighbours.
    assert neighbours_finding({0, 33, me, 65534}).found == "none"
    assert neighbours_finding({0, me, 4711}).found == "1 run processes here: uid 4711"


def test_a_run_of_this_user_alone(run_dir: Path) -> None:
    assert {finding.status for finding in of_run(run_dir).values()} == {Severity.OK}
    assert of_run(run_dir)["who may read RUN"].found == "its owner alone"
    run_dir.chmod(0o750)
    assert "0750" in of_run(run_dir)["who may read RUN"].found


def test_a_run_that_others_may_write(run_dir: Path) -> None:
    (run_dir / "config.yaml").chmod(0o620)
    found = of_run(run_dir)["who may write RUN"]
    assert (found.status, found.advice) == (Severity.UNSAFE, f"chmod -R go-w {run_dir}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_run_with_a_file_of_another_user(run_dir: Path) -> None:
    os.chown(run_dir / "config.yaml", UID, UID)
    assert of_run(run_dir)["owner of RUN"].status is Severity.WARN


def test_a_link_that_leads_out_of_a_run(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "latest").symlink_to(run_dir / "config.yaml")
    assert of_run(run_dir)["links out of RUN"].status is Severity.OK
    (run_dir / "out").symlink_to(tmp_path)
    assert of_run(run_dir)["links out of RUN"].found == str(run_dir / "out")


def test_a_secret_in_a_configuration(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("tracker: {api_key: abcdef1234567890}\n")
    found = of_run(run_dir)["secrets in RUN"]
    assert (found.status, "abcdef" in found.found + found.advice) == (Severity.WARN, False)


def test_a_checkpoint_that_is_more_than_data(run_dir: Path) -> None:
    index = run_dir / "checkpoints" / "step_1" / "actor" / ".metadata"
    index.parent.mkdir(parents=True)
    index.touch()
    assert of_run(run_dir)["checkpoints"].found == "1, plain data all of them"

    def refuse(directory: Path) -> None:
        raise DataError(f"{directory}: is more than data")

    found = of_run(run_dir, refuse)["checkpoints"]
    assert (found.status, found.found) == (Severity.UNSAFE, f"{index.parents[1]}: is more than data")


def test_no_such_run(tmp_path: Path) -> None:
    assert [each.status for each in check_run(tmp_path / "gone", is_fine)] == [Severity.UNSAFE]


def test_all_is_looked_at(run_dir: Path) -> None:
    subjects = [finding.subject for finding in check_security(run_dir, is_fine)]
    for subject in ("/tmp", "/dev/shm", "listening sockets", "files with tokens", "core dumps", "other users"):
        assert subject in subjects
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
