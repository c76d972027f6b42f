"""Let a coding agent's program, such as Claude Code or Codex, solve a sample in a workspace of its own."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from megarl.environments.agent import KEY, AgentEnvironment, endpoint_variables, run_program
from megarl.environments.base import ENVIRONMENTS, load_object
from megarl.errors import ConfigError
from megarl.host.masking import require_no_secrets
from megarl.registry import Registry
from megarl.types import Prompt

# Longer than any turn of the policy takes.
_PATIENCE_MS = 24 * 3600 * 1000
# Columns of a row's `extra_info`: texts by path, written before the agent starts, and before the check.
FILES, CHECK_FILES = "files", "check_files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """An assignment for a harness: solve the task in `workspace`, where the agent starts.

    task: the text of the prompt's messages. home: an empty directory for settings. base_url: of the sample, with /v1.
    options: further words of the command line.
    """

    task: str
    workspace: Path
    home: Path
    base_url: str
    options: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A program to start, with environment variables besides the usual ones; it reads the task."""

    command: Sequence[str]
    variables: Mapping[str, str]


Harness: TypeAlias = Callable[[Assignment], Launch]
HARNESSES: Registry[Harness] = Registry("harness", key=f"{KEY}.harness")


@HARNESSES.register("claude-code")
def claude_code(given: Assignment) -> Launch:
    """Start Claude Code without telemetry; what it asks its small model does not train."""
    models = dict.fromkeys(
        ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL"), "policy"
    )
    return Launch(
        command=("claude", "--print", "--dangerously-skip-permissions", "--strict-mcp-config", *given.options),
        variables={
            **models,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "side",
            "API_TIMEOUT_MS": str(_PATIENCE_MS),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CONFIG_DIR": str(given.home),
            "DISABLE_AUTOUPDATER": "1",
            # Else it refuses to skip permissions as root, as in containers.
            "IS_SANDBOX": "1",
        },
    )


@HARNESSES.register("codex")
def codex(given: Assignment) -> Launch:
    """Start Codex with the sample's endpoint as the provider of its model."""
    provider = {
        "name": '"megarl"',
        "base_url": f'"{given.base_url}"',
        "wire_api": '"responses"',
        "env_key": '"OPENAI_API_KEY"',
        # Events are sent when a turn is complete.
        "stream_idle_timeout_ms": str(_PATIENCE_MS),
    }
    table = "{" + ", ".join(f"{name} = {value}" for name, value in provider.items()) + "}"
    settings = ("--config", "model_provider=megarl", "--config", f"model_providers.megarl={table}", "--model", "policy")
    no_questions = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return Launch(
        command=("codex", "exec", *settings, *no_questions, *given.options, "-"),
        variables={"CODEX_HOME": str(given.home)},
    )


@ENVIRONMENTS.register("harness")
class HarnessEnvironment(AgentEnvironment):
    """An environment whose other side is a coding agent: a program that works on files, started once for each sample.

    The reward is 1 if `check` ends with exit code 0 in the workspace after the agent has ended, else 0.
    """

    def __init__(
        self,
        *,
        harness: str,
        check: Sequence[str],
        workspace: str | None = None,
        options: Sequence[str] = (),
        wrapper: Sequence[str] = (),
        parser: str | None = "hermes",
        untrained_models: Sequence[str] = ("side",),
    ) -> None:
        """Make the environment of one sample.

        harness: `claude-code`, `codex`, or a function of yours as MODULE:NAME or FILE.py:NAME that takes an
        `Assignment` and returns a `Launch`. check: a program and its arguments. workspace: a directory of which each
        sample gets a copy. options: further words for the agent's command line. wrapper: words before both commands,
        such as those of a sandbox; {workspace} and {home} in them are the sample's. parser, untrained_models: as for
        `agent`.
        """
        super().__init__(agent=self._solve, parser=parser, untrained_models=untrained_models)
        loaded: Harness = load_object(harness, f"{KEY}.harness") if ":" in harness else HARNESSES.get(harness)
        self._harness, self._check, self._options, self._wrapper = loaded, tuple(check), options, tuple(wrapper)
        self._template = None if workspace is None else Path(workspace)
        require_no_secrets((*check, *options, *wrapper), KEY)
        if self._template is not None and not self._template.is_dir():
            raise ConfigError(f"{KEY}.workspace: {workspace} is no directory; correct its path, or leave it out")
        nowhere = Path("workspace")
        launch = loaded(Assignment(task="", workspace=nowhere, home=nowhere, base_url="", options=options))
        if not check:
            raise ConfigError(f"{KEY}.check is empty, expected a program and its arguments")
        for name, words in (("wrapper", wrapper), ("harness", launch.command), ("check", check)):
            if words and shutil.which(words[0]) is None:
                raise ConfigError(f"{KEY}.{name}: there is no program {words[0]!r}; install it, or put it on PATH")

    async def _solve(self, prompt: Prompt, base_url: str, api_key: str) -> Mapping[str, object]:
        """Run the agent and the check; raise RuntimeError if the agent fails."""
        scratch = Path(tempfile.mkdtemp(prefix="megarl-harness-"))
        workspace, home = scratch / "workspace", scratch / "home"
        try:
            home.mkdir()
            if self._template is None:
                workspace.mkdir()
            else:
                await asyncio.to_thread(shutil.copytree, self._template, workspace, symlinks=True)
            _write_files(workspace, prompt, FILES)
            task = "\n\n".join(message.content for message in prompt.messages)
            given = Assignment(task=task, workspace=workspace, home=home, base_url=base_url, options=self._options)
            launch = self._harness(given)
            variables = {**self.process_environment, "HOME": str(home)}
            around = [word.format(workspace=workspace, home=home) for word in self._wrapper]
            mine = {**variables, **endpoint_variables(base_url), **launch.variables}
            ended = await run_program([*around, *launch.command], task, mine, workspace)
            ended.require_success(launch.command[0])
            _write_files(workspace, prompt, CHECK_FILES)
            passed = (await run_program([*around, *self._check], "", variables, workspace)).exit_code == 0
        finally:
            # A repository has thousands of files, and the loop has thousands of samples.
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
        return {"reward": float(passed), "correct": float(passed)}


def _write_files(workspace: Path, prompt: Prompt, column: str) -> None:
    """Write a row's files. Raises ValueError for a path that leads out of the workspace, through a link too."""
    files = prompt.extra_info.get(column) or {}
    if not isinstance(files, Mapping):
        raise ValueError(f"extra_info.{column} is {type(files).__name__}, expected texts by path")
    for name, text in files.items():
        path = workspace / PurePosixPath(str(name))
        if not path.resolve().is_relative_to(workspace.resolve()) or not isinstance(text, str):
            raise ValueError(f"extra_info.{column} has {name!r}, expected a path within the workspace, and its text")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
