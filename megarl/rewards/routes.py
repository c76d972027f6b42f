"""Decide from the config section `rewards` which judges are asked about a data source."""

from collections.abc import Collection
from dataclasses import replace

from megarl.config.rewards import HybridConfig, RewardsConfig
from megarl.rewards.custom import load_reward_function
from megarl.rewards.hybrid import Summand
from megarl.rewards.manager import RULE
from megarl.rewards.rule import Rules


def summands_of(rewards: RewardsConfig) -> dict[str, Summand]:
    """Return the weight and transform of each judge's reward by the judge's name; the rule's name is always `rule`."""
    if rewards.manager != "hybrid":
        return {rewards.manager: Summand()}
    return {
        RULE if part.manager == "rule" else name: Summand(weight=part.weight, transform=part.transform, clip=part.clip)
        for name, part in rewards.hybrid.parts.items()
    }


def route_of(rewards: RewardsConfig, data_source: str) -> tuple[str, ...]:
    """Return the names of the judges whose rewards are mixed for a data source."""
    if rewards.manager != "hybrid":
        return (rewards.manager,)
    parts = rewards.hybrid.parts
    names = rewards.hybrid.routes.get(data_source, tuple(parts))
    return tuple(RULE if parts[name].manager == "rule" else name for name in names)


def without_training(rewards: RewardsConfig, sources: Collection[str]) -> RewardsConfig:
    """Return the section for evaluation: if the rule knows all sources, only it judges, so that runs are comparable."""
    rules = Rules(rewards)
    if all(rules.knows(source) for source in sources):
        return replace(rewards, manager="rule", hybrid=HybridConfig())
    return rewards


def check_sources(rewards: RewardsConfig, data_sources: Collection[str]) -> None:
    """Raise ConfigError for a custom file that does not load, settings that do not fit, and unknown sources."""
    rules = Rules(rewards)
    if rewards.custom.path is not None:
        load_reward_function(rewards.custom.path, rewards.custom.name, data_source="")
    for source in sorted({*rewards.sources, *data_sources}):
        if RULE in route_of(rewards, source) or rules.knows(source):
            rules.spec(source)
