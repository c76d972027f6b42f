"""A place in which Harbor runs tasks here, by bubblewrap; loaded by a Python that has harbor and not megarl."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult


class BubblewrapBox(BaseEnvironment):
    """The directories that tasks write to are the box's own; all others are this machine's, to be read."""

    root: Path

    @staticmethod
    def type() -> str:
        return "bubblewrap"

    def _validate_definition(self) -> None: ...

    async def start(self, force_build: bool) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="harbor-box-"))
        for name in ("app", "tests", "tmp", "logs/agent", "logs/verifier", "logs/artifacts"):
            (self.root / name).mkdir(parents=True)

    async def stop(self, delete: bool) -> None:
        await self.exec("tmux kill-server")
        shutil.rmtree(self.root)

    def _inside(self, path: str) -> Path:
        return self.root / str(path).lstrip("/")

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self._inside(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._inside(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._inside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self._inside(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._inside(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self, command: str, cwd: Any = None, env: Any = None, timeout_sec: Any = None, user: Any = None
    ) -> Any:
        own = [
            word for name in ("app", "logs", "tests", "tmp") for word in ("--bind", str(self.root / name), f"/{name}")
        ]
        system = [word for name in ("/usr", "/etc", "/lib", "/lib64", "/bin") for word in ("--ro-bind", name, name)]
        process = await asyncio.create_subprocess_exec(
            *("bwrap", *system, "--dev", "/dev", "--proc", "/proc", *own, "--chdir", str(cwd or "/app")),
            *("--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "TERM", "xterm"),
            *(word for name, value in (self._merge_env(env) or {}).items() for word in ("--setenv", name, value)),
            *("bash", "-c", command),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec or 60)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode or 0)
