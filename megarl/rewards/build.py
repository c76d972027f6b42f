"""From the section `rewards` to the judges of a run."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from megarl.config.rewards import RewardsConfig
from megarl.data.chat import response_decoder
from megarl.data.prompts import PromptDataset
from megarl.errors import ConfigError, DataError
from megarl.rewards.judge import Judge
from megarl.rewards.manager import RULE, Panel, RewardManager
from megarl.rewards.remote import RemoteJudge
from megarl.rewards.routes import check_sources, route_of, summands_of
from megarl.rewards.rule import RuleJudge, Rules
from megarl.rewards.sources import score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def reward_manager(panel: Panel, tokenizer: "PreTrainedTokenizerBase") -> RewardManager:
    """The manager of a run whose policy has this tokenizer."""

    def show(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids))

    return RewardManager(panel, response_decoder(tokenizer), show)


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
