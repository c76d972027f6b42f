"""Change a step's advantages after the estimator and before the loss, by a chain of functions called shapers."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from megarl.algos import cpo
from megarl.algos.batch_statistics import LOG_WEIGHT, effective_sample_size, high_entropy, optimizer_batches
from megarl.algos.centering import bounded_error
from megarl.algos.corrections import CORRECTION, CorrectionInputs, compares_policies, compute_correction
from megarl.algos.covariance import CHOSEN, choose_tokens, token_covariance
from megarl.algos.distill import distilled_advantages
from megarl.algos.masked import group_stats, kept, row_means, summary
from megarl.algos.mixed_groups import demonstration_mask, mixed_metrics, weight_advantages, without_truncated
from megarl.algos.off_policy_losses import balanced_bounds
from megarl.algos.policy_losses import MAX_LOG_RATIO, POLICY_LOSSES
from megarl.algos.prefixes import DEMONSTRATION
from megarl.config.algo import AlgoConfig
from megarl.config.torch_later import Tensor, torch
from megarl.errors import ConfigError
from megarl.registry import FunctionRegistry, require_known
from megarl.types import Advantages, ScoredBatch, TokenQuantity
from megarl.types.rows import BASE_ADVANTAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingInputs:
    """The inputs of a shaper, besides the advantages that it changes.

    batch: its rewards are those that the estimator read. scored_rewards: [B] rewards as the scorer gave them.
    mini_batch_prompts: how many groups an optimizer step takes; None: all.
    """

    batch: ScoredBatch
    scored_rewards: Tensor
    cfg: AlgoConfig
    vocab_size: int | None
    mini_batch_prompts: int | None = None

    @property
    def optimizer_batches(self) -> list[list[int]]:
        """Return the rows of each optimizer batch of the step."""
        return optimizer_batches(self.batch.uids, self.mini_batch_prompts or max(len(self.batch.uids), 1))


# (advantages [B, T], the step) → new advantages, still 0 outside the loss mask, with quantities and metrics to add.
Shape: TypeAlias = Callable[[Tensor, ShapingInputs], Advantages]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageShaper:
    """A shaper, and what its registration declares about it.

    reads: the quantities of rows that it needs. place: where it stands in the chain. Those that are first or last run
    in every algorithm, and leave advantages alone if their settings do not turn them on; the others run where
    `algo.shapers` names them. The last ones may look at the final advantages.
    """

    shape: Shape = field(kw_only=False)
    reads: Collection[str] = ()
    place: Literal["first", "named", "last"] = "named"

    def __post_init__(self) -> None:
        require_known("reads", self.reads, [quantity.value for quantity in TokenQuantity])


ADVANTAGE_SHAPERS: FunctionRegistry[Shape, AdvantageShaper] = FunctionRegistry(
    "shaper", key="algo.shapers", entry=AdvantageShaper, parameters=("advantages", "x")
)


def shapers_of(cfg: AlgoConfig) -> list[AdvantageShaper]:
    """Return the shapers of an algorithm in the order in which they are applied.

    Raises ConfigError for a name in `algo.shapers` that no plugin has registered, or that stands there twice.

    >>> [each.place for each in shapers_of(AlgoConfig())]
    ['first', 'first', 'first', 'last', 'last', 'last', 'last', 'last', 'last']
    """
    named = [ADVANTAGE_SHAPERS.get(name) for name in cfg.shapers]
    for name, each in zip(cfg.shapers, named, strict=True):
        if each.place != "named" or cfg.shapers.count(name) > 1:
            raise ConfigError(
                f"algo.shapers: got {list(cfg.shapers)}, in which {name} "
                f"{'runs in every algorithm' if each.place != 'named' else 'stands twice'}; name each shaper of "
                "algo.plugins once"
            )
    chain = ADVANTAGE_SHAPERS.entries().values()
    first, last = ([each for each in chain if each.place == place] for place in ("first", "last"))
    return [*first, *named, *last]


@ADVANTAGE_SHAPERS.register("weigh_demonstrations", place="first")
def weigh_demonstrations(advantages: Tensor, x: ShapingInputs) -> Advantages:
    """Multiply advantages by the weights that `algo.off_policy` sets for demonstration tokens and for policy tokens.

    >>> cfg = AlgoConfig(off_policy=OffPolicyConfig(policy_weight=0.5))
    >>> x = ShapingInputs(batch=step("aa", [1.0, 0.0]), scored_rewards=tensor([1.0, 0.0]), cfg=cfg, vocab_size=None)
    >>> weigh_demonstrations(tensor([[0.5], [-0.5]]), x).values.tolist()
    [[0.25], [-0.25]]
    """
    metrics = mixed_metrics(x.batch) if DEMONSTRATION in x.batch.quantities else {}
    return Advantages(values=weight_advantages(advantages, x.batch, x.cfg.off_policy), metrics=metrics)


@ADVANTAGE_SHAPERS.register("shape_by_hint", place="first")
def shape_by_hint(advantages: Tensor, x: ShapingInputs) -> Advantages:
    """Shape advantages with CPO; if CPO needs the current entropy, pass its inputs on to the loss, which shapes there.

    >>> cfg = AlgoConfig(off_policy=OffPolicyConfig(policy_weight=0.5))
    >>> x = ShapingInputs(batch=step("aa", [1.0, 0.0]), scored_rewards=tensor([1.0, 0.0]), cfg=cfg, vocab_size=None)
    >>> shape_by_hint(tensor([[0.5], [-0.5]]), x).values.tolist()
    [[0.5], [-0.5]]
    """
    if x.cfg.cpo.method == "none":
        return Advantages(values=advantages)
    assert x.vocab_size is not None, "CPO needs the model's vocabulary size"
    # Difficulty depends on the scorer's own rewards.
    batch = replace(x.batch, rewards=x.scored_rewards)
    inputs = cpo.inputs_from_batch(batch, advantages, x.cfg.cpo, vocab_size=x.vocab_size)
    metrics = {
        **cpo.difficulty_metrics(batch.uids, batch.correct, inputs.difficulty),
        "train/reward_mean": float(batch.rewards.mean()),
    }
    if cpo.shapes_in_loss(x.cfg.cpo):
        metrics |= cpo.hint_metrics(inputs, x.cfg.cpo)
        return Advantages(
            values=without_truncated(advantages, batch, x.cfg.off_policy),
            quantities=cpo.loss_quantities(inputs, x.cfg.cpo),
            metrics=metrics,
        )
    shaped = cpo.shape_advantages(inputs, x.cfg.cpo)
    metrics |= cpo.cpo_metrics(advantages, shaped, inputs, x.cfg.cpo)
    return Advantages(
        values=without_truncated(shaped, batch, x.cfg.off_policy),
        quantities={BASE_ADVANTAGES: advantages},
        metrics=metrics,
    )


@ADVANTAGE_SHAPERS.register("distil", place="first")
def distil(advantages: Tensor, x: ShapingInputs) -> Advantages:
    """Add the log-ratios of teacher to policy, by `algo.distill`, where old log-probs are scored.

    >>> cfg = AlgoConfig(distill=DistillConfig(teacher="model"))
    >>> batch = step("a", [0.0], old_logprobs=[[-2.0]], teacher_logprobs=[[-1.0]])
    >>> x = ShapingInputs(batch=batch, scored_rewards=batch.rewards, cfg=cfg, vocab_size=None)
    >>> distil(tensor([[0.5]]), x).values.tolist()
    [[1.5]]
    """
    return distilled_advantages(advantages, x.batch, x.cfg)


@ADVANTAGE_SHAPERS.register("choose_by_covariance", place="last")
def choose_by_covariance(advantages: Tensor, x: ShapingInputs) -> Advantages:
    """Return the advantages unchanged, with the tokens that the losses clip_cov and kl_cov treat in another way.

    Demonstration tokens neither count nor are chosen. Metrics: actor/cov/{mean,max,min} over the other loss tokens.

    >>> batch = step("a", [1.0], old_logprobs=[[-1.0, -3.0]])
    >>> cfg = AlgoConfig(policy_loss=PolicyLossConfig(name="kl_cov"))
    >>> x = ShapingInputs(batch=batch, scored_rewards=batch.rewards, cfg=cfg, vocab_size=None)
    >>> choose_by_covariance(tensor([[2.0, 0.0]]), x).metrics["actor/cov/mean"]
    1.0
    """
    if POLICY_LOSSES.get(x.cfg.policy_loss.name).chooses is None:
        return Advantages(values=advantages)
    batch, mask = x.batch, x.batch.loss_mask & ~demonstration_mask(x.batch)
    covariance = token_covariance(advantages, batch.quantity(TokenQuantity.OLD_LOGPROBS), mask)
    chosen = choose_tokens(covariance, mask, x.cfg.policy_loss, uids=batch.uids, seed=batch.seed)
    return Advantages(
        values=advantages,
        quantities={CHOSEN: chosen.to(advantages.dtype)},
        metrics=summary("actor/cov", covariance[mask]),
    )


@ADVANTAGE_SHAPERS.register("keep_high_entropy", place="last")
def keep_high_entropy(advantages: Tensor, x: ShapingInputs) -> Advantages:
    """Set advantages of policy tokens to 0 unless their entropy is among the highest of the step's policy tokens.

    Demonstration tokens neither count nor change.

    >>> batch = step("a", [1.0], old_entropy=[[0.5, 2.0]])
    >>> cfg = AlgoConfig(high_entropy_share=0.5)
    >>> x = ShapingInputs(batch=batch, scored_rewards=batch.rewards, cfg=cfg, vocab_size=None)
    >>> keep_high_entropy(tensor([[1.0, 1.0]]), x).values.tolist()
    [[0.0, 1.0]]
    """
    share = x.cfg.high_entropy_share
    if share is None:
        return Advantages(values=advantages)
    policy = x.batch.loss_mask & ~demonstration_mask(x.batch)
    high = high_entropy(x.batch.quantity(TokenQuantity.OLD_ENTROPY), policy, share)
    frac = int(high.sum()) / max(int(policy.sum()), 1)
    return Advantages(values=kept(advantages, high | ~policy), metrics={"actor/high_entropy_frac": frac})


@ADVANTAGE_SHAPERS.register("weigh_by_engine", place="last")
def weigh_by_engine(advantages: Tensor, x: ShapingInputs) -> Advantages:
    """Return the advantages unchanged, with what is read of ratios to the engine: the bounds of the loss bapo, for each
    optimizer batch, and the log-weights of `step_scale`. Metrics: actor/bapo_low, actor/bapo_high, means over the
    batches; is/row_ess, the share of rows that count.

    >>> batch = step("a", [1.0], old_logprobs=[[-1.0]], rollout_logprobs=[[-1.5]])
    >>> cfg = AlgoConfig(step_scale_power=0.5)
    >>> x = ShapingInputs(batch=batch, scored_rewards=batch.rewards, cfg=cfg, vocab_size=None)
    >>> weigh_by_engine(tensor([[1.0]]), x).quantities["log_weight"].tolist()
    [[0.5]]
    """
    loss = x.cfg.policy_loss
    is_bounded = "clip_bounds" in POLICY_LOSSES.get(loss.name).reads
    if not is_bounded and x.cfg.step_scale_power is None:
        return Advantages(values=advantages)
    sampled = x.batch.loss_mask & ~demonstration_mask(x.batch)
    difference = x.batch.quantity(TokenQuantity.OLD_LOGPROBS) - x.batch.quantity("rollout_logprobs")
    log_weight = kept(difference, sampled)
    if not is_bounded:
        sums = log_weight.sum(-1, dtype=torch.float64)[sampled.any(-1)]
        metrics = {"is/row_ess": effective_sample_size(sums) / max(len(sums), 1)}
        return Advantages(values=advantages, quantities={LOG_WEIGHT: log_weight}, metrics=metrics)
    ratio = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounds, chosen = torch.zeros_like(advantages), []
    for at in x.optimizer_batches:
        low, high = balanced_bounds(ratio[at][sampled[at]], advantages[at][sampled[at]], loss)
        bounds[at] = torch.where(advantages[at] < 0, low, torch.full_like(advantages[at], high))
        chosen.append((low, high))
    lows, highs = zip(*chosen, strict=True)
    return Advantages(
        values=advantages,
        quantities={LOG_WEIGHT: log_weight, "clip_bounds": bounds},
        metrics={"actor/bapo_low": sum(lows) / len(lows), "actor/bapo_high": sum(highs) / len(highs)},
    )


@ADVANTAGE_SHAPERS.register("estimate_log_z", place="last")
def estimate_log_z(advantages: Tensor, x: ShapingInputs) -> Advantages:
    """Return the advantages unchanged, with ln Z of each group for the loss flowrl: the mean over its rows of
    β·A − ln(π/π_ref), each a mean over tokens, with π at the start of the step, as in VarGrad (arXiv:2503.18929).

    Metric: actor/log_z, a mean over rows.

    >>> batch = step("aa", [1.0, 0.0], old_logprobs=[[-1.0], [-2.0]], ref_logprobs=[[-2.0], [-2.0]])
    >>> cfg = AlgoConfig(policy_loss=PolicyLossConfig(name="flowrl", flowrl_beta=2.0))
    >>> x = ShapingInputs(batch=batch, scored_rewards=batch.rewards, cfg=cfg, vocab_size=None)
    >>> estimate_log_z(tensor([[1.0], [-0.5]]), x).quantities["log_z"].tolist()
    [[0.0], [0.0]]
    """
    loss, mask = x.cfg.policy_loss, x.batch.loss_mask
    if "log_z" not in POLICY_LOSSES.get(loss.name).reads:
        return Advantages(values=advantages)
    away = x.batch.quantity(TokenQuantity.OLD_LOGPROBS) - x.batch.quantity(TokenQuantity.REF_LOGPROBS)
    of_rows, trains = row_means(loss.flowrl_beta * advantages - away, mask), mask.any(-1)
    log_z = group_stats(of_rows, x.batch.uids, trains).mean.to(advantages.dtype)
    return Advantages(
        values=advantages,
        quantities={"log_z": kept(log_z[:, None].expand_as(mask), mask)},
        metrics={"actor/log_z": float(log_z[trains].mean())} if trains.any() else {},
    )


@ADVANTAGE_SHAPERS.register("bound_head_error", place="last")
def bound_head_error(advantages: Tensor, x: ShapingInputs) -> Advantages:
    """Return the advantages unchanged, with the bound of score centering's error, which `max_head_error` limits.

    >>> cfg = AlgoConfig(policy_loss=PolicyLossConfig(name="score_centering"))
    >>> batch = step("a", [1.0], engine_tail=[[0.125]])
    >>> x = ShapingInputs(batch=batch, scored_rewards=batch.rewards, cfg=cfg, vocab_size=None)
    >>> bound_head_error(tensor([[2.0]]), x).metrics["actor/sc_error_bound"]
    1.0
    """
    loss = x.cfg.policy_loss
    if loss.compared_with == "trainer" or "max_head_error" not in POLICY_LOSSES.get(loss.name).options:
        return Advantages(values=advantages)
    return bounded_error(advantages, x.batch, loss)


@ADVANTAGE_SHAPERS.register("correct_for_engine", place="last")
def correct_for_engine(advantages: Tensor, x: ShapingInputs) -> Advantages:
    """Compute the importance weights by which the loss corrects for the engine's different log-probs; keep the
    advantages.

    >>> cfg = AlgoConfig(off_policy=OffPolicyConfig(policy_weight=0.5))
    >>> x = ShapingInputs(batch=step("aa", [1.0, 0.0]), scored_rewards=tensor([1.0, 0.0]), cfg=cfg, vocab_size=None)
    >>> correct_for_engine(tensor([[0.5], [-0.5]]), x).values.tolist()
    [[0.5], [-0.5]]
    """
    if x.cfg.correction.name == "none":
        return Advantages(values=advantages)
    if TokenQuantity.OLD_LOGPROBS not in x.batch.quantities and not compares_policies(x.cfg):
        # Every token has weight 1; the policy loss's ratio is to the engine's log-probs.
        return Advantages(
            values=advantages, quantities={TokenQuantity.OLD_LOGPROBS: x.batch.quantity("rollout_logprobs")}
        )
    inputs = CorrectionInputs(
        old_logprobs=x.batch.quantity(TokenQuantity.OLD_LOGPROBS),
        rollout_logprobs=x.batch.quantity("rollout_logprobs"),
        advantages=advantages,
        loss_mask=x.batch.loss_mask,
        demonstration_mask=demonstration_mask(x.batch),
    )
    correction = compute_correction(inputs, x.cfg.correction, x.optimizer_batches)
    return Advantages(
        values=advantages,
        quantities={CORRECTION: correction.weights, TokenQuantity.OLD_LOGPROBS: correction.old_logprobs},
        metrics=correction.metrics,
    )
