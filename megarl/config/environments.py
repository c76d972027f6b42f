"""Define the section `environment`, which says what replies to the policy's turns. See docs/environments.md."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, POSITIVE, section, setting
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentEntry:
    """Name an environment class and the arguments that its constructor gets for each sample."""

    # A built-in environment, such as tools, or a class of your own as MODULE:CLASS or FILE.py:CLASS.
    type: str
    arguments: Mapping[str, Any] = field(default_factory=dict)  # Keyword arguments of the class.
    # Play an episode by a script before the run; false: do not, as where an episode has effects.
    rehearse: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """Configure the environments with which samples have conversations of several turns."""

    # Environment of the rows that name none: a name in entries, a built-in one, or MODULE:CLASS; null: the first answer
    # of the policy ends the sample.
    default: str | None = setting(None, needs_trust=True)
    key: str = "environment"  # Column of the prompt files that names a row's environment.
    entries: Mapping[str, EnvironmentEntry] = section(dict, needs_trust=True)  # Environments by names of your own.
    # Role of what a tool returns. tool: as the chat template renders this role; user: for templates without it.
    tool_role: Literal["tool", "user"] = "tool"
    # How the policy reads its earlier turns. written: as it wrote them; rendered: as the chat template writes the
    # conversation, which may leave out thoughts. Where that differs, the next turn is on a branch of its own.
    history: Literal["written", "rendered"] = "written"
    # Maximum tokens of a conversation with all its branches, those that it was given too; a path from the prompt has at
    # most rollout.max_response_tokens of them. null: that many in all.
    max_tokens: int | None = setting(None, AT_LEAST_1)
    max_turns: int = setting(8, AT_LEAST_1)  # Turns of the policy after which a conversation is cut.
    # Maximum tokens of a turn; null: as many as rollout.max_response_tokens leaves. That limit holds for the whole
    # conversation, replies included.
    max_turn_tokens: int | None = setting(None, AT_LEAST_1)
    # Names of environment variables that environments get besides the usual ones (docs/environments.md), and with them
    # agents, tools and servers of tools, as in [SEARCH_API_KEY].
    pass_env: tuple[str, ...] = setting((), needs_trust=True)
    # Processes in which environments run: on the driver's host, unless nodes says otherwise.
    hosts: int = setting(1, AT_LEAST_1)
    # Nodes over which these processes are spread: the first of the cluster on which no rank, engine or judge is placed,
    # nor the driver, as in a Slurm job that `megarl slurm submit --environment-nodes` writes. 0: none.
    nodes: int = setting(0, AT_LEAST_0)
    reply_timeout_s: float = setting(60.0, POSITIVE)  # Time limit of an environment's making, starts and replies.
    episode_timeout_s: float = setting(3600.0, POSITIVE)  # Time limit of a conversation, generation included.
    # Deaths of hosts, all together, that a run survives; the conversations of a dead host begin again.
    max_host_restarts: int = setting(10, AT_LEAST_0)

    def check(self, key: str) -> None:
        """Raise ConfigError for nodes on which no process would run."""
        if self.nodes > self.hosts:
            raise ConfigError(
                f"{key}.nodes: got {self.nodes} with {key}.hosts={self.hosts}, so that a node would have nothing to "
                f"do; raise {key}.hosts, or lower {key}.nodes"
            )

    def require_cpus(self, num_cpus: float, where: str) -> None:
        """Raise ConfigError if a node of so many CPUs gets more processes than these; `where` names it."""
        per_node = -(-self.hosts // self.nodes)
        if per_node > num_cpus:
            raise ConfigError(
                f"environment.hosts: got {self.hosts} on {self.nodes} node(s), up to {per_node} on each, but {where} "
                f"has {num_cpus:g} CPUs; lower it, raise environment.nodes, or use larger nodes"
            )
