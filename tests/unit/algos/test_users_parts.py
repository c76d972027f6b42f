"""Parts that a user registers beside megarl's own: each acts where the configuration names it, as it declares."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algos.advantages import ADVANTAGE_ESTIMATORS, Estimate, compute_advantages
from megarl.algos.aggregation import AGGREGATIONS
from megarl.algos.build import build_algorithm
from megarl.algos.corrections import CORRECTIONS, CorrectionInputs, LogRatios, compute_correction
from megarl.algos.filters import GROUP_FILTERS, ScoredGroup, check_filter, kept_rows
from megarl.algos.kl import KL_ESTIMATORS
from megarl.algos.policy_losses import POLICY_LOSSES, PolicyLossInputs, PolicyLossTerms, policy_loss
from megarl.algos.shaping import ADVANTAGE_SHAPERS, ShapingInputs
from megarl.config.algo import AdvantageConfig, AlgoConfig, CorrectionConfig, FilterConfig, KLConfig, PolicyLossConfig
from megarl.errors import ConfigError
from megarl.registry import RegistrationError, noting
from megarl.types import Advantages, AlgoState, PolicyOutputs, RowBatch, ScoredBatch, TokenQuantity

ONE = torch.ones(1, 2, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _taken_back() -> Iterator[None]:
    with noting() as noted:
        yield
    for registration in noted:
        registration.undo()


def batch() -> ScoredBatch:
    """Two rows of one prompt, with two tokens and one, of rewards 1 and 0."""
    return ScoredBatch(
        uids=("a", "a"),
        rewards=torch.tensor([1.0, 0.0], dtype=torch.float64),
        correct=torch.tensor([True, False]),
        loss_mask=torch.tensor([[True, True], [True, False]]),
        quantities={},
    )


def test_an_estimator_may_return_a_number_per_row_or_per_token() -> None:
    @ADVANTAGE_ESTIMATORS.register("own_rows")
    def own_rows(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
        return 2 * batch.rewards - 1

    found = compute_advantages(batch(), AdvantageConfig(estimator="own_rows"))
    assert found.advantages.tolist() == [[1, 1], [-1, 0]]


def test_a_correction_with_a_gate_of_its_own() -> None:
    def below_2(x: LogRatios, cfg: CorrectionConfig) -> Tensor:
        return x.token.exp() < 2

    @CORRECTIONS.register("own", gate=below_2)
    def half(x: LogRatios, cfg: CorrectionConfig) -> Tensor:
        return torch.full_like(x.token, 0.5)

    mask = torch.tensor([[True, True]])
    x = CorrectionInputs(
        # Ratios of 1 and e.
        old_logprobs=-ONE,
        rollout_logprobs=torch.tensor([[-1.0, -2.0]], dtype=torch.float64),
        advantages=ONE,
        loss_mask=mask,
        demonstration_mask=~mask,
    )
    assert compute_correction(x, CorrectionConfig(name="own")).weights.tolist() == [[0.5, 0]]


def test_a_filter_acts_beside_those_that_settings_turn_on() -> None:
    @GROUP_FILTERS.register("first_right")
    def first_right(group: ScoredGroup, cfg: FilterConfig) -> bool:
        return group.scores[0] == 1

    scores, uids = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0], "aabbcc"
    own = FilterConfig(names=("first_right",))
    assert kept_rows(scores, uids, own) == (True, True, False, False, True, True)
    both = replace(own, mean_score=(0.0, 1.0))
    assert kept_rows(scores, uids, both) == (True, True, False, False, False, False)
    check_filter(replace(own, max_refills=1), num_samples=2)
    with pytest.raises(ConfigError, match=r"algo\.filter: got rollout\.num_samples=1, expected at least 2"):
        check_filter(own, num_samples=1)
    with pytest.raises(
        ConfigError, match=r"algo\.filter\.names: unknown filter 'firstright'; did you mean 'first_right'"
    ):
        check_filter(FilterConfig(names=("firstright",)), num_samples=2)
    with pytest.raises(
        ConfigError, match=r"names: got 'mean_score', which algo\.filter\.mean_score turns on; set that"
    ):
        check_filter(FilterConfig(names=("mean_score",)), num_samples=2)


def test_shapers_run_in_the_order_of_their_names_and_need_what_they_read() -> None:
    def shaper(name: str, function: Callable[[Tensor], Tensor], **declared: Any) -> None:
        @ADVANTAGE_SHAPERS.register(name, **declared)
        def shape(advantages: Tensor, x: ShapingInputs) -> Advantages:
            return Advantages(values=torch.where(x.batch.loss_mask, function(advantages), 0.0), metrics={})

    shaper("double", lambda advantages: 2 * advantages)
    shaper("plus_1", lambda advantages: advantages + 1, reads=(TokenQuantity.OLD_ENTROPY,))
    plain = AdvantageConfig(estimator="dr_grpo")
    for names, expected in (("double", "plus_1"), [[2, 2], [0, 0]]), (("plus_1", "double"), [[3, 3], [1, 0]]):
        algorithm = build_algorithm(AlgoConfig(advantage=plain, shapers=names), max_response_tokens=2)
        assert algorithm.requires() == {TokenQuantity.OLD_ENTROPY}
        # dr_grpo: ½ and −½.
        assert algorithm.advantages(batch(), algorithm.initial_state()).values.tolist() == expected
    for names, problem in (("double", "double"), "stands twice"), (("shape_by_hint",), "runs in every algorithm"):
        with pytest.raises(ConfigError, match=f"algo.shapers: got .*{names[0]} {problem}; name each shaper of algo.pl"):
            build_algorithm(AlgoConfig(shapers=names), max_response_tokens=2)
    with pytest.raises(RegistrationError, match="shaper 'late': reads: got 'entropies', expected names among old_logp"):
        shaper("late", lambda advantages: advantages, reads=("entropies",))


def test_a_kl_estimator_and_an_aggregation() -> None:
    @KL_ESTIMATORS.register("own", refused_in_loss="it has no gradient")
    def own(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return logprobs.detach() - ref_logprobs

    @AGGREGATIONS.register("own", denominator=lambda counts, horizon_tokens: 4)
    def summed(loss: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, loss, 0.0).sum()

    build_algorithm(AlgoConfig(kl=KLConfig(where="reward", estimator="own"), aggregation="own"), max_response_tokens=2)
    with pytest.raises(
        ConfigError, match=r"algo\.kl\.estimator: got 'own' with algo\.kl\.where=loss: it has no gradient; "
    ):
        build_algorithm(AlgoConfig(kl=KLConfig(where="loss", estimator="own")), max_response_tokens=2)
    with pytest.raises(RegistrationError, match=r"aggregation 'without': .*missing .* 'denominator'"):
        AGGREGATIONS.register("without")(summed)


def test_a_loss_gets_what_it_declares_to_read() -> None:
    seen: list[PolicyLossInputs] = []

    @POLICY_LOSSES.register("own", reads=("ref_logprobs", "rollout_logprobs", "entropy"))
    def own(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
        assert x.entropy is not None
        assert x.ref_logprobs is not None
        assert x.rollout_logprobs is not None
        seen.append(x)
        return PolicyLossTerms(loss=x.logprobs + x.ref_logprobs + x.rollout_logprobs + x.entropy, diagnostics={})

    algorithm = build_algorithm(AlgoConfig(policy_loss=PolicyLossConfig(name="own")), max_response_tokens=2)
    mask = torch.tensor([[True, False]])
    # NaN outside of the mask must reach no gradient.
    spoiled = torch.tensor([[0.0, torch.nan]], dtype=torch.float64)
    quantities = {"advantages": ONE, "ref_logprobs": spoiled - 2, "rollout_logprobs": spoiled - 3}
    rows = RowBatch(labels=("a/0",), loss_mask=mask, quantities=quantities)
    entropy = (5 * ONE).requires_grad_()
    sums = algorithm.loss(rows, PolicyOutputs(logprobs=-ONE, entropy=entropy), AlgoState(kl_coef=0.0))
    # −1 − 2 − 3 + 5
    assert sums.objective["loss"].item() == -1
    sums.objective["loss"].backward()
    assert entropy.grad is not None
    assert entropy.grad.tolist() == [[1, 0]]
    assert len(seen) == 1
    cfg = AlgoConfig(policy_loss=PolicyLossConfig(name="own"), correction=CorrectionConfig(name="rollout_ratio"))
    with pytest.raises(ConfigError, match=r"algo\.correction\.name: got 'rollout_ratio' .* has no ratio that could be"):
        build_algorithm(cfg, max_response_tokens=2)


@pytest.mark.parametrize("shape", [(), (3,), (2, 1), (1, 2, 3)])
def test_users_parts_return_a_number_for_each_token(shape: tuple[int, ...]) -> None:
    """Other shapes would be broadcast."""

    @POLICY_LOSSES.register("own")
    def own(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
        return PolicyLossTerms(loss=torch.zeros(shape), diagnostics={})

    @ADVANTAGE_ESTIMATORS.register("own")
    def estimate(batch: ScoredBatch, cfg: AdvantageConfig) -> Estimate:
        return Estimate(advantages=torch.zeros(shape))

    zeros = torch.zeros(2, 3)
    x = PolicyLossInputs(logprobs=zeros, old_logprobs=zeros, advantages=zeros, loss_mask=zeros == 0)
    got = rf"=own has shape {re.escape(str(shape))}, expected \(2, .\), one for each token"
    with pytest.raises(ValueError, match=rf"the loss of algo\.policy_loss\.name{got}"):
        policy_loss(x, PolicyLossConfig(name="own"))
    with pytest.raises(ValueError, match=rf"the estimate of algo\.advantage\.estimator{got}"):
        ADVANTAGE_ESTIMATORS.get("own")(batch(), AdvantageConfig(estimator="own"))


def test_a_loss_with_a_ratio_per_row_needs_an_aggregation_over_rows() -> None:
    @POLICY_LOSSES.register("own", row_ratio=True, token_local=False)
    def own(x: PolicyLossInputs, cfg: PolicyLossConfig) -> PolicyLossTerms:
        return PolicyLossTerms(loss=x.logprobs, diagnostics={})

    cfg = AlgoConfig(policy_loss=PolicyLossConfig(name="own"))
    with pytest.raises(
        ConfigError, match=r"algo\.aggregation: got 'token-mean' with algo\.policy_loss\.name=own, whose rat"
    ):
        build_algorithm(cfg, max_response_tokens=2)
    algorithm = build_algorithm(replace(cfg, aggregation="seq-mean-token-mean"), max_response_tokens=2)
    assert not algorithm.token_local
