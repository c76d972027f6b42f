"""Reply to the policy's turns: environments, the tools that they run, and the host that runs many of them at once."""

from megarl.environments.base import ENVIRONMENTS, Action, Environment, Reply, ToolCall, open_environments

__all__ = ["ENVIRONMENTS", "Action", "Environment", "Reply", "ToolCall", "open_environments"]
