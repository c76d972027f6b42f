"""Let a coding agent's program, such as Claude Code or Codex, solve a sample in a workspace of its own."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from megarl.environments.agent import KEY, AgentEnvironment, endpoint_variables
from megarl.environments.base import ENVIRONMENTS, load_object
from megarl.environments.work import Work
from megarl.errors import ConfigError
from megarl.host.masking import require_no_secrets
from megarl.registry import Registry
from megarl.types import Prompt

# Longer than any turn of the policy takes.
_PATIENCE_MS = 24 * 3600 * 1000


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
        sandbox: str = "process",
        sandbox_settings: Mapping[str, object] | None = None,
        patch: bool = False,
        parser: str | None = "hermes",
        untrained_models: Sequence[str] = ("side",),
    ) -> None:
        """Make the environment of one sample.

        harness: `claude-code`, `codex`, or a function of yours as MODULE:NAME or FILE.py:NAME that takes an
        `Assignment` and returns a `Launch`. options: further words for the agent's command line. check, workspace,
        sandbox, sandbox_settings, patch: see `Work`. parser, untrained_models: as for `agent`.
        """
        super().__init__(agent=self._solve, parser=parser, untrained_models=untrained_models)
        loaded: Harness = load_object(harness, f"{KEY}.harness") if ":" in harness else HARNESSES.get(harness)
        self._harness, self._options = loaded, options
        require_no_secrets(options, KEY)
        self._work = Work(
            check=check, workspace=workspace, sandbox=sandbox, sandbox_settings=sandbox_settings, patch=patch
        )
        nowhere = Path("workspace")
        launch = loaded(Assignment(task="", workspace=nowhere, home=nowhere, base_url="", options=options))
        if sandbox == "process" and shutil.which(launch.command[0]) is None:
            raise ConfigError(
                f"{KEY}.harness: there is no program {launch.command[0]!r}; install it, or put it on PATH"
            )

    async def _solve(self, prompt: Prompt, base_url: str, api_key: str) -> Mapping[str, object]:
        """Run the agent and the check; raise RuntimeError if the agent fails."""
        try:
            box = await self._work.begin(prompt, self.process_environment)
            task = "\n\n".join(message.content for message in prompt.messages)
            workspace, home = Path(box.workspace), Path(box.home)
            given = Assignment(task=task, workspace=workspace, home=home, base_url=base_url, options=self._options)
            launch = self._harness(given)
            mine = {**self.process_environment, **endpoint_variables(base_url), **launch.variables}
            ended = await box.run(launch.command, stdin=task, variables=mine, url=base_url)
            ended.require_success(launch.command[0])
            passed = await self._work.passes(box)
        finally:
            await self._work.close()
        return {"reward": float(passed), "correct": float(passed)}
