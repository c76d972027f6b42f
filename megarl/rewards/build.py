"""Start a run's judges from the config section `rewards`, and check in advance that they can judge the run's data."""

import sys
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from megarl.config.judges import JudgeConfig
from megarl.config.rewards import RewardsConfig
from megarl.data.answers import response_decoder
from megarl.data.prompts import PromptDataset
from megarl.errors import ConfigError, DataError
from megarl.host.streams import print_lines
from megarl.rewards.custom import CustomFunctions, try_functions
from megarl.rewards.environment import EnvironmentJudge
from megarl.rewards.judge import Judge
from megarl.rewards.llm import Completions, EndpointCompletions, LlmJudge, try_judge
from megarl.rewards.manager import RULE, RewardManager
from megarl.rewards.own_answer import check_own_answers, is_empty, spread_rows
from megarl.rewards.remote import RemoteJudge
from megarl.rewards.routes import check_sources, route_of, summands_of
from megarl.rewards.rule import RuleJudge, Rules
from megarl.rewards.scorers import FORMATS, SCORERS
from megarl.rewards.sources import SourceSpec, score
from megarl.rewards.zero import NoJudge
from megarl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Returns how to ask the model of an entry of `rewards.judges`, given its name and settings.
CompletionsOf: TypeAlias = Callable[[str, JudgeConfig], Completions]


def open_rewards(
    rewards: RewardsConfig,
    sources: Collection[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    model: Judge[Any] | None = None,
    completions: CompletionsOf | None = None,
) -> RewardManager:
    """Start the judges that the data sources need.

    tokenizer: the policy's. model: judges by the run's reward model, None without one. completions: asks a language
    model that belongs to the run. Raises ConfigError if only a model could judge a data source that is not given.
    """
    rules = Rules(rewards)
    judges: dict[str, Judge[Any]] = {}
    if any(rules.knows(source) for source in sources):
        judges[RULE] = RuleJudge(rewards)
    for name in {name for source in sources for name in route_of(rewards, source)} - {RULE}:
        part = rewards.hybrid.parts.get(name)
        manager = part.manager if part else rewards.manager
        if manager == "judge":
            judges[name] = open_judge(rewards, rewards.judge_key(name if part else None), completions, name=name)
        elif manager == "environment":
            judges[name] = EnvironmentJudge()
        elif manager == "none":
            judges[name] = NoJudge()
        elif manager == "remote":
            cfg, section = rewards.remote, "rewards.remote"
            if part and part.urls:
                cfg, section = (
                    replace(cfg, urls=part.urls, api_key_env=part.api_key_env),
                    f"rewards.hybrid.parts.{name}",
                )
            judges[name] = RemoteJudge(cfg, name=name, section=section)
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
        decode=response_decoder(tokenizer, keeps_channels=False),
        tokenizer=tokenizer,
    )


def open_judge(rewards: RewardsConfig, key: str, completions: CompletionsOf | None = None, *, name: str) -> LlmJudge:
    """Open the judge `rewards.judges.KEY`, which is called `name` in metrics; `completions` as in `open_rewards`."""
    cfg = rewards.judges[key]
    if cfg.endpoint.urls:
        return LlmJudge(cfg, EndpointCompletions(cfg, name=key), name=name, section=key)
    if completions is None:
        raise ConfigError(
            f"rewards.judges.{key}: its model belongs to a run that trains; serve the model with vllm serve, list it "
            f"in rewards.judges.{key}.endpoint.urls, or set rewards.manager=rule"
        )
    return LlmJudge(cfg, completions(key, cfg), name=name, section=key)


def _check_format(spec: SourceSpec, prompt: Prompt, text: str, where: str) -> None:
    """Raise ConfigError if a format wants a response to open the thought that its prompt has opened, or the reverse."""
    form = spec.format or spec.scorer.partition("format/")[2]
    plain = form.removesuffix("/opened")
    opened, taken = text.rstrip().endswith("<think>"), form != plain
    if f"{plain}/opened" in FORMATS and opened != taken and (opened or "<think>" not in text):
        raise ConfigError(
            f"data source {prompt.data_source}: the format is {form!r}, but the prompt of {where} ends "
            f"with {text[-20:]!r}, after which no response has it; take {plain if taken else f'{plain}/opened'!r}"
        )


def check_ground_truths(rewards: RewardsConfig, data: PromptDataset, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Judge an empty answer to every prompt, and ground truths against themselves, so that unknown data sources, ground
    truths that no answer matches and formats that no answer can have fail at the start. Warns of the share of those
    that cannot be scored.
    """
    check_sources(rewards, data.data_sources)
    rules = Rules(rewards)
    # A custom function checks ground truths only when it judges.
    specs = {source: rules.spec(source) if rules.knows(source) else None for source in data.data_sources}
    by_scorer, chosen = [], spread_rows(len(data), rewards.ground_truths.max_rows)
    # The first prompt of each data source.
    firsts: dict[str, Prompt] = {}
    for index in range(len(data)):
        prompt, where = data[index], data.where(index)
        is_first = firsts.setdefault(prompt.data_source, prompt) is prompt
        if (spec := specs[prompt.data_source]) is None:
            continue
        if is_first:
            _check_format(spec, prompt, str(tokenizer.decode(prompt.token_ids)), where)
        if (name := data.indexed(index)) and SCORERS.get(spec.variant).states is not None:
            raise DataError(
                f"{where}: ground truth {prompt.ground_truth!r}: got what may be the number of one of its {name}, "
                f"expected the answer itself, such as its letter; write that, or remove the column {name}"
            )
        try:
            if prompt.label is not None:
                SCORERS.get(spec.variant).truths(prompt.ground_truth, prompt.label)
            score(prompt.data_source, "", prompt.ground_truth, prompt.extra_info, source=spec)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        if index in chosen or is_empty(prompt.ground_truth):
            by_scorer.append((where, prompt, spec))
    if warning := check_own_answers(by_scorer, rewards.ground_truths.max_unscorable):
        print_lines(warning, file=sys.stderr)
    if rewards.custom.dry_run:
        try_functions(CustomFunctions(rewards), firsts.values())
    for key, cfg in rewards.judges.items():
        # A model of the run is not there yet.
        if cfg.dry_run and cfg.endpoint.urls:
            with closing(open_judge(rewards, key, name=key)) as judge:
                try_judge(judge, next(iter(firsts.values())))
