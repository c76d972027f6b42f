"""Score centering and DPPO over recorded heads: by hand, by enumeration of a vocabulary of 8, and what is refused."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.algos import build_algorithm
from megarl.algos.build import algorithm_of, check_loop
from megarl.algos.centering import Centering, bounded_error, score_centering, with_head
from megarl.algos.off_policy_losses import TopDivergence
from megarl.algos.policy_losses import PolicyLossInputs, policy_loss
from megarl.config.algo import (
    AlgoConfig,
    CorrectionConfig,
    DemonstrationConfig,
    DistillConfig,
    PolicyLossConfig,
)
from megarl.config.engine import EngineConfig
from megarl.config.generation import RolloutConfig, ScheduleConfig
from megarl.config.schema import Config, SyncConfig, TrainerConfig
from megarl.errors import ConfigError, DataError, RunError
from megarl.run import session_inputs
from megarl.run.session_inputs import open_session_inputs
from megarl.types import LikelyTokens
from megarl.types.objectives import HeadProbs
from tests.helpers.examples import row, step, tensor

RULES = [("none", None, None), ("tis", None, None), ("tis", 0.5, 1.5), ("mis", None, None), ("mis", 0.8, 1.2)]


def config(weight: str, low: float | None = None, high: float | None = None) -> PolicyLossConfig:
    given: Any = weight
    return PolicyLossConfig(name="score_centering", center_weight=given, center_low=low, center_high=high)


def head(logits: Tensor, q: Tensor, k: int) -> HeadProbs:
    """The k likeliest of an engine's probabilities q [n, V], beside those of the policy."""
    ids, log_p = q.topk(k, dim=1).indices, logits.log_softmax(-1)
    at = torch.zeros_like(q, dtype=torch.bool).scatter(1, ids, True)
    return HeadProbs(
        log_p=log_p.gather(1, ids),
        log_q=q.gather(1, ids).log(),
        rest_p=log_p.exp().masked_fill(at, 0.0).sum(1),
        rest_q=q.masked_fill(at, 0.0).sum(1),
    )


def expected_update(logits: Tensor, q: Tensor, k: int, cfg: PolicyLossConfig) -> Tensor:
    """Σ_a q_a ∇l_a by the logits [1, V], for an advantage of 1."""
    leaf = logits.clone().requires_grad_()
    size = q.shape[1]
    rule, x = Centering.of(cfg), head(leaf, q, k)
    frozen = HeadProbs(log_p=x.log_p.detach(), log_q=x.log_q, rest_p=x.rest_p.detach(), rest_q=x.rest_q)
    correction = (rule.slopes(frozen) * x.log_p).sum(1)
    inputs = PolicyLossInputs(
        logprobs=leaf.log_softmax(-1),
        old_logprobs=torch.zeros_like(leaf),
        advantages=torch.ones_like(leaf),
        loss_mask=torch.ones_like(leaf, dtype=torch.bool),
        rollout_logprobs=q.log(),
        beside=correction[:, None].expand(-1, size),
    )
    (gradient,) = torch.autograd.grad((q * score_centering(inputs, cfg).loss).sum(), leaf)
    return gradient


def random_pair(seed: int, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 8, generator=g, dtype=torch.float64)
    return logits, (logits + spread * torch.randn(1, 8, generator=g, dtype=torch.float64)).softmax(-1)


def test_by_hand() -> None:
    """H of two tokens: p = 0.5 and 0.1, q = 0.4 and 0.2, so that κ = 0.4/0.4 = 1."""
    x = HeadProbs(
        log_p=tensor([[0.5, 0.1]]).log(), log_q=tensor([[0.4, 0.2]]).log(), rest_p=tensor([0.4]), rest_q=tensor([0.4])
    )
    assert Centering.of(config("none")).slopes(x)[0].tolist() == pytest.approx([-0.1, 0.1])
    # Ratios 1.25 and 0.5 become 1.2 and 0.8.
    assert Centering.of(config("tis", 0.8, 1.2)).slopes(x)[0].tolist() == pytest.approx([0.48 - 0.5, 0.16 - 0.1])
    assert Centering.of(config("mis", 0.8, 1.3)).slopes(x)[0].tolist() == pytest.approx([0.0, -0.1])
    # κ = 2 beyond its bound, as 1/κ is below 0.8: α = 2·0.8, and 0 for mis.
    far = replace(x, rest_p=tensor([0.2]))
    assert Centering.of(config("tis", 0.8, 1.2)).slopes(far)[0, 0].item() == pytest.approx(0.48 - 1.6 * 0.5)
    assert Centering.of(config("mis", 0.8, 1.3)).slopes(far)[0, 0].item() == pytest.approx(0.5)
    rule = Centering.of(config("none"))
    assert rule.value(x, rule.slopes(x)).item() == pytest.approx(-0.1 * math.log(0.5) + 0.1 * math.log(0.1))


@pytest.mark.parametrize(("weight", "low", "high"), RULES)
def test_equal_policies_need_no_correction(weight: str, low: float | None, high: float | None) -> None:
    """With any head; and it is the plain policy gradient."""
    logits, _ = random_pair(0)
    for k in (1, 3, 8):
        slopes = Centering.of(config(weight, low, high)).slopes(head(logits, logits.softmax(-1), k))
        torch.testing.assert_close(slopes, torch.zeros_like(slopes), rtol=0, atol=1e-12)


def test_a_weight_that_no_bound_reaches_needs_no_correction() -> None:
    """f(r) = r is importance sampling, whose expected score is 0 with any head."""
    logits, q = random_pair(1)
    for weight in ("tis", "mis"):
        slopes = Centering.of(config(weight, 0.0, 1e9)).slopes(head(logits, q, 3))
        torch.testing.assert_close(slopes, torch.zeros_like(slopes), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("weight", "low", "high"), RULES)
def test_the_expected_update_of_a_constant_advantage(weight: str, low: float | None, high: float | None) -> None:
    """It is 0 with a full head; with k of 8 tokens within 4·(1 − Q)·max f in the L1 norm; and is not without C."""
    cfg = config(weight, low, high)
    largest = 1.0 if weight == "none" else Centering.of(cfg).high
    for seed in range(5):
        logits, q = random_pair(seed)
        full = expected_update(logits, q, 8, cfg)
        torch.testing.assert_close(full, torch.zeros_like(full), rtol=0, atol=1e-14)
        for k in (1, 3, 6):
            tail = float(head(logits, q, k).rest_q)
            assert float(expected_update(logits, q, k, cfg).abs().sum()) <= 4 * tail * largest
    far = expected_update(*random_pair(7, spread=3.0), 1, cfg)
    assert weight != "none" or float(far.abs().sum()) > 1e-3


def test_bounds_of_divergences() -> None:
    """Those of a head and the rest lie between 0 and those over the vocabulary, and reach these with all tokens."""
    logits, q = random_pair(3)
    p = logits.softmax(-1)
    exact = {"tv": float((p - q).abs().sum() / 2), "kl": float((q * (q / p).log()).sum())}
    for kind, bound in exact.items():
        given: Any = kind
        values = [float(TopDivergence(kind=given).value(head(logits, q, k), None)) for k in range(1, 9)]
        assert values == sorted(values)
        assert values[-1] == pytest.approx(bound)
        x = HeadProbs(
            log_p=tensor([[0.5]]).log(), log_q=tensor([[0.25]]).log(), rest_p=tensor([0.5]), rest_q=tensor([0.75])
        )
    assert float(TopDivergence(kind="tv").value(x, None)) == pytest.approx(0.25)
    assert float(TopDivergence(kind="kl").value(x, None)) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))


def test_dppo_masks_by_the_head() -> None:
    x = PolicyLossInputs(
        logprobs=tensor([[0.4, 0.4, 0.1, 0.1]]).log(),
        old_logprobs=tensor([[0.2, 0.2, 0.2, 0.2]]).log(),
        advantages=tensor([[1.0, -1.0, -1.0, 1.0]]),
        loss_mask=torch.ones(1, 4, dtype=torch.bool),
        beside=tensor([[0.3, 0.3, 0.3, 0.3]]),
    )
    for name in ("dppo_top_tv", "dppo_top_kl"):
        cfg = PolicyLossConfig(name=name, clip_high=0.25, clip_low=0.25)
        assert policy_loss(x, cfg).loss[0].tolist() == pytest.approx([0.0, 2.0, 0.0, -0.5])


def test_the_limit_of_the_error_names_the_row() -> None:
    batch = step("aab", [1.0, 0.0, 1.0], engine_tail=[[0.0, 0.5], [0.25, 0.25], [0.0, 0.0]])
    advantages = tensor([[1.0, 1.0], [-2.0, -2.0], [9.0, 9.0]])
    found = bounded_error(advantages, batch, replace(config("tis"), max_head_error=4.0))
    # Rows: 4·1·0.25·2, 4·2·0.25·2, 0.
    assert found.metrics["actor/sc_error_bound"] == pytest.approx(2.0)
    assert found.metrics["actor/sc_error_bound_max"] == pytest.approx(4.0)
    with pytest.raises(RunError, match=r"row 1, of prompt a, by 4 per token.*raise rollout.head_tokens"):
        bounded_error(advantages, batch, replace(config("tis"), max_head_error=3.9))


def test_rows_without_heads_are_refused() -> None:
    likely = LikelyTokens(ids=np.array([[3, -1], [-1, -1]], np.int32), logprobs=np.full((2, 2), -1, np.float32))
    with pytest.raises(DataError, match=r"row a/0: .* response token 1; sample with rollout.head_tokens"):
        with_head(replace(row([1, 1]), likely=likely), keeps_sampled=True)
    assert with_head(replace(row([1, 0]), likely=likely), keeps_sampled=True).likely is likely
    with pytest.raises(DataError, match="response token 1"):
        with_head(row([0, 1]), keeps_sampled=False)


CENTERED = PolicyLossConfig(name="score_centering")
KEPT = PolicyLossConfig(name="dppo_top_tv", compared_with="trainer")
REFUSED = [
    (AlgoConfig(policy_loss=CENTERED, correction=CorrectionConfig(name="tis_upper")), "both would weigh them twice"),
    (AlgoConfig(policy_loss=PolicyLossConfig(name="dppo_top_tv")), "set algo.correction.name=rollout_ratio"),
    (AlgoConfig(policy_loss=CENTERED, demonstrations=DemonstrationConfig(strategy="random")), "no engine has"),
    (AlgoConfig(policy_loss=CENTERED, distill=DistillConfig(teacher="model", mode="exact")), "one distribution"),
    (AlgoConfig(policy_loss=CENTERED, echo_coef=0.1), "echo_coef: got 0.1 with algo.policy_loss.name=score_centering"),
    (AlgoConfig(echo_coef=0.1, distill=DistillConfig(teacher="model", mode="exact")), "with algo.distill.mode=exact"),
    (AlgoConfig(policy_loss=config("none", high=2.0)), "set .*center_weight=tis or mis"),
    (AlgoConfig(policy_loss=config("tis", low=1.5)), "center_low <= 1 <= center_high"),
    (AlgoConfig(policy_loss=PolicyLossConfig(center_weight="tis")), "score_centering"),
    (
        AlgoConfig(policy_loss=PolicyLossConfig(compared_with="trainer")),
        "compared_with: got trainer, which is not read",
    ),
    (AlgoConfig(policy_loss=KEPT, correction=CorrectionConfig(name="rollout_ratio")), "whose ratio is to the policy"),
    (
        AlgoConfig(policy_loss=replace(KEPT, kept_versions=1), correction=CorrectionConfig(name="tis_upper")),
        "so that staleness would be weighed twice; set algo.correction.name=none",
    ),
]


@pytest.mark.parametrize(("cfg", "message"), REFUSED)
def test_refusals(cfg: AlgoConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_algorithm(cfg, max_response_tokens=8)


# What sampled is not what ranks keep.
OTHER_SAMPLERS: list[tuple[str, dict[str, Any]]] = [
    (
        "algo.policy_loss.kept_versions: got 0 with compared_with=trainer and .*staleness=1, .* may be 1 updates old",
        {"rollout": RolloutConfig(schedule=ScheduleConfig(staleness=1))},
    ),
    ("rollout.top_p: got 0.9", {"rollout": RolloutConfig(top_p=0.9, top_k=50)}),
    ("rollout.top_k: got 50", {"rollout": RolloutConfig(top_k=50)}),
    ("rollout.source: got replay", {"rollout": RolloutConfig(source="replay", replay_dir="records")}),
    ("sync.dtype: got float8_e4m3", {"sync": SyncConfig(dtype="float8_e4m3")}),
    ("rollout.engine.dtype: got bfloat16", {"rollout": RolloutConfig(engine=EngineConfig(dtype="bfloat16"))}),
    ("rollout.engine.quantization: got", {"rollout": RolloutConfig(engine=EngineConfig(quantization="fp8_per_block"))}),
    ("rollout.engine.kv_cache_dtype: got", {"rollout": RolloutConfig(engine=EngineConfig(kv_cache_dtype="fp8_e4m3"))}),
    ("rollout.head_tokens: got 8", {"rollout": RolloutConfig(head_tokens=8)}),
]


@pytest.mark.parametrize(("message", "given"), OTHER_SAMPLERS)
def test_a_policy_that_did_not_sample_is_refused(message: str, given: dict[str, Any]) -> None:
    algo = AlgoConfig(policy_loss=KEPT)
    with pytest.raises(ConfigError, match=f"^{message}.*; set it to "):
        algorithm_of(Config(algo=algo, **given))


@pytest.mark.parametrize("heads", [0, 8])
@pytest.mark.parametrize("loss", [KEPT, CENTERED])
def test_sessions_refuse_a_loss_that_they_cannot_compute_whatever_else_is_set(
    heads: int, loss: PolicyLossConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_inputs, "rehearse", lambda config: config)
    monkeypatch.setattr(session_inputs, "check_session", lambda config: None)
    config = Config(algo=AlgoConfig(policy_loss=loss), rollout=RolloutConfig(head_tokens=heads))
    said = f"algo.policy_loss.name: got {loss.name}, but a session keeps no distributions of what sampled.*; choose"
    with pytest.raises(ConfigError, match=said):
        open_session_inputs(config, with_engines=True, with_reference=False)


def test_sessions_refuse_what_no_loss_of_theirs_reads() -> None:
    for given, said in (
        ({"rollout": RolloutConfig(head_tokens=8)}, "rollout.head_tokens: got 8, .*; set it to 0"),
        ({"algo": AlgoConfig(echo_coef=0.1)}, "algo.echo_coef: got 0.1, but a session runs no environments; set it to"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_loop(Config(**given))  # type: ignore[arg-type]
    check_loop(Config())


def test_what_beside_the_policy_itself_is_allowed() -> None:
    """Weights for the engine's mismatch multiply a ratio to the policy: nothing is weighed twice."""
    for loss in (KEPT, replace(CENTERED, compared_with="trainer")):
        algorithm_of(Config(algo=AlgoConfig(policy_loss=loss)))
        algorithm_of(Config(algo=AlgoConfig(policy_loss=loss, correction=CorrectionConfig(name="tis_upper"))))


def test_as_many_versions_are_kept_as_tokens_may_be_old() -> None:
    """Of a window of ½·(2 + 1)·32 = 48 prompts, ⌈47/32⌉ = 2 more than staleness 2."""
    window = ScheduleConfig(staleness=2, window_frac=0.5)
    for schedule, count in ((ScheduleConfig(staleness=2), 2), (window, 4), (ScheduleConfig(), 0)):
        rollout, trainer = RolloutConfig(schedule=schedule), TrainerConfig(prompts_per_step=32)
        algorithm_of(
            Config(algo=AlgoConfig(policy_loss=replace(KEPT, kept_versions=count)), rollout=rollout, trainer=trainer)
        )
        too_many = AlgoConfig(policy_loss=replace(KEPT, kept_versions=count + 1))
        with pytest.raises(ConfigError, match=f"kept_versions: got {count + 1}.*; set it to {count}"):
            algorithm_of(Config(algo=too_many, rollout=rollout, trainer=trainer))


def verl_correction(lp: Tensor, lq: Tensor, weight: str, low: float, high: float) -> Tensor:
    """Σ_H sg(q·w − α·p)·log p as `score_centering_correction` of a fork of verl has it (verl/trainer/ppo, 2026), in its
    terms: rho is what is left of q over what is left of p, and w a function of the exponentiated ratio."""

    def weigh(ratio: Tensor) -> Tensor:
        if weight == "none":
            return torch.ones_like(ratio)
        return ratio.clamp(low, high) if weight == "tis" else ratio * ((ratio >= low) & (ratio <= high))

    p, q = lp.detach().exp(), lq.exp()
    rho = (1 - q.sum(-1)).clamp_min(1e-6) / (1 - p.sum(-1)).clamp_min(1e-6)
    alpha = rho * weigh(1 / rho)
    return ((q * weigh((lp.detach() - lq).exp()) - alpha[:, None] * p) * lp).sum(-1)


@pytest.mark.parametrize(("weight", "low", "high"), RULES)
def test_the_correction_of_public_code(weight: str, low: float | None, high: float | None) -> None:
    for seed in range(20):
        logits, q = random_pair(seed)
        rule = Centering.of(config(weight, low, high))
        x = head(logits, q, 5)
        theirs = verl_correction(x.log_p, x.log_q, weight, rule.low, rule.high)
        torch.testing.assert_close(rule.value(x, rule.slopes(x)), theirs, rtol=1e-11, atol=1e-13)
