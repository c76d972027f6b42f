"""Reply to the policy's turns: environments, the tools that they run, and the worker that runs many of them at once."""

from megarl.environments import code, games, gym, harness, mcp_tools, nemo_gym, openenv, packages, reasoning_gym, shell
from megarl.environments.agent import AgentEnvironment
from megarl.environments.base import ENVIRONMENTS, Action, Environment, Reply, SideRequest, open_environments, tools_of
from megarl.environments.tools import ToolEnvironment, ToolError, check_replies

__all__ = [
    "ENVIRONMENTS",
    "Action",
    "AgentEnvironment",
    "Environment",
    "Reply",
    "SideRequest",
    "ToolEnvironment",
    "ToolError",
    "check_replies",
    "code",
    "games",
    "gym",
    "harness",
    "mcp_tools",
    "nemo_gym",
    "open_environments",
    "openenv",
    "packages",
    "reasoning_gym",
    "shell",
    "tools_of",
]
