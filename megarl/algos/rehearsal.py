"""Call parts of algorithms on a made-up batch, as a run would, to find mistakes in users' parts before it starts.

The batch has a group of unequal and one of equal rewards, rows of different lengths, and tokens that do not train. The
policy is once as it was at the start of the step, so that every ratio is 1, and once a little away from there.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np

from megarl.algos.advantages import ADVANTAGE_ESTIMATORS, GREEDY_SCORE, Estimate
from megarl.algos.advantages.estimator import Estimator
from megarl.algos.aggregation import AGGREGATIONS, Aggregation
from megarl.algos.corrections import CORRECTIONS, CorrectionRule, LogRatios
from megarl.algos.filters import GROUP_FILTERS, GroupFilter, ScoredGroup
from megarl.algos.kl import KL_ESTIMATORS, KLEstimator
from megarl.algos.masked import require_per_token
from megarl.algos.policy_losses import FURTHER_INPUTS, POLICY_LOSSES, PolicyLoss, PolicyLossInputs, PolicyLossTerms
from megarl.algos.preference import PREFERENCE_LOSSES, PairLogprobs, PairLosses, PreferenceLoss
from megarl.algos.shaping import ADVANTAGE_SHAPERS, AdvantageShaper, ShapingInputs
from megarl.config.algo import AlgoConfig
from megarl.config.supervised import TrainPreferenceConfig
from megarl.config.torch_later import Tensor, torch
from megarl.errors import RehearsalError
from megarl.registry import F, FunctionRegistry, T
from megarl.types import Advantages, ScoredBatch, TokenQuantity

_LENGTHS, _NUM_TOKENS = (6, 3, 5, 1), 6
# Log-ratios of the policy to what it was: none, and some well within every clip range.
_DISTANCES = (0.0, 0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """The inputs of rehearsals: the run's settings, and a scored batch with every quantity of tokens."""

    algo: AlgoConfig
    preference: TrainPreferenceConfig
    batch: ScoredBatch


# Called with an entry of its registry, and material.
Rehearsal: TypeAlias = Callable[[T, Material], None]
REHEARSALS: dict[FunctionRegistry[Any, Any], Rehearsal[Any]] = {}


def made_up(algo: AlgoConfig, preference: TrainPreferenceConfig, *, num_samples: int) -> Material:
    """Make up the batch of a step with groups as large as the run's, but at least as large as the estimators want."""
    chosen = algo.advantage
    size = max(num_samples, ADVANTAGE_ESTIMATORS.get(chosen.estimator).min_group)
    rewards = torch.tensor([*(float(i % 2 == 0) for i in range(size)), *[0.0] * size])
    mask = torch.zeros(2 * size, _NUM_TOKENS, dtype=torch.bool)
    for i in range(2 * size):
        mask[i, : _LENGTHS[i % len(_LENGTHS)]] = True
        mask[i, 1] = False
    draws = torch.Generator().manual_seed(0)
    names = [*TokenQuantity, "rollout_logprobs", "clip_bounds", "log_z"]
    details = dict.fromkeys((GREEDY_SCORE, *chosen.components), rewards)
    return Material(
        algo=algo,
        preference=preference,
        batch=ScoredBatch(
            uids=("made-up a",) * size + ("made-up b",) * size,
            rewards=rewards,
            correct=rewards > 0,
            loss_mask=mask,
            quantities={str(name): -1.0 - torch.rand(mask.shape, generator=draws) for name in names},
            truncated=torch.arange(2 * size) == 0,
            details=details,
        ),
    )


def _rehearses(registry: FunctionRegistry[F, T]) -> Callable[[Rehearsal[T]], Rehearsal[T]]:
    def add(rehearsal: Rehearsal[T]) -> Rehearsal[T]:
        REHEARSALS[registry] = rehearsal
        return rehearsal

    return add


@contextmanager
def _unchanged(*inputs: object) -> Iterator[None]:
    """Raise RehearsalError unless the tensors of these dataclasses are the same afterwards."""
    given = {name: (value, value.detach().clone()) for each in inputs for name, value in _tensors(each)}
    yield
    for name, (value, before) in given.items():
        if not torch.equal(value.detach(), before):
            raise RehearsalError(f"it changes its input {name} in place, which others read; work on a copy")


def _tensors(value: object) -> Iterator[tuple[str, Tensor]]:
    names = [each.name for each in fields(value)] if is_dataclass(value) else []
    items = dict(value) if isinstance(value, Mapping) else {name: getattr(value, name) for name in names}
    for name, item in items.items():
        if isinstance(item, Tensor):
            yield name, item
        elif isinstance(item, Mapping):
            yield from _tensors(item)


def _require_type(value: object, expected: type, what: str) -> None:
    if not isinstance(value, expected):
        raise RehearsalError(f"{what} has type {type(value).__name__}, expected {expected.__name__}; return one")


def _require_finite(values: Tensor, mask: Tensor, what: str, why: str = "") -> None:
    for index in (mask & ~values.isfinite()).nonzero().tolist()[:1]:
        raise RehearsalError(
            f"{what} is {values[tuple(index)].item()} at {index}, expected finite numbers{why}; bound what divides, "
            "and what exp, log or sqrt gets"
        )


def _require_gradient(loss: Tensor, values: Tensor, mask: Tensor, what: str) -> None:
    """Raise RehearsalError unless the loss has a finite gradient that is not 0 everywhere."""
    if not loss.requires_grad:
        raise RehearsalError(f"{what} has no gradient; compute it from the log-probs without detach, item or no_grad")
    (gradient,) = torch.autograd.grad(loss[mask].sum() if loss.dim() else loss, values, allow_unused=True)
    if gradient is None or not gradient.any():
        raise RehearsalError(f"the gradient of {what} is 0 everywhere, so that nothing would be learned; correct it")
    _require_finite(gradient, mask, f"the gradient of {what}")


@_rehearses(POLICY_LOSSES)
def _policy_loss(entry: PolicyLoss, material: Material) -> None:
    batch, what = material.batch, "the loss"
    mask = batch.loss_mask
    advantages = torch.where(torch.arange(len(mask)) % 2 == 0, 1.0, -1.0)[:, None].expand(mask.shape).clone()
    for distance in _DISTANCES:
        old = batch.quantity(TokenQuantity.OLD_LOGPROBS)
        logprobs = (old + distance * batch.quantity(TokenQuantity.VALUES)).requires_grad_()
        further = {name: batch.quantities.get(name) for name in FURTHER_INPUTS if name in entry.reads}
        if "entropy" in further:
            further["entropy"] = -2 * logprobs
        further["beside"] = None if entry.measure is None else logprobs / 2
        chosen = mask & (torch.arange(_NUM_TOKENS) == 0) if entry.chooses else None
        x = PolicyLossInputs(
            logprobs=logprobs, old_logprobs=old, advantages=advantages, loss_mask=mask, chosen=chosen, **further
        )
        with _unchanged(x):
            terms = entry.compute(x, material.algo.policy_loss)
        _require_type(terms, PolicyLossTerms, "the result")
        require_per_token(terms.loss, mask, what)
        _require_finite(terms.loss, mask, what)
        _require_gradient(terms.loss, logprobs, mask, what)
        for name, values in terms.diagnostics.items():
            require_per_token(values, mask, f"the diagnostic {name}")


@_rehearses(ADVANTAGE_ESTIMATORS)
def _estimator(entry: Estimator, material: Material) -> None:
    batch, cfg = material.batch, material.algo.advantage
    with _unchanged(batch):
        raw = entry.raw(batch, cfg)
    why = ", also where all rewards of a group are equal"
    if isinstance(raw, Tensor):
        if raw.shape != batch.rewards.shape:
            raise RehearsalError(
                f"the estimate has shape {tuple(raw.shape)}, expected {tuple(batch.rewards.shape)}, one for each row; "
                "for one per token return an Estimate"
            )
        _require_finite(raw, torch.ones_like(batch.correct), "the estimate", why)
    else:
        _require_type(raw, Estimate, "the estimate")
        require_per_token(raw.advantages, batch.loss_mask, "the estimate")
        _require_finite(raw.advantages, batch.loss_mask, "the estimate", why)
        if raw.advantages[~batch.loss_mask].any():
            raise RehearsalError("the estimate is not 0 outside the loss mask; set it to 0 there")
    with _unchanged(batch):
        entry(batch, cfg)


@_rehearses(CORRECTIONS)
def _correction(entry: CorrectionRule, material: Material) -> None:
    batch, cfg = material.batch, material.algo.correction
    sampled = batch.loss_mask
    difference = batch.quantity(TokenQuantity.OLD_LOGPROBS) - batch.quantity("rollout_logprobs")
    ratios = LogRatios(token=torch.where(sampled, difference.double(), 0.0), sampled=sampled)
    with _unchanged(ratios):
        weight, gate = entry.weight(ratios, cfg), entry.gate(ratios, cfg)
    require_per_token(weight, sampled, "the weight")
    _require_finite(weight, sampled, "the weight")
    require_per_token(gate, sampled, "the gate")
    if gate.dtype != torch.bool:
        raise RehearsalError(f"the gate has dtype {gate.dtype}, expected torch.bool: True for tokens that it accepts")


@_rehearses(GROUP_FILTERS)
def _filter(entry: GroupFilter, material: Material) -> None:
    batch = material.batch
    for uid in dict.fromkeys(batch.uids):
        scores = [float(r) for r, own in zip(batch.rewards, batch.uids, strict=True) if own == uid]
        given = list(scores)
        keeps = entry.keeps(ScoredGroup(uid=uid, scores=given, num_rows=len(given)), material.algo.filter)
        if not isinstance(keeps, bool | np.bool_):
            raise RehearsalError(f"it returned {keeps!r:.80}, expected True to keep a group, or False; return one")
        if given != scores:
            raise RehearsalError("it changes the scores of its group in place; work on a copy")


@_rehearses(ADVANTAGE_SHAPERS)
def _shaper(entry: AdvantageShaper, material: Material) -> None:
    batch = material.batch
    advantages = torch.where(batch.loss_mask, 0.5 - batch.rewards[:, None], 0.0)
    x = ShapingInputs(batch=batch, scored_rewards=batch.rewards, cfg=material.algo, vocab_size=1000)
    with _unchanged(batch, {"advantages": advantages}):
        shaped = entry.shape(advantages, x)
    _require_type(shaped, Advantages, "the result")
    for name, values in {"the advantages": shaped.values, **shaped.quantities}.items():
        require_per_token(values, batch.loss_mask, name)
        _require_finite(values, batch.loss_mask, name)


@_rehearses(AGGREGATIONS)
def _aggregation(entry: Aggregation, material: Material) -> None:
    mask = material.batch.loss_mask
    loss = material.batch.quantity(TokenQuantity.VALUES).clone().requires_grad_()
    with _unchanged({"loss": loss, "mask": mask}):
        total = entry.local_sum(loss, mask)
    _require_type(total, Tensor, "the sum")
    if total.dim():
        raise RehearsalError(f"the sum has shape {tuple(total.shape)}, expected (): a single number; sum it up")
    _require_gradient(total, loss, mask, "the sum")


@_rehearses(KL_ESTIMATORS)
def _kl(entry: KLEstimator, material: Material) -> None:
    batch, mask = material.batch, material.batch.loss_mask
    old = batch.quantity(TokenQuantity.OLD_LOGPROBS)
    for reference in (old, batch.quantity(TokenQuantity.REF_LOGPROBS)):
        logprobs = old.clone().requires_grad_()
        with _unchanged({"logprobs": logprobs, "ref_logprobs": reference}):
            kl = entry.compute(logprobs, reference)
        require_per_token(kl, mask, "the KL")
        _require_finite(kl, mask, "the KL")


@_rehearses(PREFERENCE_LOSSES)
def _preference(entry: PreferenceLoss, material: Material) -> None:
    values = material.batch.quantity(TokenQuantity.VALUES)
    for sign in (1.0, -1.0):
        ratios = (sign * torch.stack([values[0], values[1]])).requires_grad_()
        pairs = PairLogprobs(
            logprobs=-ratios.abs() - 1,
            log_ratios=ratios,
            num_tokens=torch.full_like(ratios, 3.0),
            kl=torch.zeros_like(ratios),
        )
        with _unchanged(pairs):
            found = entry.of_pairs(pairs, material.preference)
        _require_type(found, PairLosses, "the result")
        every = torch.ones_like(ratios[0], dtype=torch.bool)
        require_per_token(found.losses, every, "the losses of pairs")
        _require_finite(found.losses, every, "the losses of pairs")
        _require_gradient(found.losses.sum(), ratios, torch.ones_like(ratios, dtype=torch.bool), "the losses of pairs")


def rehearse_part(registry: FunctionRegistry[Any, Any], entry: object, material: Material) -> bool:
    """Call a part of an algorithm as its kind is called; return whether its kind is called at all.

    Raises RehearsalError or ValueError for what it must not do, and whatever it raises itself.
    """
    rehearsal = REHEARSALS.get(registry)
    if rehearsal is not None:
        rehearsal(entry, material)
    return rehearsal is not None
