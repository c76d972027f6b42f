"""Who is asked about a data source, as the section `rewards` says."""

from collections.abc import Collection
from dataclasses import replace

from megarl.config.rewards import HybridConfig, RewardsConfig
from megarl.rewards.custom import load_reward_function
from megarl.rewards.hybrid import Summand
from megarl.rewards.manager import RULE
from megarl.rewards.rule import Rules


def summands_of(rewards: RewardsConfig) -> dict[str, Summand]:
    """Who is rewarded for what, by the names that judges have: that of the rule is always `rule`."""
    if rewards.manager != "hybrid":
        return {rewards.manager: Summand()}
    return {
        _judge_name(rewards, name): Summand(weight=part.weight, transform=part.transform, clip=part.clip)
        for name, part in rewards.hybrid.parts.items()
    }


def route_of(rewards: RewardsConfig, data_source: str) -> tuple[str, ...]:
    """The judges whose rewards make up that of a data source."""
    if rewards.manager != "hybrid":
        return (rewards.manager,)
    names = rewards.hybrid.routes.get(data_source, tuple(rewards.hybrid.parts))
    return tuple(_judge_name(rewards, name) for name in names)


def _judge_name(rewards: RewardsConfig, part: str) -> str:
    return RULE if rewards.hybrid.parts[part].manager == "rule" else part


def without_training(rewards: RewardsConfig, sources: Collection[str]) -> RewardsConfig:
    """Who judges where nothing is trained: the rule, by whose scores runs can be compared, if it knows all sources."""
    rules = Rules(rewards)
    if all(rules.knows(source) for source in sources):
        return replace(rewards, manager="rule", hybrid=HybridConfig())
    return rewards


def check_sources(rewards: RewardsConfig, data_sources: Collection[str]) -> None:
    """ConfigError for a custom file that does not load, settings of sources that do not fit, and unknown sources."""
    rules = Rules(rewards)
    if rewards.custom.path is not None:
        load_reward_function(rewards.custom.path, rewards.custom.name, data_source="")
    for source in sorted({*rewards.sources, *data_sources}):
        if RULE in route_of(rewards, source) or rules.knows(source):
            rules.spec(source)
