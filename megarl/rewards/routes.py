"""Determine from the config section `rewards` which judges reward which data source."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from megarl.config.mixture import HybridConfig
from megarl.config.rewards import RewardsConfig
from megarl.rewards.hybrid import Summand
from megarl.rewards.manager import RULE
from megarl.rewards.rule import Rules


def summands_of(rewards: RewardsConfig) -> dict[str, Summand]:
    """Return, by judge's name, the weight and transform of each judge's reward; the rule has the name `rule`."""
    if rewards.manager != "hybrid":
        return {rewards.manager: Summand()}
    return {
        RULE if part.manager == "rule" else name: Summand(weight=part.weight, transform=part.transform, clip=part.clip)
        for name, part in rewards.hybrid.parts.items()
    }


def route_of(rewards: RewardsConfig, data_source: str) -> tuple[str, ...]:
    """Return the names of the judges whose rewards make up the reward of a data source."""
    if rewards.manager != "hybrid":
        return (rewards.manager,)
    parts = rewards.hybrid.parts
    names = rewards.hybrid.routes.get(data_source, tuple(parts))
    return tuple(RULE if parts[name].manager == "rule" else name for name in names)


def without_training(rewards: RewardsConfig, sources: Collection[str]) -> RewardsConfig:
    """Return the section `rewards` to use in evaluation: the rule alone if it can judge all data sources, for
    comparability.
    """
    rules = Rules(rewards)
    if all(rules.knows(source) for source in sources):
        return replace(rewards, manager="rule", hybrid=HybridConfig())
    return rewards


def check_sources(rewards: RewardsConfig, data_sources: Collection[str], *, loads: bool = True) -> None:
    """Raise ConfigError for unknown data sources, contradictory settings, or if it `loads`, wrong custom files."""
    rules = Rules(rewards)
    if loads:
        rules.custom.check()
    for source in sorted({*rewards.sources, *data_sources}):
        if RULE in route_of(rewards, source) or rules.knows(source):
            rules.spec(source)


def filter_ranges(rewards: RewardsConfig, by: str, data_sources: Collection[str]) -> Mapping[str, tuple[float, float]]:
    """Return, by data source, the smallest and largest number by which `algo.filter` can judge its samples.

    Data sources are left out if a user's function, a service or a model gives the numbers, because nothing bounds them.
    """
    if by == "correct":
        return dict.fromkeys(sorted(data_sources), (0.0, 1.0))
    rules, ranges = Rules(rewards), dict[str, tuple[float, float]]()
    for source in sorted(data_sources):
        spec = rules.spec(source) if rules.knows(source) else None
        if rules.custom.of(source):
            continue
        if spec is not None and by == "score":
            ranges[source] = (0.0, 1.0)
        elif spec is not None and rewards.manager == RULE:
            ranges[source] = (min(spec.wrong, spec.wrong if spec.malformed is None else spec.malformed), spec.correct)
    return ranges
