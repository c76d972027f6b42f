"""Start a run's judges from the config section `rewards`, and check in advance that they can judge the run's data."""

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from megarl.config.rewards import RewardsConfig
from megarl.data.chat import response_decoder
from megarl.data.prompts import PromptDataset
from megarl.errors import ConfigError, DataError
from megarl.rewards.judge import Judge
from megarl.rewards.manager import RULE, RewardManager
from megarl.rewards.remote import RemoteJudge
from megarl.rewards.routes import check_sources, route_of, summands_of
from megarl.rewards.rule import RuleJudge, Rules
from megarl.rewards.sources import score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_rewards(
    rewards: RewardsConfig,
    sources: Collection[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    model: Judge | None = None,
) -> RewardManager:
    """Start the judges that the data sources need.

    tokenizer: the policy's. model: judges by the run's reward model, None without one. Raises ConfigError if only a
    reward model could judge a data source and `model` is None.
    """
    rules = Rules(rewards)
    judges: dict[str, Judge] = {}
    if any(rules.knows(source) for source in sources):
        judges[RULE] = RuleJudge(rewards)
    for name in {name for source in sources for name in route_of(rewards, source)} - {RULE}:
        part = rewards.hybrid.parts.get(name)
        if (part.manager if part else rewards.manager) == "remote":
            judges[name] = RemoteJudge(rewards.remote, (part.urls if part else ()) or rewards.remote.urls, name=name)
        elif model is None:
            raise ConfigError(
                "rewards.manager: a reward model judges samples only while a run trains; name data sources that have a "
                "scorer, or set rewards.manager=rule"
            )
        else:
            judges[name] = model
    return RewardManager(
        judges=judges,
        summands={name: summand for name, summand in summands_of(rewards).items() if name in judges},
        route=partial(route_of, rewards),
        knows=rules.knows,
        decode=response_decoder(tokenizer),
        tokenizer=tokenizer,
    )


def check_ground_truths(rewards: RewardsConfig, data: PromptDataset) -> None:
    """Judge an empty answer to every prompt, so that unknown data sources and malformed ground truths fail at the
    start.
    """
    check_sources(rewards, data.data_sources)
    rules = Rules(rewards)
    for index in range(len(data)):
        prompt = data[index]
        # A custom function checks ground truths only when it judges.
        spec = rules.spec(prompt.data_source) if rules.knows(prompt.data_source) else None
        if spec is None:
            continue
        try:
            score(prompt.data_source, "", prompt.ground_truth, prompt.extra_info, source=spec)
        except DataError as error:
            raise DataError(f"prompt {prompt.uid}: {error}") from error
