"""Mistakes that a rehearsal finds in parts of algorithms, and that megarl's own parts have none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megarl.algos.advantages import ADVANTAGE_ESTIMATORS, Estimate
from megarl.algos.advantages.estimator import Estimator
from megarl.algos.corrections import CORRECTIONS, CorrectionRule
from megarl.algos.filters import GROUP_FILTERS, GroupFilter
from megarl.algos.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossTerms
from megarl.algos.preference import PREFERENCE_LOSSES, PairLosses, PreferenceLoss
from megarl.algos.rehearsal import REHEARSALS, Material, made_up, rehearse_part
from megarl.algos.shaping import ADVANTAGE_SHAPERS, AdvantageShaper
from megarl.config.load import with_overrides
from megarl.config.schema import Config
from megarl.registry import FunctionRegistry
from megarl.types import Advantages

# Its default estimator needs no critic, and each of its groups has four rows of six tokens.
CONFIG = with_overrides(Config(), ["rollout.num_samples=4"])


def loss(make: Callable[[Any], Any]) -> PolicyLoss:
    return PolicyLoss(lambda x, cfg: PolicyLossTerms(loss=make(x), diagnostics={}))


def std(batch: Any, cfg: Any) -> torch.Tensor:
    """What many write: 0 / 0 in a group of equal rewards."""
    pairs = [batch.rewards[torch.tensor([each == uid for each in batch.uids])] for uid in dict.fromkeys(batch.uids)]
    return torch.cat([(group - group.mean()) / group.std() for group in pairs])


MISTAKES = {
    "summed": (POLICY_LOSSES, loss(lambda x: -(x.advantages * x.log_ratio).sum(-1)), r"has shape \(8,\), expected \(8"),
    "one number": (POLICY_LOSSES, loss(lambda x: x.log_ratio.mean()), r"has shape \(\), expected \(8, 6\)"),
    "no terms": (POLICY_LOSSES, PolicyLoss(lambda x, cfg: x.log_ratio), "type Tensor, expected PolicyLossTerms"),
    "NaN": (POLICY_LOSSES, loss(lambda x: (x.log_ratio - 9).sqrt()), "the loss is nan at"),
    # Only where the policy has not changed: d sqrt|x| / dx at 0.
    "infinite gradient": (POLICY_LOSSES, loss(lambda x: x.log_ratio.abs().sqrt()), "the gradient of the loss is"),
    "detached": (POLICY_LOSSES, loss(lambda x: -x.advantages * x.log_ratio.detach()), "the loss has no gradient"),
    "constant": (POLICY_LOSSES, loss(lambda x: 0 * x.logprobs), "gradient of the loss is 0 everywhere"),
    "in place": (POLICY_LOSSES, loss(lambda x: x.advantages.neg_() * x.log_ratio), "input advantages in place"),
    "estimate of fewer": (ADVANTAGE_ESTIMATORS, Estimator(lambda batch, cfg: batch.rewards[1:]), r"\(7,\), expected"),
    "group of equals": (ADVANTAGE_ESTIMATORS, Estimator(std), "where all rewards of a group are equal"),
    "no estimate": (ADVANTAGE_ESTIMATORS, Estimator(lambda batch, cfg: None), "type NoneType, expected Estimate"),
    "outside the mask": (
        ADVANTAGE_ESTIMATORS,
        Estimator(lambda batch, cfg: Estimate(advantages=torch.ones(batch.loss_mask.shape))),
        "is not 0 outside the loss mask",
    ),
    "changed rewards": (ADVANTAGE_ESTIMATORS, Estimator(lambda batch, cfg: batch.rewards.sub_(0.5)), "input rewards"),
    "weights of rows": (CORRECTIONS, CorrectionRule(lambda x, cfg: x.row_mean), r"has shape \(8, 1\)"),
    "no bool": (
        CORRECTIONS,
        CorrectionRule(lambda x, cfg: x.token.exp(), gate=lambda x, cfg: x.token.exp()),
        "dtype torch.float64, expected torch.bool",
    ),
    "no answer": (GROUP_FILTERS, GroupFilter(lambda group, cfg: None), "returned None, expected True"),
    "sorted": (GROUP_FILTERS, GroupFilter(lambda group, cfg: bool(group.scores.sort()) or True), "changes the scores"),
    "values alone": (ADVANTAGE_SHAPERS, AdvantageShaper(lambda values, x: values), "Tensor, expected Advantages"),
    "shorter": (ADVANTAGE_SHAPERS, AdvantageShaper(lambda v, x: Advantages(values=v[:, 1:])), r"\(8, 5\), expected"),
    "mean of pairs": (
        PREFERENCE_LOSSES,
        PreferenceLoss(lambda pairs, cfg: PairLosses(losses=pairs.log_ratios.mean(), rewards=pairs.log_ratios)),
        r"has shape \(\), expected \(6,\)",
    ),
}


def material_of(config: Config) -> Material:
    return made_up(config.algo, config.train_preference, num_samples=config.rollout.num_samples)


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_found(case: str) -> None:
    registry, entry, message = MISTAKES[case]
    with pytest.raises(ValueError, match=message):
        rehearse_part(registry, entry, material_of(CONFIG))


PARTS = [(registry, name) for registry in REHEARSALS for name in registry]


@pytest.mark.parametrize(("registry", "name"), PARTS, ids=[f"{registry.kind} {name}" for registry, name in PARTS])
def test_megarls_own_parts_pass(registry: FunctionRegistry[Any, Any], name: str) -> None:
    """They are right by their own tests: what is refused here would be refused wrongly in users' parts, too."""
    settings = {"mean_score": "algo.filter.mean_score=[0, 1]", "gdpo": "algo.advantage.components={correct: 1.0}"}
    config = with_overrides(CONFIG, [settings[name]] if name in settings else [])
    if registry.key != "algo.filter.names":
        config = with_overrides(config, [] if registry is ADVANTAGE_SHAPERS else [f"{registry.key}={name}"])
    assert rehearse_part(registry, registry.get(name), material_of(config))
