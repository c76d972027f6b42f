import math
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megarl.algos.preference import PREFERENCE_LOSSES, BradleyTerry, PreferenceObjective, preference_objective
from megarl.config.schema import TrainPreferenceConfig
from megarl.errors import ConfigError
from megarl.types import AlgoState, LossSums, PolicyOutputs, RowBatch, ValueOutputs, row_batch, row_read_at_end
from tests.helpers.rows import random_rows


def batch(*margins: float) -> RowBatch:
    """Pairs with these margins."""
    both = [*margins, *(0.0 for _ in margins)]
    return RowBatch(
        labels=tuple(map(str, range(len(both)))),
        loss_mask=torch.ones(len(both), 1, dtype=torch.bool),
        quantities={"margin": torch.tensor(both)[:, None]},
    )


def test_the_likelihood_of_two_preferences() -> None:
    # Differences 2 − 0 = 2 with margin 2, and 1 − 2 = −1 without: σ(0) = ½ and σ(−1) = 1/(1 + e).
    values = torch.tensor([[2.0], [1.0], [0.0], [2.0]], requires_grad=True)
    sums = BradleyTerry().loss(batch(2.0, 0.0), ValueOutputs(values=values), AlgoState())
    assert sums.objective["pairs"].item() == pytest.approx(math.log(2) + math.log(1 + math.e))
    sums.objective["pairs"].backward()
    # d/dx −log σ(x) = σ(x) − 1.
    assert values.grad is not None
    assert values.grad[:, 0].tolist() == pytest.approx([-0.5, -math.e / (1 + math.e), 0.5, math.e / (1 + math.e)])
    assert {name: part.item() for name, part in sums.metrics["pairs"].items()} == {
        "reward_model/accuracy": 1,
        "reward_model/margin": 1,
        "reward_model/score_chosen": 3,
        "reward_model/score_rejected": 2,
    }


def test_equal_scores_prefer_nothing() -> None:
    sums = BradleyTerry().loss(batch(0.0), ValueOutputs(values=torch.zeros(2, 1)), AlgoState())
    assert sums.metrics["pairs"]["reward_model/accuracy"].item() == 0


def test_large_differences_stay_finite() -> None:
    values = torch.tensor([[-500.0], [500.0]])
    assert BradleyTerry().loss(batch(0.0), ValueOutputs(values=values), AlgoState()).objective["pairs"].item() == 1000


def test_a_mean_over_pairs() -> None:
    rows = random_rows([(2, 1)] * 6, holes=False)
    assert BradleyTerry().denominators(rows) == {"pairs": 3.0}
    assert BradleyTerry().denominators([]) == {"pairs": 1.0}


def test_a_micro_batch_without_pairs_adds_nothing() -> None:
    rows = row_batch([], device=torch.device("cpu"))
    values = torch.zeros(0, 0, requires_grad=True)
    sums = BradleyTerry().loss(rows, ValueOutputs(values=values), AlgoState())
    sums.objective["pairs"].backward()
    assert sums.objective["pairs"].item() == 0
    assert all(part.item() == 0 for part in sums.metrics["pairs"].values())


def test_a_row_that_is_read_at_its_end() -> None:
    row = row_read_at_end("a", 1, torch.tensor([5, 6, 7]).numpy(), margin=0.5)
    # The value of the fourth token is said from the third, the last of the sequence.
    assert (row.num_prompt_tokens, row.token_ids[:3].tolist(), row.num_response_tokens) == (3, [5, 6, 7], 1)
    assert (row.loss_mask.tolist(), row.quantities["margin"].tolist()) == ([True], [0.5])


# --- policies


def objective(name: str, **settings: float) -> PreferenceObjective:
    return preference_objective(TrainPreferenceConfig(objective=name, **settings))  # type: ignore[arg-type]


def policy_loss(
    name: str, logprobs: torch.Tensor, ref: torch.Tensor, mask: torch.Tensor, *, kl: float = 0.0, **settings: float
) -> LossSums:
    quantities = {"ref_logprobs": ref, "batch_kl": torch.full_like(ref, kl)}
    rows = RowBatch(labels=tuple(map(str, range(len(mask)))), loss_mask=mask, quantities=quantities)
    return objective(name, **settings).loss(rows, PolicyOutputs(logprobs=logprobs, entropy=None), AlgoState())


# One pair; the second token of the rejected response is padding. ln(π/π_ref): 1 and 1 (chosen), −1 (rejected).
LOGPROBS = torch.tensor([[-1.0, -2.0], [-3.0, -9.0]], dtype=torch.float64)
REF = torch.tensor([[-2.0, -3.0], [-2.0, -7.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True], [True, False]])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# p of the chosen response: e^−1.5; of the rejected: e^−3.
LOG_ODDS = (-1.5 - math.log(1 - math.exp(-1.5))) - (-3 - math.log(1 - math.exp(-3)))
# Loss, reward of the chosen and of the rejected response, with β = ½.
BY_HAND = {
    # Rewards ½·2 and ½·(−1).
    "dpo": (-math.log(sigmoid(1.5)), 1.0, -0.5),
    # Means 1 and −1, less 1/(2·½).
    "ipo": (1.0, 0.5, -0.5),
    # z = ½·0.4, with λ_D = 2 and λ_U = 3.
    "kto": ((2 * (1 - sigmoid(0.8)) + 3 * (1 - sigmoid(0.7))) / 2, 1.0, -0.5),
    "orpo": (1.5 - 0.5 * math.log(sigmoid(LOG_ODDS)), -0.75, -1.5),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_losses_and_rewards_by_hand(name: str) -> None:
    weights = {"desirable_weight": 2.0, "undesirable_weight": 3.0} if name == "kto" else {}
    sums = policy_loss(name, LOGPROBS, REF, MASK, kl=0.4, beta=0.5, **weights)
    loss, chosen, rejected = BY_HAND[name]
    assert sums.objective["pairs"].item() == pytest.approx(loss, rel=1e-12)
    got = {metric.removeprefix("preference/"): part.item() for metric, part in sums.metrics["pairs"].items()}
    expected = {
        "loss": loss,
        "accuracy": 1.0,
        "margin": chosen - rejected,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "logprobs_chosen": -3.0,
        "logprobs_rejected": -3.0,
    }
    assert got == pytest.approx(expected | ({"kl": 0.4} if name == "kto" else {}))


def test_dpos_gradient_by_hand() -> None:
    # d/dlp of −log σ(β·(Δ_c − Δ_r)) = −β·(1 − σ(1.5)) in each chosen token, the opposite in the rejected one.
    logprobs = LOGPROBS.clone().requires_grad_()
    policy_loss("dpo", logprobs, REF, MASK, beta=0.5).objective["pairs"].backward()
    slope = 0.5 * (1 - sigmoid(1.5))
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [pytest.approx([-slope, -slope]), pytest.approx([slope, 0.0])]


def reference_loss(name: str, c: torch.Tensor, rc: torch.Tensor, r: torch.Tensor, rr: torch.Tensor) -> torch.Tensor:
    """The loss of one pair from its [R] log-probs, β = 0.3 and KL 0.7, in the steps in which TRL's trainers have it."""
    beta, kl = 0.3, 0.7
    if name == "orpo":
        mean_c, mean_r = c.mean(), r.mean()
        log_odds = (mean_c - mean_r) - (torch.log1p(-torch.exp(mean_c)) - torch.log1p(-torch.exp(mean_r)))
        return -c.sum() / len(c) - beta * F.logsigmoid(log_odds)
    if name == "ipo":
        policy_ratio, ref_ratio = c.mean() - r.mean(), rc.mean() - rr.mean()
        return (policy_ratio - ref_ratio - 1 / (2 * beta)) ** 2
    chosen_ratio, rejected_ratio = c.sum() - rc.sum(), r.sum() - rr.sum()
    if name == "dpo":
        return -F.logsigmoid(beta * ((c.sum() - r.sum()) - (rc.sum() - rr.sum())))
    examples = [1 - torch.sigmoid(beta * (chosen_ratio - kl)), 1 - torch.sigmoid(beta * (kl - rejected_ratio))]
    return torch.stack(examples).mean()


@pytest.mark.parametrize("name", BY_HAND)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5),
    seed=st.integers(0, 10_000),
)
def test_an_independent_reference_has_the_same_losses_and_gradients(
    name: str, lengths: list[tuple[int, int]], seed: int
) -> None:
    generator, count = torch.Generator().manual_seed(seed), len(lengths)
    sizes = torch.tensor([a for a, _ in lengths] + [b for _, b in lengths])
    mask = torch.arange(int(sizes.max())) < sizes[:, None]
    ours, ref = (-0.1 - 3 * torch.rand(mask.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    theirs = ours.clone().requires_grad_()
    ours.requires_grad_()
    loss = policy_loss(name, ours, ref, mask, kl=0.7, beta=0.3).objective["pairs"]
    parts = [
        reference_loss(name, *(values[row, : sizes[row]] for row in (i, count + i) for values in (theirs, ref)))
        for i in range(count)
    ]
    expected = torch.stack(parts).sum()
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", BY_HAND)
def test_micro_batches_add_up_to_the_batch(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, ref = (-torch.rand(6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(6, 4, generator=generator) < 0.8
    mask[:, 0] = True
    whole = policy_loss(name, logprobs, ref, mask).objective["pairs"]
    split = [policy_loss(name, logprobs[i], ref[i], mask[i]).objective["pairs"] for i in ([0, 3], [1, 2, 4, 5])]
    assert sum(part.item() for part in split) == pytest.approx(whole.item(), rel=1e-12)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_micro_batch_without_pairs_adds_nothing_to_a_policys_loss(name: str) -> None:
    logprobs = torch.zeros(0, 0, requires_grad=True)
    rows = row_batch([], device=torch.device("cpu"))
    sums = objective(name).loss(rows, PolicyOutputs(logprobs=logprobs, entropy=None), AlgoState())
    sums.objective["pairs"].backward()
    assert sums.objective["pairs"].item() == 0
    assert all(part.item() == 0 for part in sums.metrics["pairs"].values())


def test_a_certain_response_has_a_finite_loss() -> None:
    logprobs = torch.zeros(2, 3, requires_grad=True)
    loss = policy_loss("orpo", logprobs, torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)).objective["pairs"]
    loss.backward()
    assert logprobs.grad is not None
    assert loss.isfinite()
    assert logprobs.grad.isfinite().all()


def test_small_differences_of_long_responses_survive_float32() -> None:
    # Sums of 4000 log-probs of −2 are near −8000, where neighbours in float32 are 5e-4 apart.
    ref = torch.full((2, 4000), -2.0)
    logprobs = ref.clone()
    logprobs[0, 0] += 1e-3
    sums = policy_loss("dpo", logprobs, ref, torch.ones(2, 4000, dtype=torch.bool), beta=1.0)
    assert sums.metrics["pairs"]["preference/margin"].item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"objective": "dppo"},
            "train_preference.objective: unknown objective 'dppo'; did you mean 'dpo'? expected one of: dpo, ipo, kto, "
            "orpo",
        ),
        (
            {"objective": "dpo", "desirable_weight": 2.0},
            "train_preference.desirable_weight: got 2.0, which is not read with train_preference.objective=dpo; leave "
            "it at 1.0, or set train_preference.objective=kto",
        ),
    ],
)
def test_settings_that_nothing_reads_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        preference_objective(TrainPreferenceConfig(**settings))  # type: ignore[arg-type]


def test_objectives_of_policies_travel_to_the_ranks() -> None:
    for name in PREFERENCE_LOSSES:
        made = objective(name)
        assert pickle.loads(pickle.dumps(made)) == made
        assert (made.token_local, made.entropy_needs_grad) == (False, False)
        assert made.denominators(random_rows([(2, 1)] * 6)) == {"pairs": 3.0}
