"""Check that the settings of the section `rewards` are consistent and that each has an effect."""

from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from megarl.config.check_judges import check_judges, judge_key
from megarl.config.rewards import HybridPartConfig, RewardsConfig, SourceConfig
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.texts.masking import masked_text

_REMOTE, _HYBRID = "rewards.remote", "rewards.hybrid"


def check_rewards(config: Config) -> None:
    """Raise ConfigError for settings of the section `rewards` that contradict each other or have no effect."""
    rewards = config.rewards
    _check_verifier(rewards)
    _check_custom(rewards)
    _check_hybrid(rewards)
    _check_remote(rewards)
    check_judges(rewards)
    for key, urls in ((f"rewards.judges.{name}", judge.endpoint.urls) for name, judge in rewards.judges.items()):
        for url in urls:
            _check_url(f"{key}.endpoint.urls", url)


def check_group_scores(config: Config) -> None:
    """Raise ConfigError if the hybrid mixture standardises rewards within a group (z-score) but groups have one
    sample.
    """
    if config.rewards.manager == "judge" and config.rollout.num_samples < 2:
        _require_groups(config, judge_key(config.rewards))
    for key, part in _parts(config.rewards):
        if part.manager == "judge" and config.rollout.num_samples < 2:
            _require_groups(config, judge_key(config.rewards, key.rpartition(".")[2]))
        if part.transform == "group_zscore" and config.rollout.num_samples < 2:
            raise ConfigError(
                f"{key}.transform: got 'group_zscore' with rollout.num_samples=1, whose z-scores are all 0; raise "
                "rollout.num_samples, or choose another transform"
            )


def check_policy_judges(config: Config) -> None:
    """Raise ConfigError for a judge that asks the policy in a run whose samples are replayed, without engines."""
    for name, judge in config.rewards.judges.items():
        if judge.use_policy and config.rollout.source != "vllm":
            raise ConfigError(
                f"rewards.judges.{name}.use_policy: got true with rollout.source={config.rollout.source}, which may "
                "have no engines; set rollout.source=vllm"
            )


def _require_groups(config: Config, judge: str) -> None:
    """Raise ConfigError for a judge that compares the responses of a group, if groups have one."""
    if config.rewards.judges[judge].mode == "pairwise":
        raise ConfigError(
            f"rewards.judges.{judge}.mode: got 'pairwise' with rollout.num_samples=1, so there is nothing to compare; "
            "raise rollout.num_samples, or set mode=pointwise"
        )


def judges(rewards: RewardsConfig, manager: str) -> bool:
    """Return whether the reward manager `manager` is used, alone or in the hybrid mixture."""
    return manager in (rewards.manager, *(part.manager for _, part in _parts(rewards)))


def _parts(rewards: RewardsConfig) -> Iterator[tuple[str, HybridPartConfig]]:
    """Yield the key and settings of each part of the hybrid mixture; nothing unless `rewards.manager` is `hybrid`."""
    if rewards.manager == "hybrid":
        yield from ((f"{_HYBRID}.parts.{name}", part) for name, part in rewards.hybrid.parts.items())


def _check_verifier(rewards: RewardsConfig) -> None:
    limits = rewards.verifier
    if limits.hard_limit_s <= limits.soft_limit_s:
        raise ConfigError(
            f"rewards.verifier.hard_limit_s: got {limits.hard_limit_s}, expected more than rewards.verifier."
            f"soft_limit_s={limits.soft_limit_s}, which must have its chance first; raise it"
        )


def _check_custom(rewards: RewardsConfig) -> None:
    custom, functions = rewards.custom, rewards.custom.all_functions()
    if custom.path is not None and custom.name in custom.functions:
        raise ConfigError(
            f"rewards.custom.functions.{custom.name}: rewards.custom.path has a function of this name; rename this one"
        )
    for name, function in functions.items():
        key = f"rewards.custom.functions.{name}" if name in custom.functions else "rewards.custom"
        if not function.path.endswith(".py"):
            raise ConfigError(f"{key}.path: got {function.path!r}, expected a Python file (.py)")
    _check_fallback("rewards.custom", custom.on_error, custom.value)
    named = {source for function in functions.values() for source in function.sources}
    takes_rest = any(not function.sources for function in functions.values())
    for name, source in rewards.sources.items():
        if source.scorer is None and source != SourceConfig() and (takes_rest or name in named):
            raise ConfigError(
                f"rewards.sources.{name}: says how a scorer judges this source, but rewards.custom judges it; set "
                f"rewards.sources.{name}.scorer, or remove the other keys"
            )


def _check_fallback(key: str, on_error: str, value: float | None) -> None:
    """Raise ConfigError unless the section `key` has a `value` exactly if `on_error` is `value`."""
    if (on_error == "value") != (value is not None):
        given = "is not set" if value is None else f"got {value}"
        raise ConfigError(
            f"{key}.value: {given}, but {key}.on_error={on_error}; on_error=value takes a number, other choices take "
            "none"
        )


def _check_hybrid(rewards: RewardsConfig) -> None:
    hybrid = rewards.hybrid
    if rewards.manager != "hybrid":
        if hybrid.parts or hybrid.routes:
            raise ConfigError(
                f"{_HYBRID}: is set, but rewards.manager={rewards.manager} does not read it; set "
                "rewards.manager=hybrid, or remove it"
            )
        return
    if not hybrid.parts:
        raise ConfigError(
            f"{_HYBRID}.parts: is empty, but rewards.manager=hybrid; name its parts, as in "
            "{rule: {manager: rule}, judge: {manager: remote, weight: 0.2}}"
        )
    for key, part in _parts(rewards):
        _check_part(key, part)
    _check_single(rewards)
    for source, route in hybrid.routes.items():
        _check_route(f"{_HYBRID}.routes.{source}", route, hybrid.parts)


def _check_part(key: str, part: HybridPartConfig) -> None:
    if key.endswith(".rule") and part.manager != "rule":
        raise ConfigError(f"{key}.manager: got {part.manager!r}, but rule is the rule's name in metrics; rename it")
    if (part.transform == "clip") != (part.clip is not None):
        given = "is not set" if part.clip is None else f"got {list(part.clip)}"
        raise ConfigError(
            f"{key}.clip: {given}, but {key}.transform={part.transform}; transform=clip takes [low, high], other "
            "transforms take none"
        )
    if part.clip is not None and part.clip[0] >= part.clip[1]:
        raise ConfigError(f"{key}.clip: got {list(part.clip)}, expected [low, high] with low < high")
    if part.urls and part.manager != "remote":
        raise ConfigError(f"{key}.urls: are set, but {key}.manager={part.manager} calls no service; remove them")
    if part.api_key_env is not None and not part.urls:
        raise ConfigError(f"{key}.api_key_env: is set, but {key}.urls is empty; set rewards.remote.api_key_env")


def _check_single(rewards: RewardsConfig) -> None:
    """Raise ConfigError if two parts of the hybrid reward have manager=rule, or two have manager=model.

    A run has only one rule manager and one reward model.
    """
    for manager in ("rule", "model"):
        names = [name for name, part in rewards.hybrid.parts.items() if part.manager == manager]
        if len(names) > 1:
            raise ConfigError(
                f"{_HYBRID}.parts: {' and '.join(names)} both have manager={manager}, of which a run has one; merge "
                "them, with the sum of their weights"
            )


def _check_route(key: str, route: tuple[str, ...], parts: Mapping[str, HybridPartConfig]) -> None:
    known = list(parts)
    if not route:
        raise ConfigError(f"{key}: is empty, so nobody would judge this source; name parts of {_HYBRID}.parts")
    for name in route:
        if name not in known:
            raise ConfigError(f"{key}: got {name!r}, expected parts of {_HYBRID}.parts: {', '.join(known)}")
    if len(set(route)) < len(route):
        raise ConfigError(f"{key}: got {list(route)}, expected each part once; set its weight in {_HYBRID}.parts")


def _check_remote(rewards: RewardsConfig) -> None:
    remote = rewards.remote
    _check_fallback(_REMOTE, remote.on_error, remote.value)
    asked = [key for key, part in _parts(rewards) if part.manager == "remote" and not part.urls]
    if rewards.manager == "remote":
        asked = ["rewards"]
    if asked and not remote.urls:
        raise ConfigError(
            f"{_REMOTE}.urls: is empty, but {asked[0]}.manager=remote; list reward services, as in "
            "[http://host:8000/get_reward]"
        )
    if remote.urls and not asked:
        raise ConfigError(
            f"{_REMOTE}.urls: is set, but nothing asks these services; set rewards.manager=remote, or remove them"
        )
    if remote.api_key_env is not None and not remote.urls:
        raise ConfigError(
            f"{_REMOTE}.api_key_env: is set, but {_REMOTE}.urls is empty; list the services, or remove it"
        )
    for key, urls in ((_REMOTE, remote.urls), *((key, part.urls) for key, part in _parts(rewards))):
        for url in urls:
            _check_url(f"{key}.urls", url)


def _check_url(key: str, url: str) -> None:
    try:
        address = urlsplit(url)
        is_http = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # such as a port that is no number
        is_http = False
    if not is_http:
        raise ConfigError(f"{key}: got {masked_text(url)!r}, expected http://host:port/path, or https")
