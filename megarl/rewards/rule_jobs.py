"""What workers of the verifier pool are told to call (`VerifierJob.function`)."""

from collections.abc import Mapping
from typing import Any

from megarl.rewards.custom import load_reward_function
from megarl.rewards.sources import SourceSpec, score
from megarl.types import Reward


def judge_by_source(
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    data_source: str,
    source: SourceSpec,
    arguments: Mapping[str, Any],
) -> Reward:
    """By the scorer of a data source."""
    return score(data_source, response, ground_truth, extra_info, source=source, arguments=arguments)


def judge_by_file(
    response: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    path: str,
    name: str,
    data_source: str,
    prompt: str,
) -> Reward:
    """By a function of a user's file."""
    return load_reward_function(path, name, data_source=data_source, prompt=prompt)(response, ground_truth, extra_info)
