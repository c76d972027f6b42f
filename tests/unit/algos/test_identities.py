"""Compositions that must agree in value and gradient, and what every composition keeps to.

Steps are random and in float64, so that a tolerance of 1e-11 is rounding alone.
"""

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos import build_algorithm
from megarl.algos.corrections import CORRECTIONS
from megarl.algos.cpo.methods import CPO_METHODS, formula
from megarl.algos.policy_losses import POLICY_LOSSES
from megarl.algos.prefixes import DEMONSTRATION
from megarl.config import load_config
from megarl.config.algo import (
    AdvantageConfig,
    AlgoConfig,
    CorrectionConfig,
    CpoConfig,
    DemonstrationConfig,
    DistillConfig,
    KLConfig,
    OffPolicyConfig,
    PolicyLossConfig,
    RewardConfig,
    RewardMaskConfig,
)
from megarl.types import Algorithm
from tests.helpers.objectives import Outcome, append_padding
from tests.helpers.steps import MAX_RESPONSE_TOKENS, VOCAB_SIZE, Step, outcome_of, problem_of, random_step

CONFIGS = Path(__file__).parents[3] / "configs" / "algo"
ATOL = 1e-11

group_sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
seeds = st.integers(0, 2**31)
steps = st.builds(random_step, group_sizes, seeds)
# Groups of one have no baseline, so that theirs is no group of one verdict with an advantage of 0.
steps_of_groups = st.builds(random_step, st.lists(st.integers(2, 4), min_size=1, max_size=4), seeds)


def algorithm(cfg: AlgoConfig) -> Algorithm:
    return build_algorithm(cfg, max_response_tokens=MAX_RESPONSE_TOKENS, vocab_size=VOCAB_SIZE)


def near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=ATOL)


def agree(got: Outcome, expected: Outcome) -> None:
    """In loss, gradients, and the metrics that both have."""
    assert got.loss == pytest.approx(expected.loss, abs=ATOL)
    near(got.logprobs_grad, expected.logprobs_grad)
    near(got.entropy_grad, expected.entropy_grad)
    common = got.metrics.keys() & expected.metrics.keys()
    assert {"actor/pg_loss", "actor/ppo_kl"} <= common
    assert {n: got.metrics[n] for n in common} == pytest.approx({n: expected.metrics[n] for n in common}, abs=ATOL)


def assert_same_algorithm(step: Step, got: AlgoConfig, expected: AlgoConfig) -> None:
    agree(outcome_of(algorithm(got), step), outcome_of(algorithm(expected), step))


def test_steps_have_a_signal() -> None:
    """Losses and gradients that are compared are not all 0, and tell algorithms apart."""
    step = random_step([4, 4, 3], 0, demonstrations=True)
    plain, shaped, corrected, luffy = (
        outcome_of(algorithm(cfg), step)
        for cfg in (
            AlgoConfig(),
            AlgoConfig(cpo=CpoConfig(method="tok_kl")),
            AlgoConfig(correction=CorrectionConfig(name="tis")),
            AlgoConfig(demonstrations=DemonstrationConfig(strategy="random"), off_policy=OffPolicyConfig(loss="luffy")),
        )
    )
    for other in (shaped, corrected, luffy):
        assert abs(plain.loss - other.loss) > 1e6 * ATOL
        assert (plain.logprobs_grad - other.logprobs_grad).abs().max() > 1e6 * ATOL


# --- A policy that teaches itself with a hint is CPO

SELF_TAUGHT = st.builds(
    DistillConfig,
    teacher=st.just("hint"),
    coef=st.sampled_from([0.1, 1.0]),
    exclude_answer=st.booleans(),
    shuffled_baseline=st.booleans(),
)


@given(steps, SELF_TAUGHT)
def test_log_ratios_of_the_hinted_policy_are_the_difference_of_cpo(step: Step, distill: DistillConfig) -> None:
    hinted, shuffled = (step.batch.quantities[name] for name in ("hint_logprobs", "shuffled_hint_logprobs"))
    step = step.with_quantities(teacher_logprobs=hinted, teacher_baseline_logprobs=shuffled)
    if not distill.exclude_answer:
        step = step.without("cpo_excluded")
    cpo = CpoConfig(
        method="mi",
        formula_set="doc",
        mi_estimator="pmi",
        mi_alpha=distill.coef,
        exclude_answer=distill.exclude_answer,
        shuffled_baseline=distill.shuffled_baseline,
    )
    assert_same_algorithm(step, AlgoConfig(distill=distill), AlgoConfig(cpo=cpo))
    if step.batch.loss_mask.sum() > 4:
        changed = outcome_of(algorithm(AlgoConfig()), step).logprobs_grad
        assert (outcome_of(algorithm(AlgoConfig(distill=distill)), step).logprobs_grad - changed).abs().max() > ATOL


# --- LUFFY without demonstrations is GRPO

RANDOM = DemonstrationConfig(strategy="random")
# With an upper clip that is GRPO's own, and without a clip.
LUFFY_CLIPS = [
    (OffPolicyConfig(loss="luffy", clip_upper_bound=1.0), PolicyLossConfig()),
    (
        OffPolicyConfig(loss="luffy", remove_clip=True),
        PolicyLossConfig(clip_low=1.0, clip_high=1e9, dual_clip=None),
    ),
]


@given(steps, st.sampled_from(LUFFY_CLIPS), st.sampled_from(["grpo", "grpo_split"]), st.booleans())
def test_luffy_without_demonstrations_is_grpo(
    step: Step, clips: tuple[OffPolicyConfig, PolicyLossConfig], estimator: str, marked: bool
) -> None:
    off_policy, clip = clips
    if marked:  # as rows are that could have had a demonstration
        step = step.with_quantities(**{DEMONSTRATION: torch.zeros_like(step.logprobs)})
    grpo = AlgoConfig(policy_loss=clip, kl=KLConfig(where="loss", coef=0.1), entropy_coef=0.02, aggregation="dr_grpo")
    luffy = replace(
        grpo,
        demonstrations=RANDOM,
        off_policy=off_policy,
        advantage=AdvantageConfig(estimator=estimator),
        policy_loss=PolicyLossConfig(),
    )
    assert_same_algorithm(step, luffy, grpo)


@given(steps, st.sampled_from(["demonstration", "row"]))
def test_imitation_beside_rl_without_demonstrations_is_rl(step: Step, tokens: Literal["demonstration", "row"]) -> None:
    imitating = OffPolicyConfig(loss="sft", sft_tokens=tokens)
    plain = AlgoConfig(kl=KLConfig(where="loss", coef=0.1), aggregation="seq-mean-token-mean")
    both = replace(plain, demonstrations=RANDOM, off_policy=imitating)
    got = outcome_of(algorithm(both), step)
    agree(got, outcome_of(algorithm(plain), step))
    assert got.metrics["actor/imitation_loss"] == 0.0


@given(group_sizes, seeds)
def test_a_bound_that_no_probability_exceeds_drops_nothing(sizes: list[int], seed: int) -> None:
    step = random_step(sizes, seed, demonstrations=True)
    bounded, free = (
        AlgoConfig(demonstrations=RANDOM, off_policy=OffPolicyConfig(loss="luffy", drop_above=bound))
        for bound in (1.0, None)
    )
    assert_same_algorithm(step, bounded, free)


# --- CPO that adds nothing is GRPO

ALL_WEIGHTS_0 = {"pos_alpha": 0.0, "neg_alpha": 0.0, "mi_alpha": 0.0, "kl_alpha": 0.0, "mix": 0.0}
CPO = [
    (name, formula_set)
    for name in CPO_METHODS
    if name != "none" and (name.endswith("_qwen3") or f"{name}_qwen3" not in CPO_METHODS or name == "naive")
    for formula_set in CPO_METHODS.get(name).formulas
]
# Methods by what they add to correct rows whatever the hint says: pos_alpha × the token's uncertainty, or the row's.
UNSURE_TOKENS = {
    *(("mi2_qwen3", s) for s in ("ref", "fix")),
    *(("mi3_qwen3", s) for s in ("ref", "fix")),
    *(("reverse_mi3_qwen3", s) for s in ("ref", "fix")),
    *(("addition_mi3_qwen3", s) for s in ("ref", "fix")),
    ("negonly_mi3_qwen3", "ref"),
    *(("negonly_mi_qwen3", s) for s in ("ref", "fix")),
    *(("negonly_tok_kl_qwen3", s) for s in ("ref", "fix")),
    *(("tok_kl_qwen3", s) for s in ("ref", "fix")),
}
UNSURE_ROWS = {("seq_kl_qwen3", "ref"), ("seq_kl_qwen3", "fix")}


def cpo_config(choice: tuple[str, Any], **cfg: Any) -> AlgoConfig:
    """With those of the settings that the formula reads, as others are refused."""
    plain = CpoConfig(method=choice[0], formula_set=choice[1])
    chosen = formula(plain)
    read = {
        "pos_alpha": "pos_alpha" in chosen.reads or not cfg["pos_alpha"],
        "entropy_source": "entropy" in chosen.reads,
        "mi_estimator": "mi" in chosen.reads,
        "shuffled_baseline": chosen.uses_hint,
        "mix": choice[0] == "verifier_sign",
    }
    settings = {name: value for name, value in cfg.items() if read.get(name, True)}
    return AlgoConfig(cpo=replace(plain, **settings), entropy_coef=0.01)


GRPO = AlgoConfig(entropy_coef=0.01)


@given(steps_of_groups, st.sampled_from(CPO), st.sampled_from(["old", "current"]))
def test_cpo_with_all_weights_0_is_grpo(step: Step, choice: tuple[str, str], source: str) -> None:
    """Gains by difficulty, too, meet no advantage but 0: that of groups of one verdict."""
    assert_same_algorithm(step, cpo_config(choice, entropy_source=source, **ALL_WEIGHTS_0), GRPO)


@given(steps_of_groups, st.sampled_from(CPO), st.sampled_from(["p_weighted", "pmi", "kl_is", "full_kl"]), st.booleans())
def test_a_hint_that_changes_nothing_leaves_grpo_and_the_bonus_for_uncertainty(
    step: Step, choice: tuple[str, str], estimator: str, shuffled: bool
) -> None:
    old = step.batch.quantities["old_logprobs"]
    step = step.without("cpo_excluded").with_quantities(
        hint_logprobs=old, shuffled_hint_logprobs=old, hint_kl=torch.zeros_like(old)
    )
    shuffled = shuffled and estimator != "full_kl"
    cfg = cpo_config(choice, pos_alpha=0.7, mi_estimator=estimator, shuffled_baseline=shuffled)
    got, plain = (problem_of(algorithm(c), step)[0].quantities["advantages"] for c in (cfg, GRPO))
    near(got, plain + 0.7 * bonus(step, choice))


def bonus(step: Step, choice: tuple[str, str]) -> Tensor:
    """Min-max uncertainty of the tokens of correct rows, or their row's mean entropy; 0 elsewhere."""
    batch, out = step.batch, torch.zeros_like(step.logprobs)
    for i, (mask, entropy) in enumerate(zip(batch.loss_mask, batch.quantities["old_entropy"], strict=True)):
        if not (batch.correct[i] and mask.any()):
            continue
        kept = entropy[mask]
        if choice in UNSURE_TOKENS:
            out[i, mask] = (kept - kept.min()) / (kept.max() - kept.min() + 1e-8)
        elif choice in UNSURE_ROWS:
            out[i, mask] = kept.mean()
    return out


@given(
    steps,
    st.sampled_from([c for c in CPO if formula(CpoConfig(method=c[0], formula_set=c[1])).reads >= {"entropy"}]),
    st.sampled_from([CorrectionConfig(), CorrectionConfig(name="tis"), CorrectionConfig(name="rollout_ratio")]),
)
def test_entropies_of_forward_pass_and_update_agree_while_the_policy_is_the_old_one(
    step: Step, choice: tuple[str, Any], correction: CorrectionConfig
) -> None:
    quantities = step.batch.quantities
    step = replace(step, logprobs=quantities["old_logprobs"], entropy=quantities["old_entropy"])
    of_forward, of_update = (
        AlgoConfig(cpo=CpoConfig(method=choice[0], formula_set=choice[1], entropy_source=source), correction=correction)
        for source in ("old", "current")
    )
    assert_same_algorithm(step, of_update, of_forward)


# --- engines that agree need no correction

OPTIONS: list[dict[str, Any]] = [
    {},
    {"token_cap": 2.0},
    {"veto": 3.0},
    {"only_negative": True},
    {"normalise": True},
]


def corrections() -> Iterator[CorrectionConfig]:
    """Every correction, alone and with each of the options that it takes."""
    for name in CORRECTIONS:
        for options in OPTIONS:
            if options.keys() <= set(CORRECTIONS.get(name).options):
                yield CorrectionConfig(name=name, **options)


@given(group_sizes, seeds, st.sampled_from(list(corrections())), st.booleans())
def test_equal_engines_need_no_correction(
    sizes: list[int], seed: int, correction: CorrectionConfig, demonstrations: bool
) -> None:
    step = random_step(sizes, seed, demonstrations=demonstrations)
    step = step.with_quantities(rollout_logprobs=step.batch.quantities["old_logprobs"])
    plain = AlgoConfig(demonstrations=RANDOM, off_policy=OffPolicyConfig(loss="luffy")) if demonstrations else GRPO
    corrected = replace(plain, correction=correction)
    _, advantages = problem_of(algorithm(corrected), step)
    if correction.name != "none":
        near(advantages.quantities["correction"], step.batch.loss_mask.double())
    assert_same_algorithm(step, corrected, plain)


@given(steps, st.sampled_from(["gspo", "gspo_token"]))
def test_a_ratio_of_rows_to_equal_engines(step: Step, name: str) -> None:
    loss = PolicyLossConfig(name=name, clip_low=3e-3, clip_high=4e-3)
    step = step.with_quantities(rollout_logprobs=step.batch.quantities["old_logprobs"])
    to_engine, plain = (
        AlgoConfig(policy_loss=loss, aggregation="seq-mean-token-mean", correction=CorrectionConfig(name=correction))
        for correction in ("rollout_ratio", "none")
    )
    assert_same_algorithm(step, to_engine, plain)


# --- GAE without a critic's knowledge is the return


@given(steps, st.booleans())
def test_gae_of_values_0_is_the_return(step: Step, with_kl: bool) -> None:
    """γ = λ = 1. The loss −A·log π then has the gradient −return / number of tokens."""
    step = step.with_quantities(values=torch.zeros_like(step.logprobs))
    cfg = AlgoConfig(
        advantage=AdvantageConfig(estimator="gae", whiten=False),
        policy_loss=PolicyLossConfig(name="reinforce"),
        kl=KLConfig(where="reward", estimator="k1", coef=0.3) if with_kl else KLConfig(),
    )
    returns = torch.zeros_like(step.logprobs)
    batch, penalty = step.batch, 0.3 if with_kl else 0.0
    for i, mask in enumerate(batch.loss_mask):
        total = batch.rewards[i]
        for t in reversed(mask.nonzero().flatten().tolist()):
            total = total - penalty * (batch.quantities["old_logprobs"][i, t] - batch.quantities["ref_logprobs"][i, t])
            returns[i, t] = total
    problem, advantages = problem_of(algorithm(cfg), step)
    near(problem.quantities["advantages"], returns)
    near(advantages.quantities["returns"], returns)
    got, num_tokens = outcome_of(algorithm(cfg), step), batch.loss_mask.sum().clamp(min=1)
    near(got.logprobs_grad, -returns / num_tokens)
    assert got.loss == pytest.approx(float(-(returns * step.logprobs).sum() / num_tokens), abs=ATOL)


@given(steps)
def test_the_critic_as_reward_is_gae_with_its_last_value_as_reward(step: Step) -> None:
    """With γ = λ = 1 and the value of the last token in the reward's place, A = V_last − V."""
    from_critic = AlgoConfig(
        reward=RewardConfig(source="critic"), advantage=AdvantageConfig(estimator="critic_value", whiten=False)
    )
    rewards = torch.zeros_like(step.batch.rewards)
    for i, mask in enumerate(step.batch.loss_mask):
        if mask.any():
            rewards[i] = step.batch.quantities["values"][i, mask][-1]
    as_reward = replace(step, batch=replace(step.batch, rewards=rewards))
    gae = AlgoConfig(advantage=AdvantageConfig(estimator="gae", whiten=False))
    agree(outcome_of(algorithm(from_critic), step), outcome_of(algorithm(gae), as_reward))


# --- what every composition keeps to

# Combinations that no file of configs/algo has.
COMPOSED = {
    "cpo in the loss": AlgoConfig(
        cpo=CpoConfig(method="seq_kl", entropy_source="current", exclude_answer=True),
        correction=CorrectionConfig(name="icepop", only_negative=True),
        entropy_coef=0.01,
    ),
    "cpo in the loss, by KL": AlgoConfig(
        cpo=CpoConfig(method="negonly_mi3", entropy_source="current", mi_estimator="full_kl"),
        kl=KLConfig(where="loss", coef=0.1),
        aggregation="seq-mean-token-sum",
    ),
    "cpo in the loss, shuffled": AlgoConfig(
        cpo=CpoConfig(method="mi", formula_set="ref", entropy_source="current", shuffled_baseline=True),
        aggregation="seq-mean-token-sum-norm",
    ),
    "luffy with everything": AlgoConfig(
        demonstrations=RANDOM,
        off_policy=OffPolicyConfig(
            loss="luffy",
            reshape="no_reshape",
            target_probs=True,
            drop_above=0.6,
            max_clip=2.0,
            demonstration_weight=0.7,
            policy_weight=1.3,
            only_positive=True,
            drop_truncated=True,
        ),
        correction=CorrectionConfig(name="sequence_mask", normalise=True, max_kl_nats=0.3),
        kl=KLConfig(where="loss", coef=0.1),
        entropy_coef=0.01,
        aggregation="seq-mean-token-mean",
    ),
    "imitation of rows": AlgoConfig(
        demonstrations=RANDOM,
        off_policy=OffPolicyConfig(loss="sft", sft_tokens="row", sft_coef=0.5),
        kl=KLConfig(where="loss", coef=0.1),
        entropy_coef=0.01,
        aggregation="seq-mean-token-sum",
    ),
    "gspo to the engine": AlgoConfig(
        policy_loss=PolicyLossConfig(name="gspo_token", clip_low=3e-3, clip_high=4e-3),
        correction=CorrectionConfig(name="rollout_ratio", veto=9.0),
        aggregation="seq-mean-token-mean",
    ),
    "gae with KL in the reward": AlgoConfig(
        reward=RewardConfig(overlong_buffer_tokens=4, truncated=0.5, clip=(-0.5, 0.9)),
        advantage=AdvantageConfig(estimator="gae", gamma=0.9, lam=0.8, lam_critic=1.0),
        kl=KLConfig(where="reward", coef=0.2),
    ),
    "greedy baseline with KL in reward and loss": AlgoConfig(
        advantage=AdvantageConfig(estimator="remax"),
        kl=KLConfig(where="both", estimator="k1", coef=0.2, loss_estimator="k2", loss_coef=0.1),
    ),
    "masked rewards": AlgoConfig(
        reward=RewardConfig(mask=RewardMaskConfig(ratio=0.4, kind="fixed", flip_stage="before_whiten")),
        advantage=AdvantageConfig(estimator="gae"),
    ),
}
SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
every_algorithm = pytest.mark.parametrize("name", [*SHIPPED, *COMPOSED])


@pytest.fixture(scope="module")
def config_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], AlgoConfig]:
    """The composition of a name: the file's, read as a run reads it, or one from above."""
    read: dict[str, AlgoConfig] = dict(COMPOSED)

    def get(name: str) -> AlgoConfig:
        if name not in read:
            run_file = tmp_path_factory.mktemp("run") / "test.yaml"
            run_file.write_text(f"use: {{algo: {CONFIGS / name}.yaml}}\n", encoding="utf-8")
            read[name] = load_config(run_file).algo
        return read[name]

    return get


def make_step(cfg: AlgoConfig, sizes: list[int], seed: int) -> Step:
    return random_step(sizes, seed, demonstrations=cfg.demonstrations.strategy != "none")


@every_algorithm
@settings(max_examples=settings().max_examples // 3)  # of each of the algorithms
@given(sizes=group_sizes, seed=seeds, data=st.data())
def test_split_order_and_padding_do_not_matter(
    config_of: Callable[[str], AlgoConfig], name: str, sizes: list[int], seed: int, data: st.DataObject
) -> None:
    cfg = config_of(name)
    algo, step, num_rows = algorithm(cfg), make_step(cfg, sizes, seed), sum(sizes)
    whole = outcome_of(algo, step)

    # Some of the four may be empty, as they are where data-parallel ranks outnumber rows.
    where = data.draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows))
    parts = [[i for i in range(num_rows) if where[i] == part] for part in range(4)]
    assert_same(outcome_of(algo, step, parts), whole)

    order = data.draw(st.permutations(range(num_rows)))
    if cfg.reward.mask.ratio or POLICY_LOSSES.get(cfg.policy_loss.name).chooses:
        # Which rewards are hidden, and which tokens are drawn, depends on a row's place within its group.
        order = keeping_order_within_groups(step, order)
    shuffled = outcome_of(algo, step.rows(order))
    back = [order.index(i) for i in range(num_rows)]
    assert_same(in_order(shuffled, back), whole)

    padded = outcome_of(algo, step.columns(append_padding))
    assert not padded.logprobs_grad[:, MAX_RESPONSE_TOKENS:].any()
    assert_same(cut(padded, MAX_RESPONSE_TOKENS), whole)


def assert_same(got: Outcome, expected: Outcome) -> None:
    agree(got, expected)
    assert got.metrics.keys() == expected.metrics.keys()


def keeping_order_within_groups(step: Step, order: list[int]) -> list[int]:
    """The groups in the order of `order`, the rows of each as in the step."""
    rows = {uid: [i for i, other in enumerate(step.batch.uids) if other == uid] for uid in step.batch.uids}
    return [rows[step.batch.uids[i]].pop(0) for i in order]


def in_order(outcome: Outcome, order: list[int]) -> Outcome:
    return Outcome(
        loss=outcome.loss,
        metrics=outcome.metrics,
        logprobs_grad=outcome.logprobs_grad[order],
        entropy_grad=outcome.entropy_grad[order],
    )


def cut(outcome: Outcome, width: int) -> Outcome:
    return Outcome(
        loss=outcome.loss,
        metrics=outcome.metrics,
        logprobs_grad=outcome.logprobs_grad[:, :width],
        entropy_grad=outcome.entropy_grad[:, :width],
    )


@every_algorithm
def test_inputs_are_never_changed(config_of: Callable[[str], AlgoConfig], name: str) -> None:
    cfg = config_of(name)
    algo, step = algorithm(cfg), make_step(cfg, [4, 3, 1], 5)
    before = copy.deepcopy(step)
    first, _ = problem_of(algo, step)
    kept = copy.deepcopy(first)
    outcome_of(algo, step)
    for field in ("rewards", "correct", "loss_mask", "truncated"):
        assert torch.equal(getattr(step.batch, field), getattr(before.batch, field))
    assert step.batch.quantities.keys() == before.batch.quantities.keys()
    for name, value in before.batch.quantities.items():
        assert torch.equal(step.batch.quantities[name], value)
    for name, value in kept.quantities.items():
        assert torch.equal(first.quantities[name], value)
    assert torch.equal(step.logprobs, before.logprobs)
    assert torch.equal(step.entropy, before.entropy)


@every_algorithm
def test_a_copy_in_another_process_is_the_same_algorithm(config_of: Callable[[str], AlgoConfig], name: str) -> None:
    cfg = config_of(name)
    step, algo = make_step(cfg, [4, 3], 6), algorithm(cfg)
    copied = pickle.loads(pickle.dumps(algo))
    assert copied == algo
    got, expected = outcome_of(copied, step), outcome_of(algo, step)
    assert got.loss == expected.loss
    assert got.metrics == expected.metrics


@every_algorithm
def test_quantities_that_are_asked_for_are_enough(config_of: Callable[[str], AlgoConfig], name: str) -> None:
    """Of the quantities of a pass, an algorithm reads those that it requires, and the same loss follows from them
    alone.
    """
    cfg = config_of(name)
    step, algo = make_step(cfg, [4, 3, 2], 7), algorithm(cfg)
    free = {"rollout_logprobs", "cpo_excluded", DEMONSTRATION, "target_probs"}
    enough = step.without(*(step.batch.quantities.keys() - {str(s) for s in algo.requires()} - free))
    if "old_logprobs" not in enough.batch.quantities:
        # One optimizer step on a batch takes the current log-probs for the old ones.
        step = step.with_quantities(old_logprobs=step.logprobs)
    assert_same(outcome_of(algo, enough), outcome_of(algo, step))
