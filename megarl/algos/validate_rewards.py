"""Check that reward settings and advantage estimator agree: refuse contradictions, warn about likely mistakes."""

from megarl.algos.advantages import ADVANTAGE_ESTIMATORS, estimator_of
from megarl.config.algo import AlgoConfig
from megarl.errors import ConfigError
from megarl.registry import readers_of, refuse_unused

_MASK = "algo.reward.mask"


def check_rewards(cfg: AlgoConfig, *, max_response_tokens: int) -> None:
    """Raise ConfigError for settings of `algo.reward` or `algo.advantage` that contradict each other or do nothing.

    >>> check_rewards(AlgoConfig(reward=RewardConfig(overlong_buffer_tokens=9)), max_response_tokens=8)
    Traceback (most recent call last):
        ...
    megarl.errors.ConfigError: algo.reward.overlong_buffer_tokens: got 9, expected at most rollout.max_response_tokens=8
    """
    reward, name = cfg.reward, cfg.advantage.estimator
    buffer = reward.overlong_buffer_tokens
    if buffer is not None and buffer > max_response_tokens:
        raise ConfigError(
            f"algo.reward.overlong_buffer_tokens: got {buffer}, expected at most "
            f"rollout.max_response_tokens={max_response_tokens}"
        )
    if reward.source == "critic" and not ADVANTAGE_ESTIMATORS.get(name).needs_values:
        raise ConfigError(
            f"algo.reward.source: got 'critic' with algo.advantage.estimator={name}, which reads no values; "
            f"set algo.advantage.estimator=critic_value, or algo.reward.source=rule"
        )
    estimator = ADVANTAGE_ESTIMATORS.get(name)
    if reward.source != "critic" and estimator.needs_values and not estimator.reads_rewards:
        raise ConfigError(
            f"algo.advantage.estimator: got {name!r} with algo.reward.source=rule, whose rewards it does not "
            "read; set algo.advantage.estimator=gae, or algo.reward.source=critic"
        )
    if not (estimator.needs_values or estimator.reads_rewards):
        situation = f"algo.advantage.estimator={name}"
        refuse_unused(
            "algo.reward", reward, ("clip", "overlong_buffer_tokens", "truncated"), situation, "choose another"
        )
        if cfg.kl.in_reward:
            raise ConfigError(
                f"algo.kl.where: got {cfg.kl.where!r} with {situation}, which reads no rewards; set "
                "algo.kl.where=loss, or choose another algo.advantage.estimator"
            )
    _check_mask(cfg)
    situation, from_critic = f"algo.advantage.estimator={name}", reward.source == "critic"
    if from_critic:
        situation += " and algo.reward.source=critic"
    read = estimator_of(cfg).options
    for key, readers in readers_of(ADVANTAGE_ESTIMATORS).items():
        if key in read:
            continue
        remedy = "set algo.reward.source=rule" if from_critic else f"use {' or '.join(readers)}"
        refuse_unused("algo.advantage", cfg.advantage, (key,), situation, remedy)
    shapes = reward.clip is not None or buffer is not None or reward.truncated is not None
    if "components" in read:
        _check_components(cfg, shapes=shapes)
    if estimator_of(cfg).needs_greedy and shapes:
        raise ConfigError(
            f"algo.reward.{{clip,overlong_buffer_tokens,truncated}}: got a value with algo.advantage.estimator={name}, "
            "whose baseline is the reward of a greedy response as the scorer gave it; leave them at null"
        )
    _check_negative(cfg)


def _check_negative(cfg: AlgoConfig) -> None:
    """Raise ConfigError where rewards may become negative that the estimator divides by."""
    reward, name = cfg.reward, cfg.advantage.estimator
    makes_negative = {
        f"algo.kl.where={cfg.kl.where}": cfg.kl.in_reward,
        "algo.reward.overlong_buffer_tokens": reward.overlong_buffer_tokens is not None,
        "algo.reward.truncated < 0": reward.truncated is not None and reward.truncated < 0,
    }
    for cause, present in makes_negative.items():
        if ADVANTAGE_ESTIMATORS.get(name).refuses_negative and present:
            raise ConfigError(
                f"algo.advantage.estimator: got {name!r} with {cause}, which can make rewards negative; {name} divides "
                f"by the mean of rewards in [0, 1]; drop one of the two"
            )


def _check_components(cfg: AlgoConfig, *, shapes: bool) -> None:
    reward, names = cfg.reward, [name for name, weight in cfg.advantage.components.items() if weight]
    if not names:
        raise ConfigError(
            f"algo.advantage.components: got none with algo.advantage.estimator={cfg.advantage.estimator}, which "
            "normalises each of them; name them with their weights, as in {correct: 1.0, format: 0.5}"
        )
    unread = {
        f"algo.kl.where: got {cfg.kl.where!r}": cfg.kl.in_reward,
        f"{_MASK}.ratio: got {reward.mask.ratio}": reward.mask.ratio > 0,
        "algo.reward.{clip,overlong_buffer_tokens,truncated}: got a value": shapes and "score" not in names,
    }
    for setting, is_set in unread.items():
        if is_set:
            raise ConfigError(
                f"{setting} with algo.advantage.estimator={cfg.advantage.estimator}, which it would not reach: the "
                f"estimator reads the components {', '.join(names)}; leave it at its default, or choose another "
                "estimator"
            )


def _check_mask(cfg: AlgoConfig) -> None:
    mask, source = cfg.reward.mask, cfg.reward.source
    nothing_to_order = {
        "algo.reward.source=critic": source == "critic",
        f"{_MASK}.flip=false": mask.flip is False,
        f"algo.advantage.estimator={cfg.advantage.estimator}": estimator_of(cfg).normalise is None,
    }
    for situation, holds in nothing_to_order.items():
        if holds:
            remedy = "flip advantages of an estimator that normalises them over the batch, such as gae"
            refuse_unused(_MASK, mask, ("flip_stage",), situation, remedy)


def reward_warnings(cfg: AlgoConfig, *, critic_frozen: bool, critic_warmup_steps: int) -> list[str]:
    """Return a warning for each setting of rewards and critic that is allowed but most likely a mistake.

    >>> reward_warnings(AlgoConfig(), critic_frozen=True, critic_warmup_steps=2)
    ['a frozen critic needs no warm-up: its 2 steps only delay the policy']
    """
    mask, from_critic = cfg.reward.mask, cfg.reward.source == "critic"
    conditions = {
        "algo.reward.source=critic trains the critic on its own values, of which any constant is a fixed point; "
        "freeze the critic": from_critic and not critic_frozen,
        f"{_MASK}.ratio={mask.ratio} changes rewards and metrics only: with algo.reward.source=critic advantages do "
        "not depend on rewards": from_critic and mask.ratio > 0,
        f"{_MASK}.flip=true flips nothing: with algo.reward.source=critic advantages are never flipped": from_critic
        and mask.flip is True,
        f"{_MASK}.flip=true flips nothing: with {_MASK}.ratio=0 no row is hidden": not from_critic
        and mask.ratio == 0
        and mask.flip is True,
        f"{_MASK}.ratio={mask.ratio} with algo.advantage.estimator={cfg.advantage.estimator}: hidden rows count as "
        "failures and shift the mean of their group": mask.ratio > 0 and not estimator_of(cfg).needs_values,
        f"{_MASK}.flip=false with {_MASK}.ratio={mask.ratio}: hidden rows have advantages of about −V, which "
        "encourages what the critic thinks little of": not from_critic and mask.ratio > 0 and mask.flip is False,
        f"{_MASK}.ratio=1 hides every reward: the critic's values are the only signal": not from_critic
        and mask.ratio == 1,
        f"a frozen critic needs no warm-up: its {critic_warmup_steps} steps only delay the policy": critic_frozen
        and critic_warmup_steps > 0,
    }
    return [message for message, holds in conditions.items() if holds]
