"""Check that the entries of `rewards.judges` are consistent and that each has an effect."""

import re

from megarl.config.judges import JudgeConfig
from megarl.config.rewards import RewardsConfig
from megarl.errors import ConfigError
from megarl.texts.masking import require_no_secrets

_KEY = "rewards.judges"


def judge_key(rewards: RewardsConfig, part: str | None = None) -> str:
    """Return the entry of `rewards.judges` that `rewards.manager=judge`, or a part of the hybrid mixture, asks.

    Raises ConfigError if there is none, or more than one to choose from.
    """
    key, named = "rewards.manager=judge", None
    if part is not None:
        key, named = f"rewards.hybrid.parts.{part}", rewards.hybrid.parts[part].judge
    if named is not None and named not in rewards.judges:
        raise ConfigError(f"{key}.judge: got {named!r}, expected an entry of {_KEY}: {_names(rewards)}")
    if named is None and len(rewards.judges) != 1:
        remedy = (
            "name it in hybrid.parts.NAME.judge" if rewards.judges else "describe it there, see docs/rewards/judges.md"
        )
        raise ConfigError(f"{key}: asks the only entry of {_KEY}, but there is {_names(rewards)}; {remedy}")
    return named or next(iter(rewards.judges))


def check_judges(rewards: RewardsConfig) -> None:
    """Raise ConfigError for entries that contradict themselves, or that nothing asks."""
    asked = [judge_key(rewards)] if rewards.manager == "judge" else []
    if rewards.manager == "hybrid":
        for name, part in rewards.hybrid.parts.items():
            if part.manager == "judge":
                asked.append(judge_key(rewards, name))
            elif part.judge is not None:
                raise ConfigError(f"rewards.hybrid.parts.{name}.judge: is set, but manager={part.manager}; remove it")
    for name, judge in rewards.judges.items():
        key = f"{_KEY}.{name}"
        if name not in asked:
            raise ConfigError(f"{key}: nothing asks this judge; set rewards.manager=judge, or a part of the mixture")
        _check_place(rewards, key, judge)
        _check_judge(key, judge)
    used = {judge.server for judge in rewards.judges.values()}
    for name, server in rewards.judge_servers.items():
        if name not in used:
            raise ConfigError(f"rewards.judge_servers.{name}: no judge asks it; set rewards.judges.NAME.server={name}")
        require_no_secrets(server.args, f"rewards.judge_servers.{name}.args")
        if server.replicas % server.num_nodes:
            raise ConfigError(
                f"rewards.judge_servers.{name}.num_nodes: got {server.num_nodes}, expected a divisor of "
                f"replicas={server.replicas}"
            )


def _check_place(rewards: RewardsConfig, key: str, judge: JudgeConfig) -> None:
    """Raise ConfigError unless exactly one setting says where the judge's model is, and names an entry that exists."""
    places = {
        "endpoint.urls": bool(judge.endpoint.urls),
        "server": judge.server is not None,
        "use_policy": judge.use_policy,
    }
    if sum(places.values()) != 1:
        given = " and ".join(name for name, is_set in places.items() if is_set) or "none"
        raise ConfigError(
            f"{key}: got {given} of {', '.join(places)}, expected one, which says where the model is, as in "
            "endpoint: {urls: [http://host:8000/v1]}"
        )
    if judge.server is not None and judge.server not in rewards.judge_servers:
        known = ", ".join(rewards.judge_servers) or "none"
        raise ConfigError(f"{key}.server: got {judge.server!r}, expected an entry of rewards.judge_servers: {known}")
    limits = (judge.cache, judge.budget.requests, judge.budget.tokens)
    if judge.use_policy and (any(each is not None for each in limits) or judge.sampling.extra_body):
        raise ConfigError(
            f"{key}.use_policy: got true with cache, budget or sampling.extra_body, which endpoints have; remove them"
        )


def _check_judge(key: str, judge: JudgeConfig) -> None:
    if judge.opponents is not None and (judge.mode == "pointwise" or judge.opponents % 2):
        raise ConfigError(f"{key}.opponents: got {judge.opponents}, expected an even number, with mode=pairwise only")
    verdict, pairwise = judge.verdict, judge.mode == "pairwise"
    if verdict.pattern is not None:
        if verdict.form == "json":
            raise ConfigError(f"{key}.verdict.pattern: is set, but verdict.form=json reads no pattern; remove it")
        try:
            num_groups = re.compile(verdict.pattern).groups
        except re.error as error:
            raise ConfigError(f"{key}.verdict.pattern: got {verdict.pattern!r}: {error}; correct it") from error
        if num_groups != 1:
            raise ConfigError(
                f"{key}.verdict.pattern: got {num_groups} groups in {verdict.pattern!r}, expected one, around the "
                "verdict; write others as (?:...)"
            )
    if verdict.scale is not None and not verdict.scale[0] < verdict.scale[1]:
        raise ConfigError(f"{key}.verdict.scale: got {list(verdict.scale)}, expected [low, high] with low < high")
    if pairwise and (verdict.scale is not None or any(not 0 <= value <= 1 for value in verdict.labels.values())):
        raise ConfigError(
            f"{key}.verdict: with mode=pairwise, labels are A's share of a win, from 0 to 1, and there is no scale"
        )
    if judge.sampling.combine != "mean" and (pairwise or judge.sampling.votes == 1):
        raise ConfigError(
            f"{key}.sampling.combine: got {judge.sampling.combine!r}, expected 'mean' with mode=pairwise or one vote"
        )
    if judge.sampling.votes > 1 and judge.sampling.temperature == 0:
        raise ConfigError(
            f"{key}.sampling.votes: got {judge.sampling.votes} with temperature=0, which would be the same vote again; "
            "raise the temperature"
        )
    if (judge.on_error == "value") != (judge.value is not None):
        raise ConfigError(
            f"{key}.value: got {judge.value} with on_error={judge.on_error}; on_error=value takes a number, others none"
        )


def _names(rewards: RewardsConfig) -> str:
    return ", ".join(rewards.judges) or "none"
