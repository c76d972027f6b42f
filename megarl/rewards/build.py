"""From the section `rewards` to the judges of a run."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megarl.config.rewards import HybridConfig, RewardsConfig
from megarl.data.chat import response_decoder
from megarl.data.prompts import PromptDataset
from megarl.errors import ConfigError, DataError
from megarl.rewards.custom import load_reward_function
from megarl.rewards.hybrid import Summand
from megarl.rewards.judge import Judge
from megarl.rewards.manager import RULE, Panel, RewardManager
from megarl.rewards.remote import RemoteJudge
from megarl.rewards.rule import RuleJudge, Rules
from megarl.rewards.sources import score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def open_panel(rewards: RewardsConfig, sources: Collection[str], *, model: Judge | None = None) -> Panel:
    """The judges that data sources need, started. `model` is the reward model, if there is one.

    ConfigError if only a reward model judges one of them, and there is none.
    """
    rules = Rules(rewards)
    judges: dict[str, Judge] = {}
    if any(rules.knows(source) for source in sources):
        judges[RULE] = RuleJudge(rewards)
    for name in {name for source in sources for name in route_of(rewards, source)} - {RULE}:
        judges[name] = _open_judge(rewards, name, model)
    return Panel(
        judges=judges,
        summands={name: summand for name, summand in summands_of(rewards).items() if name in judges},
        route=lambda source: route_of(rewards, source),
        knows=rules.knows,
    )


def _open_judge(rewards: RewardsConfig, name: str, model: Judge | None) -> Judge:
    part = rewards.hybrid.parts.get(name)
    if (part.manager if part else rewards.manager) == "remote":
        return RemoteJudge(rewards.remote, (part.urls if part else ()) or rewards.remote.urls, name=name)
    if model is None:
        raise ConfigError(
            "rewards.manager: a reward model judges samples only while a run trains; name data sources that have a "
            "scorer, or set rewards.manager=rule"
        )
    return model


def without_training(rewards: RewardsConfig, sources: Collection[str]) -> RewardsConfig:
    """Who judges where nothing is trained: the rule, by whose scores runs can be compared, if it knows all sources."""
    rules = Rules(rewards)
    if all(rules.knows(source) for source in sources):
        return replace(rewards, manager="rule", hybrid=HybridConfig())
    return rewards


def reward_manager(panel: Panel, tokenizer: "PreTrainedTokenizerBase") -> RewardManager:
    """The manager of a run whose policy has this tokenizer."""

    def show(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids))

    return RewardManager(panel, response_decoder(tokenizer), show)


def check_sources(rewards: RewardsConfig, data_sources: Collection[str]) -> None:
    """ConfigError for a custom file that does not load, settings of sources that do not fit, and unknown sources."""
    rules = Rules(rewards)
    if rewards.custom.path is not None:
        load_reward_function(rewards.custom.path, rewards.custom.name, data_source="")
    for source in sorted({*rewards.sources, *data_sources}):
        if RULE in route_of(rewards, source) or rules.knows(source):
            rules.spec(source)


def check_ground_truths(rewards: RewardsConfig, data: PromptDataset) -> None:
    """Judge an empty answer to every prompt: an unknown source or a malformed ground truth shows now."""
    check_sources(rewards, data.data_sources)
    rules = Rules(rewards)
    for index in range(len(data)):
        prompt = data[index]
        # What a custom function does with a ground truth, it does when it judges.
        spec = rules.spec(prompt.data_source) if rules.knows(prompt.data_source) else None
        if spec is None:
            continue
        try:
            score(prompt.data_source, "", prompt.ground_truth, prompt.extra_info, source=spec)
        except DataError as error:
            raise DataError(f"prompt {prompt.uid}: {error}") from error
