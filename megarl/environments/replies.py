"""Check before a run that the policy can read what environments reply."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from megarl.config.environments import EnvironmentConfig
from megarl.data.turns import InterTurnTokens
from megarl.environments.base import open_environments
from megarl.environments.tools import ToolEnvironment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_replies(cfg: EnvironmentConfig, names: Collection[str], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Check that the chat template renders what the environments `names` of rows reply, results of tools included.

    Raises ConfigError or DataError if it does not.
    """
    if not names:
        return
    inter_turn = InterTurnTokens(tokenizer)
    makers = open_environments(cfg, sorted(names)).values()
    if any(isinstance(maker.made_in_time(), ToolEnvironment) for maker in makers):
        inter_turn.require_reply(cfg.tool_role)
