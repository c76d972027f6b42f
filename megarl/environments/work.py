"""Begin and check a sample's work on files in a sandbox: what it starts from, and what decides its reward."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from megarl.environments.agent import KEY
from megarl.environments.sandboxes import WorkSandbox, sandbox_maker
from megarl.errors import ConfigError
from megarl.host.masking import require_no_secrets
from megarl.types import Prompt

# Columns of a row's `extra_info`: texts by path, written before the agent starts, and before the check.
FILES, CHECK_FILES = "files", "check_files"
# Write all files as a tree of git, whatever the agent does to the index, and name it.
_TREE = 'export GIT_INDEX_FILE="$HOME/.megarl-index"; git add --all && git write-tree'


class Work:
    """Work on a copy of a directory that a command checks: exit code 0 is success."""

    def __init__(
        self,
        *,
        check: Sequence[str],
        workspace: str | None = None,
        sandbox: str = "process",
        sandbox_settings: Mapping[str, object] | None = None,
        patch: bool = False,
    ) -> None:
        """Describe the work of a sample.

        check: a program and its arguments. workspace: a directory of which each sample gets a copy. sandbox: the name
        of one, or a class of yours as MODULE:NAME or FILE.py:NAME; sandbox_settings: its arguments. patch: the check
        runs in a new sandbox, to which what was changed is applied by git; the workspace is a repository.
        """
        self._check, self._patch = tuple(check), patch
        require_no_secrets(check, KEY)
        if not check:
            raise ConfigError(f"{KEY}.check is empty, expected a program and its arguments")
        self._make = sandbox_maker(sandbox, sandbox_settings or {}, None if workspace is None else Path(workspace))
        if sandbox == "process" and shutil.which(check[0]) is None:
            raise ConfigError(f"{KEY}.check: there is no program {check[0]!r}; install it, or put it on PATH")
        if patch and (workspace is None or not (Path(workspace) / ".git").exists()):
            raise ConfigError(f"{KEY}.patch: {workspace} is no repository of git; make it one, or leave patch out")
        self._base = ""
        self._opened: list[WorkSandbox] = []

    async def begin(self, prompt: Prompt, variables: Mapping[str, str]) -> WorkSandbox:
        """Return a new sandbox with the row's files; programs in it get the variables."""
        self._prompt, self._variables = prompt, variables
        sandbox = await self._new()
        if self._patch:
            tree = await sandbox.run(["sh", "-c", _TREE], variables=variables)
            tree.require_success("git write-tree")
            self._base = tree.output.decode().strip()
        return sandbox

    async def fork(self, sandbox: WorkSandbox) -> WorkSandbox:
        """Return a fork of a sandbox."""
        self._opened.append(await sandbox.fork())
        return self._opened[-1]

    async def passes(self, sandbox: WorkSandbox) -> bool:
        """Return whether the check succeeds, with the row's files for it, and the changes are a patch."""
        if self._patch:
            tree = await sandbox.run(["sh", "-c", _TREE], variables=self._variables)
            trees = [self._base, tree.output.decode(errors="replace").strip()]
            diff = ["git", "diff", "--binary", "--no-ext-diff", *trees]
            changes = await sandbox.run(diff, variables=self._variables)
            text, sandbox = changes.output.decode(errors="surrogateescape"), await self._new()
            apply = ["git", "apply", "--allow-empty", "-"]
            applied = await sandbox.run(apply, stdin=text, variables=self._variables)
            if tree.exit_code or changes.exit_code or applied.exit_code:
                return False
        await _write_files(sandbox, self._prompt, CHECK_FILES)
        return (await sandbox.run(self._check, variables=self._variables)).exit_code == 0

    async def close(self) -> None:
        """End all of its sandboxes."""
        while self._opened:
            await self._opened.pop().stop()

    async def _new(self) -> WorkSandbox:
        self._opened.append(sandbox := self._make())
        await sandbox.start()
        await _write_files(sandbox, self._prompt, FILES)
        return sandbox


async def _write_files(sandbox: WorkSandbox, prompt: Prompt, column: str) -> None:
    """Write a row's files. Raises ValueError for a path that leads out of the workspace."""
    files = prompt.extra_info.get(column) or {}
    if not isinstance(files, Mapping):
        raise ValueError(f"extra_info.{column} is {type(files).__name__}, expected texts by path")
    for name, text in files.items():
        path = PurePosixPath(str(name))
        if path.is_absolute() or ".." in path.parts or not isinstance(text, str):
            raise ValueError(f"extra_info.{column} has {name!r}, expected a path within the workspace, and its text")
        await sandbox.write(str(path), text)
