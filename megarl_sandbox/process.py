"""Control a sandbox from outside: start its launcher and hand it programs, never waiting without a time limit."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from megarl_sandbox import wire
from megarl_sandbox.errors import LostError, OptionError
from megarl_sandbox.jail.landlock import is_readable_by_all
from megarl_sandbox.jail.scratch import delete_tree
from megarl_sandbox.options import Isolation, SandboxOptions
from megarl_sandbox.places import candidates, loose_place
from megarl_sandbox.python_files import python_paths
from megarl_sandbox.task import Check, Ending, Outcome, ProgramTask

# Time allowed beyond a program's own limits, since a busy machine may be late.
MARGIN_S = 30.0
_DEAD = "the sandbox's launcher died or hung; its error is in this process's log"
_ROOT = str(Path(__file__).parents[1])
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from megarl_sandbox.jail.launch import main; "
    "sys.path.pop(0); main()"
)

# Advice for when the kernel refuses a step of the isolation, by the names that the modules of `jail/` give the steps.
_NAMESPACES = (
    "allow user namespaces: sysctl user.max_user_namespaces=15000, kernel.unprivileged_userns_clone=1 (Debian), "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in Docker --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined"
)
_MOUNTS = "allow mounts, in Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
_LANDLOCK = (
    "run on Linux 5.13 or newer with landlock among the security modules that the kernel starts with (lsm=…), and let "
    "containers use it"
)
_KERNEL = "run on Linux 5.14 or newer"

REMEDIES: Mapping[str, str] = {
    "user namespace": _NAMESPACES,
    "user mapping": "as root in a container, keep the capabilities SETUID and SETGID, and map user 65534",
    "mount namespace": _NAMESPACES,
    "pid namespace": _NAMESPACES,
    "network namespace": _NAMESPACES,
    "ipc namespace": _NAMESPACES,
    "uts namespace": _NAMESPACES,
    "cgroup namespace": _NAMESPACES,
    "private mounts": _MOUNTS,
    "tmpfs": _MOUNTS,
    "pivot_root": "run where the root directory is a mount point, not in a chroot or an initramfs",
    "read-only binds": _KERNEL,
    "detach the old root": _KERNEL,
    "scratch tmpfs": _MOUNTS,
    "landlock": _LANDLOCK,
    "scratch directory": "make the directory for temporary files writable",
    "system call filter": "run on x86_64 or aarch64",
}


# The program that must succeed before others run. Its keeper looks at it once.
_TRIAL = "import statistics, time\ntime.sleep(0.1)"
# These are tried for each setting, one after the other.
_TIERS: Mapping[Isolation, Sequence[Isolation]] = {
    Isolation.AUTO: (Isolation.NAMESPACES, Isolation.LANDLOCK),
    **{each: (each,) for each in (Isolation.NAMESPACES, Isolation.LANDLOCK, Isolation.LIMITS_ONLY)},
}


class RefusedError(OptionError):
    """The error of a machine that refuses one step of the isolation."""


class Program(AbstractContextManager["Program"]):
    """A program in its sandbox. `run` starts it anew for each task, except for a `Cell` after another; leaving the
    context deletes its files.
    """

    def __init__(self, connection: socket.socket, options: SandboxOptions, scratch: str, source: str) -> None:
        """Send the source to its keeper. `options.isolation` is the tier that the launcher was started with."""
        self._connection = connection
        self._options = options
        self._is_lost = False
        connection.settimeout(MARGIN_S)
        self.keeper = int(wire.receive(connection)[0]["keeper"])
        self._scratch = f"{scratch}/{self.keeper}"
        header, _ = wire.receive(connection)
        if "refused" in header:
            name = header["refused"]
            raise RefusedError(
                f"it refuses {options.isolation.value} at the step {name!r} ({header['reason']}); {REMEDIES[name]}"
            )
        # The program's source is sent before anything else.
        wire.send(connection, {}, source.encode("utf-8", "surrogatepass"))

    def run(self, task: ProgramTask) -> Outcome:
        """Run a task and return its outcome; after `Ending.LOST` every further task is lost too."""
        if self._is_lost:
            return Outcome(ending=Ending.LOST)
        try:
            self._connection.settimeout(self._options.limits.wall_s + MARGIN_S)
            if isinstance(task, Check):
                # The second message is read by the process of the test code alone.
                wire.send(self._connection, {"kind": "Check", "setup": task.setup})
                wire.send(self._connection, asdict(task))
            else:
                wire.send(self._connection, {"kind": type(task).__name__, **asdict(task)})
            header, (stdout, stderr, answer) = wire.receive(self._connection)
        except (ConnectionError, TimeoutError) as error:
            self._is_lost = True
            if isinstance(error, TimeoutError):
                self._kill()
            return Outcome(ending=Ending.LOST)
        header["ending"] = Ending(header["ending"])
        return Outcome(**header, stdout=stdout, stderr=stderr, answer=answer)

    def close(self) -> None:
        """Wait until every process of the program has ended; end them if they take too long."""
        # A keeper that is killed resets the connection if it has not read all that was sent.
        with self._connection, suppress(ConnectionError):
            try:
                self._connection.shutdown(socket.SHUT_WR)
                self._connection.settimeout(MARGIN_S)
                self._wait_for_end()
            except TimeoutError:
                self._kill()
                self._wait_for_end()
        if self._options.isolation is not Isolation.NAMESPACES:
            # Where the keeper has been killed, it is still there.
            with suppress(OSError):
                delete_tree(self._scratch)

    def _kill(self) -> None:
        """Kill the keeper, the sandbox's process that looks after this program."""
        # Kill only while the connection is open: the keeper is then alive, so its pid cannot belong to another process.
        os.kill(self.keeper, signal.SIGKILL)

    def _wait_for_end(self) -> None:
        while self._connection.recv(1 << 16):
            pass

    def __exit__(self, *_: object) -> None:
        self.close()


class Sandbox(AbstractContextManager["Sandbox"]):
    """A runner of programs, several at a time if called from several threads; its launcher is started on first use."""

    def __init__(self, options: SandboxOptions | None = None) -> None:
        self.options = options or SandboxOptions()
        # The isolation of programs, and why it is no stronger one; known once a program has been started.
        self.tier: Isolation | None = None
        self.refusals: tuple[str, ...] = ()
        # Where the directories of programs are, unless namespaces have their own.
        self._scratch = ""
        self._lock = threading.Lock()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def program(self, source: str) -> Program:
        """Return a context that holds the program in its sandbox; OptionError if this machine does not allow one."""
        with self._lock:
            if self._launcher is None or self._launcher.poll() is not None:
                self._stop()
                self._start()
            connection = self._ask()
        return self._shut_in(connection, source)

    def close(self) -> None:
        """End the launcher, and every program that it still runs."""
        with self._lock:
            self._stop()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self) -> socket.socket:
        """Ask the launcher for a new keeper process, and return the connection to it."""
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"p"], [theirs.fileno()])
            except ConnectionError as error:
                ours.close()
                raise LostError(_DEAD) from error
        return ours

    def _shut_in(self, connection: socket.socket, source: str) -> Program:
        try:
            assert self.tier is not None
            return Program(connection, replace(self.options, isolation=self.tier), self._scratch, source)
        except (ConnectionError, TimeoutError) as error:
            connection.close()
            raise LostError(_DEAD) from error
        except OptionError:
            connection.close()
            raise

    def _start(self) -> None:
        """Start the launcher with the strongest isolation that the options allow and this machine grants."""
        refusals: list[str] = []
        for tier in _TIERS[self.options.isolation]:
            self.tier = tier
            try:
                self._start_tier(tier)
                self.refusals = tuple(refusals)
                return
            except RefusedError as error:
                refusals.append(str(error))
        self.tier = None
        raise OptionError(
            f"isolation={self.options.isolation.value}: this machine isolates no programs: "
            f"{'; '.join(refusals)}; or set isolation=limits_only, which protects neither files nor the "
            "network from programs"
        )

    def _start_tier(self, tier: Isolation) -> None:
        """Start the launcher with one kind of isolation, and check that it can run a program."""
        if tier is not Isolation.NAMESPACES:
            self._scratch = _make_scratch()
        limits = asdict(self.options.limits)
        del limits["output_mib"]
        import_paths = [os.path.realpath(path) for path in self.options.import_paths]
        # `jail/launch.py` reads these options.
        setup = {
            "bounds": {
                **limits,
                "output_bytes": self.options.limits.output_bytes,
                "may_execute": bool(self.options.executables),
            },
            "isolation": tier.value,
            "paths": python_paths(import_paths) + [os.path.realpath(path) for path in self.options.executables],
            "import_paths": import_paths,
            "scratch": self._scratch,
        }
        self._control, theirs = socket.socketpair()
        with theirs:
            self._launcher = subprocess.Popen(
                # Programs may print numbers of any length; their time is limited.
                [
                    *(sys.executable, "-I", "-S", "-X", "utf8", "-X", "int_max_str_digits=0"),
                    *("-c", _BOOT, _ROOT, str(theirs.fileno()), json.dumps(setup)),
                ],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        # An import must succeed here, or else faults of this machine would be taken for failures of programs.
        try:
            with self._shut_in(self._ask(), "") as program:
                outcome = program.run(Check(test=_TRIAL))
        except OptionError:
            self._stop()
            raise
        if not outcome.succeeded:
            self._stop()
            last = outcome.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise OptionError(
                "isolation: the sandbox cannot run a program that does nothing here: it ended with "
                f"{outcome.ending.value}, {last!r}; run on Linux 5.14 or newer, and raise the limits if they are lower "
                "than an interpreter needs"
            )

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
        if self._scratch:
            # A keeper that has just been told to end may still be at it.
            with suppress(OSError):
                delete_tree(self._scratch)
        self._control, self._launcher, self._scratch = None, None, ""


def _make_scratch() -> str:
    """Make the directory for the directories of programs, in which nobody else can put anything.

    With root's rights, programs run as a user without any (`jail/rights.py`), who must be able to reach their own.
    """
    is_root = os.geteuid() == 0
    places = (place for place in candidates() if place.is_dir() and loose_place(place) is None)
    place = next((place for place in places if not is_root or is_readable_by_all([str(place)])), None)
    scratch = tempfile.mkdtemp(prefix="megarl-sandbox-", dir=place)
    os.chmod(scratch, 0o711 if is_root else 0o700)
    # The names of a program's open files, by which deleted ones are found, have no links in them.
    return os.path.realpath(scratch)
