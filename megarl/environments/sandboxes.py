"""Run the programs of one sample in a place of its own: directories, bubblewrap, Apptainer, Docker, or yours."""

import asyncio
import functools
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, Self
from urllib.parse import urlsplit

from megarl.environments.agent import KEY, MOST_OUTPUT_BYTES, Ended, run_program
from megarl.environments.base import load_object
from megarl.environments.endpoint import chat_server
from megarl.errors import ConfigError
from megarl.host.child_environment import client_environment
from megarl.host.janitor import CONTAINERS, new_sandbox
from megarl.registry import Registry

# Where sandboxed programs see the sample's directories.
WORKSPACE, HOME = "/workspace", "/home/agent"
# A pipe would be waited for.
_READ = """[ -f "$1" ] || [ ! -e "$1" ] || { echo "error: no regular file" >&2; exit 1; }
exec cat -- "$1"
"""
_WRITE = """top=$(pwd -P); mkdir -p -- "$(dirname -- "$1")" && cd -- "$(dirname -- "$1")" || exit
name=$(basename -- "$1")
case "$(pwd -P)/" in
"$top"/*) [ ! -L "$name" ] && { [ -f "$name" ] || [ ! -e "$name" ]; } && cat > "$name" ;;
*) false ;;
esac || { echo "error: it leads out of the workspace, or cannot be written" >&2; exit 1; }
"""


class WorkSandbox(Protocol):
    """A place in which programs work on the files of one sample. Paths are relative to its workspace.

    A remote one is a class of yours with these methods, made with `template` and the settings as arguments.
    """

    @property
    def workspace(self) -> str:
        """Where programs see the workspace."""

    @property
    def home(self) -> str:
        """Where programs see the home."""

    async def start(self) -> None:
        """Make the workspace, a copy of the template, and an empty home."""

    async def run(
        self, command: Sequence[str], *, stdin: str = "", variables: Mapping[str, str], url: str = ""
    ) -> Ended:
        """Run a program in the workspace, with `stdin` and access to the endpoint at `url`; end all that it started."""

    async def read(self, path: str) -> str:
        """Return the text of a file. Raises FileNotFoundError."""

    async def write(self, path: str, text: str) -> None:
        """Write a file of the workspace, and the directories that it needs."""

    async def fork(self) -> Self:
        """Return a sandbox with copies of this one's files. Neither sees what the other changes later."""

    async def stop(self) -> None:
        """End the sandbox, and remove its files."""


SANDBOXES: Registry[Callable[..., WorkSandbox]] = Registry("sandbox", key=f"{KEY}.sandbox")


def sandbox_maker(name: str, settings: Mapping[str, object], template: Path | None) -> Callable[[], WorkSandbox]:
    """Return what makes sandboxes of a name, or of a class as MODULE:NAME or FILE.py:NAME.

    Raises ConfigError for settings that it does not take, and if this machine cannot run it.
    """
    maker = load_object(name, f"{KEY}.sandbox") if ":" in name else SANDBOXES.get(name)
    if template is not None and not template.is_dir():
        raise ConfigError(f"{KEY}.workspace: {template} is no directory; correct its path, or leave it out")
    make = functools.partial(maker, template=template, **settings)
    try:
        make()
    except TypeError as error:
        raise ConfigError(f"{KEY}.sandbox_settings: got {dict(settings)} for {name}; {error}") from error
    return make


async def _copy_files(source: Path, target: Path) -> None:
    """Copy a directory with all that programs leave in one, also pipes and sockets, which shutil refuses."""
    ended = await run_program(["cp", "-a", "--", f"{source}/.", str(target)], "", client_environment(), inherits=[])
    ended.require_success(f"copying {source}")


@SANDBOXES.register("process")
class ProcessSandbox:
    """Directories of this host, in which programs run with your rights."""

    # A command that works where the sandbox does, and what to do where it does not.
    trial: ClassVar[Sequence[str]] = ()
    remedy: ClassVar[str] = ""

    def __init__(self, *, template: Path | None = None) -> None:
        self._template = template
        self._scratch = Path()
        if self.trial and (reason := _refusal(tuple(self.trial))):
            raise ConfigError(f"{KEY}.sandbox: {self.trial[0]} does not work here ({reason}); {self.remedy}")

    @property
    def workspace(self) -> str:
        return str(self._scratch / "workspace")

    @property
    def home(self) -> str:
        return str(self._scratch / "home")

    async def start(self) -> None:
        self._scratch = new_sandbox()
        workspace = self._scratch / "workspace"
        (self._scratch / "home").mkdir()
        if self._template is None:
            workspace.mkdir()
        else:
            await _copy_files(self._template, workspace)

    async def run(
        self, command: Sequence[str], *, stdin: str = "", variables: Mapping[str, str], url: str = ""
    ) -> Ended:
        return await run_program(command, stdin, {**variables, "HOME": self.home}, self._scratch / "workspace")

    async def read(self, path: str) -> str:
        ended = await self.run(["sh", "-c", _READ, "sh", path], variables=client_environment())
        if ended.exit_code:
            raise FileNotFoundError(f"{path}: {ended.errors.decode(errors='replace').strip()}")
        if len(ended.output) >= MOST_OUTPUT_BYTES:
            raise OSError(f"{path} has {MOST_OUTPUT_BYTES} bytes or more; read a part of it")
        return ended.output.decode(errors="replace")

    async def write(self, path: str, text: str) -> None:
        ended = await self.run(["sh", "-c", _WRITE, "sh", path], stdin=text, variables=client_environment())
        ended.require_success(f"writing {path}")

    async def fork(self) -> Self:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._scratch = new_sandbox()
        try:
            await _copy_files(self._scratch, other._scratch)
        except BaseException:
            await other.stop()
            raise
        return other

    async def stop(self) -> None:
        if self._scratch != Path():
            await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)
            if self._scratch.exists():
                # Caches of Go and Bazel are read-only directories, which only root can empty as they are.
                await run_program(
                    ["chmod", "-R", "u+rwX", "--", str(self._scratch)], "", client_environment(), inherits=[]
                )
                await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)


class _Wrapped(ProcessSandbox):
    """A sandbox whose programs see its directories in fixed places, so that a fork has the same paths."""

    @property
    def workspace(self) -> str:
        return WORKSPACE

    @property
    def home(self) -> str:
        return HOME

    def _binds(self) -> list[tuple[str, str]]:
        return [(str(self._scratch / "workspace"), WORKSPACE), (str(self._scratch / "home"), HOME)]


@SANDBOXES.register("bubblewrap")
class BubblewrapSandbox(_Wrapped):
    """Namespaces of the kernel: a program sees its own files and processes, and system directories to read.

    Without `network`, which is the default, it reaches the sample's endpoint, and nothing else of the host or beyond.
    """

    trial = ("bwrap", "--unshare-all", "--ro-bind", "/", "/", "true")
    remedy = "install bubblewrap, and allow user namespaces"

    def __init__(self, *, template: Path | None = None, network: bool = False, readable: Sequence[str] = ()) -> None:
        """Make a sandbox. readable: directories besides /usr, /etc, /opt and those of this Python."""
        super().__init__(template=template)
        self._network = network
        system = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt")
        own = (sys.prefix, sys.base_prefix)
        self._readable = [each for each in dict.fromkeys((*system, *own, *readable)) if Path(each).exists()]
        if missing := [each for each in readable if each not in self._readable]:
            raise ConfigError(f"{KEY}.sandbox_settings.readable: {missing[0]} is not there; correct its path")

    async def run(
        self, command: Sequence[str], *, stdin: str = "", variables: Mapping[str, str], url: str = ""
    ) -> Ended:
        variables = {**variables, "HOME": HOME}
        words = ["bwrap", "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--new-session"]
        words += [] if self._network else ["--unshare-net"]
        words += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
        words += [word for path in self._readable for word in ("--ro-bind", path, path)]
        words += [word for pair in self._binds() for word in ("--bind", *pair)]
        words += ["--chdir", WORKSPACE]
        if self._network or not url:
            return await run_program([*words, "--", *command], stdin, variables, inherits=())
        door = str(Path(__file__).parent / "programs" / "door.py")
        words += ["--ro-bind", door, "/run/door.py", "--", sys.executable, "-I", "/run/door.py"]
        ours, theirs = socket.socketpair()
        with theirs:
            serving = asyncio.ensure_future(chat_server().serve_sent(ours))
            words += [str(theirs.fileno()), str(urlsplit(url).port)]
            try:
                return await run_program([*words, *command], stdin, variables, inherits=[theirs])
            finally:
                serving.cancel()


class _Image(_Wrapped):
    def __init__(self, *, image: str, template: Path | None = None) -> None:
        super().__init__(template=template)
        self._image = image


@SANDBOXES.register("apptainer")
class ApptainerSandbox(_Image):
    """An image that Apptainer runs without root, with an overlay for the sample; it shares the host's network."""

    trial = ("apptainer", "version")
    remedy = "install Apptainer from the files of its releases"

    async def run(
        self, command: Sequence[str], *, stdin: str = "", variables: Mapping[str, str], url: str = ""
    ) -> Ended:
        overlay = self._scratch / "overlay"
        overlay.mkdir(exist_ok=True)
        words = ["apptainer", "--quiet", "exec", "--containall", "--overlay", str(overlay)]
        words += [word for pair in self._binds() for word in ("--bind", ":".join(pair))]
        words += ["--home", HOME, "--pwd", WORKSPACE, self._image]
        passed = {f"APPTAINERENV_{name}": value for name, value in variables.items() if name not in ("PATH", "HOME")}
        return await run_program([*words, *command], stdin, client_environment("apptainer") | passed)


@SANDBOXES.register("docker")
class DockerSandbox(_Image):
    """A Docker container for each program, removed afterwards with everything outside of the sample's directories."""

    trial = ("docker", "info", "--format", "{{.ServerVersion}}")
    remedy = "start Docker's daemon, and give this user the right to use it"

    async def run(
        self, command: Sequence[str], *, stdin: str = "", variables: Mapping[str, str], url: str = ""
    ) -> Ended:
        name = f"megarl-{secrets.token_hex(8)}"
        passed = {key: value for key, value in variables.items() if key not in ("PATH", "HOME")}
        words = ["docker", "run", "--rm", "--interactive", "--init", "--name", name]
        # The endpoint is on the host's network; programs that do not call it get none.
        words += ["--network", "host" if url else "none", "--user", f"{os.getuid()}:{os.getgid()}"]
        words += [word for pair in self._binds() for word in ("--volume", ":".join(pair))]
        words += ["--workdir", WORKSPACE, "--env", f"HOME={HOME}"]
        words += [word for key in passed for word in ("--env", key)]
        # A container outlives its client, and this process.
        note = self._scratch / CONTAINERS / name
        note.parent.mkdir(exist_ok=True)
        note.touch()
        client = client_environment("docker")
        try:
            return await run_program([*words, self._image, *command], stdin, client | passed)
        finally:
            await asyncio.shield(run_program(["docker", "rm", "--force", name], "", client))
            note.unlink(missing_ok=True)


@functools.cache
def _refusal(trial: Sequence[str]) -> str:
    """Return why a command does not work here, or nothing if it does."""
    try:
        client = client_environment(trial[0])
        done = subprocess.run(trial, check=False, capture_output=True, timeout=30, env=client)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines() or [
        f"it ended with {done.returncode}"
    ]
    return said[-1] if done.returncode else ""
