"""OpenRLHF's reward functions from a file: reward_func(queries, prompts, labels, **kwargs)."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megarl.errors import RunError
from megarl.rewards.wire import BadReplyError, decode_reply
from megarl.types import Reward

PARAMETERS = ("queries", "prompts", "labels")


def is_reward_func(function: Callable[..., Any]) -> bool:
    """Whether a function takes what OpenRLHF's do."""
    return set(PARAMETERS) <= inspect.signature(function).parameters.keys()


def call_reward_func(
    function: Callable[..., Any], *, prompt: str, response: str, ground_truth: str, others: Mapping[str, Any]
) -> Any:
    """Call it with one response: lists of one entry each, `others` too if it takes further keywords."""
    takes_others = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    more = {name: [value] for name, value in others.items()} if takes_others else {}
    return function(queries=[prompt + response], prompts=[prompt], labels=[ground_truth], **more)


def reward_of_result(result: Any, path: Path) -> Reward:
    """From {"rewards": …, "scores": …, "extra_logs": {…}}, tensors, arrays or lists of one number, the last two perhaps
    missing; RunError if it is anything else.
    """
    try:
        return decode_reply(_plain(result), 1).reward(0)
    except BadReplyError as error:
        raise RunError(f"{path}: the reward function returned for one row: {error}") from error


def _plain(value: Any) -> Any:
    """Tensors and arrays as lists, of one number where they have no dimension."""
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
        return value if isinstance(value, list) else [value]
    return value
