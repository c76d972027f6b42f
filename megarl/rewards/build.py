"""Start a run's judges from the config section `rewards`, and check in advance that they can judge the run's data: each
ground truth is accepted as an answer to itself, so that no run trains on data that nobody can answer.
"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
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
from megarl.rewards.environment import EnvironmentJudge, NoJudge
from megarl.rewards.judge import Judge
from megarl.rewards.llm import Completions, EndpointCompletions, LlmJudge, try_judge
from megarl.rewards.manager import RULE, RewardManager
from megarl.rewards.remote import RemoteJudge
from megarl.rewards.routes import check_sources, route_of, summands_of
from megarl.rewards.rule import RuleJudge, Rules
from megarl.rewards.scorers import FORMATS, SCORERS, SourceSpec, score
from megarl.rewards.truths import any_mathematics, stated_in, without_stop
from megarl.types import Prompt
from megarl_answers.statement import last_number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SHOWN = 3
# Empty fields of tables become one of these as text.
_EMPTY = frozenset({"", "none", "null", "nan", "n/a", "boxed", "[]", '"target":[]'})

_NUMBER = re.compile(r"\d[\d.,]*")
_ORDINAL = re.compile(r"(?:the\s+)?(\d+)(?:st|nd|rd|th)", re.IGNORECASE)
# Two numbers or one with a decimal comma; and commas that only lists have.
_COMMA = re.compile(r"[-+]?(?:0,\d+|\d+,(?!\d{3}$)\d+)")
_LISTED = re.compile(r",\D|\D,|,\d{1,2},|[(\[{].*,")
# A letter with words; and nothing but words, numbers and signs that may stand between them.
_CHOICE = re.compile(r"(?:option|choice)\s+\(?([A-Z])\W*|\(?([A-Z])[).:](?:\s*\w.*)?", re.IGNORECASE)
_PROSE = re.compile(r"(?:\\text\w*|\\[()\[\],;! ]|[^\W\d_]{2,}|[^\W\d_]?'[a-z]+|\b[aAI]\b|[^\w\\<>|^&\[\]]|\d)+")


def is_empty(ground_truth: str) -> bool:
    r"""Return whether a ground truth says nothing: blank, `None`, `$$`, `\boxed{}`, an empty list of answers."""
    plain = "".join(c for c in ground_truth if c not in "\\{}$*. \t\r\n")
    return plain.casefold() in _EMPTY


def alone(answer: str) -> str | None:
    """Return the letter or number that an answer states in words, None for other answers."""
    if letter := _CHOICE.fullmatch(answer):
        return letter[1] or letter[2]
    if ordinal := _ORDINAL.fullmatch(answer):
        return ordinal[1]
    is_prose = _PROSE.fullmatch(answer) and (answer.count("=") == 1 or len(_NUMBER.findall(answer)) == 1)
    return last_number(answer) if is_prose else None


def spread_rows(num_rows: int, limit: int) -> frozenset[int]:
    """Return the indices of at most `limit` rows at equal distances, among them the first."""
    num = min(num_rows, limit)
    return frozenset(index * num_rows // num for index in range(num))


def check_own_answers(prompts: Sequence[tuple[str, Prompt, SourceSpec]], max_unscorable: float) -> str:
    """Judge the ground truth of each prompt, which is named for messages, as an answer to itself.

    Returns a warning that says which share of them scores as wrong or is empty, with examples; "" if none does. `0,5`
    counts as wrong unless other ground truths of its data source show that commas part answers. Raises DataError if
    this share is above `max_unscorable` for any data source, or if a ground truth is malformed.
    """
    judged: Counter[str] = Counter()
    failed: defaultdict[str, list[str]] = defaultdict(list)
    commas: defaultdict[str, list[str]] = defaultdict(list)
    with_lists = set[str]()
    for where, prompt, spec in prompts:
        judged[prompt.data_source] += 1
        empty = spec.scorer.removeprefix("format/") not in FORMATS and is_empty(prompt.ground_truth)
        if empty or not _is_right(prompt, spec):
            failed[prompt.data_source].append(f"{where}: {prompt.ground_truth[:60]!r}")
        elif "," in prompt.ground_truth and SCORERS.get(spec.variant).truths is any_mathematics:
            if _COMMA.fullmatch(prompt.ground_truth.strip("$ ")):
                commas[prompt.data_source].append(f"{where}: {prompt.ground_truth[:60]!r}")
            elif _LISTED.search(prompt.ground_truth):
                with_lists.add(prompt.data_source)
    for source in commas.keys() - with_lists:
        failed[source] += commas[source]
    for source, found in failed.items():
        share = len(found) / judged[source]
        if share > max_unscorable:
            raise DataError(
                f"ground truths of {source!r}: {len(found)} of {judged[source]} ({share:.1%}) are empty or, as answers,"
                f" judged wrong ({'; '.join(found[:SHOWN])}), expected at most {max_unscorable:.1%}; correct the data "
                "(a decimal comma 0,5 to 0.5, two answers to 0, 5), choose another scorer in rewards.sources, or "
                "raise rewards.ground_truths.max_unscorable"
            )
    if not failed:
        return ""
    total = sum(map(len, failed.values()))
    examples = [text for found in failed.values() for text in found][:SHOWN]
    return f"warning: ground truths: {total} of {len(prompts)} ({total / len(prompts):.2%}) cannot be scored" + "".join(
        f"\n  {text}" for text in examples
    )


def _is_right(prompt: Prompt, spec: SourceSpec) -> bool:
    """Return whether every answer that a ground truth stands for is right, and the text of one as it is in the file.

    If it is a sentence that states a number or a letter, these are right too.
    """
    scorer, truth = SCORERS.get(spec.variant), prompt.ground_truth
    answers = scorer.truths(truth, prompt.label)
    plain = [] if truth.startswith(("[", "{")) or stated_in(truth) else [without_stop(truth)]
    if scorer.truths is any_mathematics:
        plain += [found for answer in answers if (found := alone(answer))]
    return scorer.states is None or all(
        score(prompt.data_source, scorer.states(answer), truth, prompt.extra_info, source=spec).correct
        for answer in dict.fromkeys([*plain, *answers])
    )


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
