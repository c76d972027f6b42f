"""Build the algorithm object from the configuration section `algo`."""

from megarl.algos.advantages import ADVANTAGE_ESTIMATORS, estimator_of
from megarl.algos.composed import ComposedAlgorithm
from megarl.algos.cpo import shapes_in_loss
from megarl.algos.filters import check_filter
from megarl.algos.kl import MAX_KL_ERROR
from megarl.algos.policy_losses import POLICY_LOSSES
from megarl.algos.prefixes import num_prefixed
from megarl.config.algo import AlgoConfig
from megarl.config.batches import batch_counts
from megarl.config.models import CriticConfig
from megarl.config.part_settings import use_plugins_of
from megarl.config.schema import Config
from megarl.config.setting import differences
from megarl.errors import ConfigError
from megarl.types import Algorithm


def build_algorithm(
    cfg: AlgoConfig, *, max_response_tokens: int, vocab_size: int | None = None, mini_batch_prompts: int | None = None
) -> Algorithm:
    """Build the algorithm that `cfg` describes; raise ConfigError for unknown names and for conflicting settings.

    Without `vocab_size`, the algorithm can only say which quantities it requires: CPO cannot then shape advantages.

    >>> build_algorithm(AlgoConfig(), max_response_tokens=8).token_local
    True
    """
    horizon = cfg.aggregation_horizon_tokens
    return ComposedAlgorithm(
        cfg=cfg,
        horizon_tokens=max_response_tokens if horizon is None else horizon,
        max_response_tokens=max_response_tokens,
        vocab_size=vocab_size,
        mini_batch_prompts=mini_batch_prompts,
    )


def algorithm_of(config: Config, *, vocab_size: int | None = None) -> Algorithm:
    """Build the algorithm of a run; raise ConfigError also for settings that contradict the run's sampling settings."""
    use_plugins_of(config)
    check_filter(config.algo.filter, num_samples=config.rollout.num_samples)
    num_prefixed(config.algo.demonstrations, config.rollout.num_samples)
    _check_group(config)
    algo, kl, num_rows = config.algo, config.algo.kl, batch_counts(config).rows_per_step
    if algo.distill.is_sampled and shapes_in_loss(algo.cpo):
        raise ConfigError(
            "algo.distill.mode: got sampled with algo.cpo.entropy_source=current, which shapes advantages in the loss, "
            "after the teacher's log-ratios were added; set algo.cpo.entropy_source=old"
        )
    if algo.off_policy.drop_truncated and shapes_in_loss(algo.cpo):
        raise ConfigError(
            "algo.off_policy.drop_truncated: got true with algo.cpo.entropy_source=current, which shapes advantages in "
            "the loss, after truncated rows were dropped; set algo.cpo.entropy_source=old"
        )
    if kl.where != "none" and kl.controller == "adaptive" and MAX_KL_ERROR * num_rows >= kl.horizon:
        raise ConfigError(
            f"algo.kl.horizon: got {kl.horizon:g}, expected > {MAX_KL_ERROR * num_rows:g}, {MAX_KL_ERROR} × the "
            f"{num_rows} rows of a step, or one update could turn the coefficient negative; raise it"
        )
    for key, value in (("rollout.record", config.rollout.record), ("rollout.source", config.rollout.source)):
        if algo.filter.max_refills and value not in (False, "vllm"):
            raise ConfigError(
                f"{key}: got {value} with algo.filter.max_refills={algo.filter.max_refills}, but a record holds "
                f"one batch of prompts per step; set algo.filter.max_refills=0, or change {key}"
            )
        if estimator_of(algo).needs_greedy and value not in (False, "vllm"):
            raise ConfigError(
                f"{key}: got {value} with algo.advantage.estimator={algo.advantage.estimator}, but a record does not "
                f"say which sample of a prompt is the greedy one; change {key}, or choose another estimator"
            )
    algorithm = build_algorithm(
        config.algo,
        max_response_tokens=config.rollout.max_response_tokens,
        vocab_size=vocab_size,
        mini_batch_prompts=config.trainer.mini_batch_prompts,
    )
    _check_learning(config)
    _check_recorded(config)
    if not estimator_of(algo).needs_values:
        for key, unset, got in differences(CriticConfig(), config.critic, "critic."):
            raise ConfigError(
                f"{key}: got {got}, which nothing reads: {algo.name or 'the algorithm'} (algo.advantage.estimator="
                f"{algo.advantage.estimator}) has no critic; leave it at {unset}, choose an algorithm with one, as "
                "use.algo=ppo, or let a run file give it to such algorithms alone, under for_algo"
            )
    if config.actor.head.regime == "in_chunk" and not algorithm.token_local:
        raise ConfigError(
            "actor.head.regime: got in_chunk, expected auto, recompute or keep: with "
            f"algo.policy_loss.name={algo.policy_loss.name} and algo.cpo.entropy_source="
            f"{algo.cpo.entropy_source} a token's loss depends on other tokens of its row"
        )
    return algorithm


def check_loop(config: Config) -> None:
    """Raise ConfigError for what a user's own loop cannot give a loss: distributions, and what environments said.

    >>> check_loop(Config(algo=AlgoConfig(echo_coef=0.1)))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    megarl.errors.ConfigError: algo.echo_coef: got 0.1, but a session runs no environments; set it to 0, ...
    """
    use_plugins_of(config)
    name, count, coef = config.algo.policy_loss.name, config.rollout.head_tokens, config.algo.echo_coef
    why = "a session keeps no distributions of what sampled, only log-probs of its tokens"
    for is_set, key, got, reason, remedy in (
        (POLICY_LOSSES.get(name).measure is not None, "algo.policy_loss.name", name, why, "choose another loss"),
        (count > 0, "rollout.head_tokens", count, why, "set it to 0"),
        (coef > 0, "algo.echo_coef", f"{coef:g}", "a session runs no environments", "set it to 0"),
    ):
        if is_set:
            raise ConfigError(f"{key}: got {got}, but {reason}; {remedy}, or use megarl train")


def _check_recorded(config: Config) -> None:
    """Raise ConfigError unless heads are recorded if and only if the policy loss reads them, and where it compares with
    the policy itself, unless that sampled.
    """
    loss, rollout = config.algo.policy_loss, config.rollout
    name, got = loss.name, rollout.head_tokens
    if loss.compared_with == "trainer":
        part, rounded = "engines sample from a part of the distribution", "engines round what the trainer does not"
        for key, value, allowed, why in (
            ("rollout.top_p", rollout.top_p, (1.0,), part),
            ("rollout.top_k", rollout.top_k, (-1,), part),
            ("rollout.source", rollout.source, ("vllm", "regenerate"), "a record does not say which weights sampled"),
            ("sync.dtype", config.sync.dtype, (None,), rounded),
            ("rollout.engine.dtype", rollout.engine.dtype, (None,), rounded),
            ("rollout.engine.quantization", rollout.engine.quantization, (None,), rounded),
            ("rollout.engine.kv_cache_dtype", rollout.engine.kv_cache_dtype, (None,), rounded),
        ):
            if value not in allowed:
                remedy = " or ".join(map(str, allowed)).replace("None", "null")
                raise ConfigError(
                    f"{key}: got {value} with algo.policy_loss.compared_with=trainer, but {why}; set it to {remedy}, "
                    "or compared_with=engine and rollout.head_tokens"
                )
    lag = rollout.schedule.max_lag(config.trainer.prompts_per_step) if loss.compared_with == "trainer" else 0
    if loss.kept_versions != lag:
        raise ConfigError(
            f"algo.policy_loss.kept_versions: got {loss.kept_versions} with compared_with={loss.compared_with} and "
            f"rollout.schedule.staleness={rollout.schedule.staleness}, by which the weights that sampled a token may "
            f"be {lag} updates old; set it to {lag}, for as many copies of the weights in host memory, or "
            "compared_with=engine and rollout.head_tokens"
            if lag
            else f"algo.policy_loss.kept_versions: got {loss.kept_versions}, but nothing reads earlier versions of the "
            f"weights with compared_with={loss.compared_with} and rollout.schedule.staleness="
            f"{rollout.schedule.staleness}; set it to 0"
        )
    reads_heads = POLICY_LOSSES.get(name).measure is not None and loss.compared_with == "engine"
    if reads_heads == (got > 0):
        return
    if got:
        remedy = f"and compared_with={loss.compared_with}, which reads none; set it to 0, or name=score_centering"
    else:
        remedy = "which compares the policy with the engine's likeliest tokens; set it to 128, or with top_k to that"
    raise ConfigError(f"rollout.head_tokens: got {got} with algo.policy_loss.name={name}, {remedy}")


def _check_learning(config: Config) -> None:
    """Raise ConfigError where nothing says what is good: neither rewards nor a teacher."""
    algo = config.algo
    trains = estimator_of(algo).reads_rewards or algo.reward.source == "critic"
    if not trains and algo.distill.teacher == "none" and not algo.kl.in_loss:
        raise ConfigError(
            f"algo.advantage.estimator: got {algo.advantage.estimator!r} with algo.distill.teacher=none, so that "
            "nothing trains; set algo.distill.teacher=model, or choose another estimator"
        )
    if not trains and algo.distill.teacher == "model" and algo.distill.averages and not algo.kl.in_loss:
        raise ConfigError(
            f"algo.distill.teacher_update_rate: got {algo.distill.teacher_update_rate:g} with algo.distill.teacher="
            f"model and algo.advantage.estimator={algo.advantage.estimator}, so that the policy learns from itself "
            "alone, and stays as it is; set algo.distill.teacher=hint, or choose another estimator"
        )
    if config.rewards.manager == "none" and estimator_of(algo).reads_rewards:
        raise ConfigError(
            f"rewards.manager: got none, so that all rewards are 0, with algo.advantage.estimator="
            f"{algo.advantage.estimator}, which compares rewards; set rewards.manager=rule, or "
            "algo.advantage.estimator=none to learn from a teacher alone"
        )


def _check_group(config: Config) -> None:
    name, got = config.algo.advantage.estimator, config.rollout.num_samples
    estimator = ADVANTAGE_ESTIMATORS.get(name)
    # With one set of k samples in a group, no sample is in a better set than another.
    least = config.algo.advantage.k + 1 if "k" in estimator.options else estimator.min_group
    demonstrations = config.algo.demonstrations
    num_own = got - num_prefixed(demonstrations, got) if demonstrations.max_group_accuracy is not None else got
    if num_own < least <= got:
        raise ConfigError(
            f"algo.demonstrations.num_prefixed: got {demonstrations.num_prefixed} of rollout.num_samples={got}, "
            f"expected to leave >= {least}: without the demonstrations that max_group_accuracy takes away, the {name} "
            "estimator compares the others; lower it"
        )
    if got < least:
        raise ConfigError(
            f"rollout.num_samples: got {got}, expected >= {least}: the {name} estimator compares the samples of one "
            "prompt; raise it or choose another algo.advantage.estimator"
        )
