"""Losses on preference pairs against TRL and OpenRLHF."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megarl.algos.preference import preference_objective
from megarl.config.schema import TrainPreferenceConfig
from megarl.types import AlgoState, LossSums, PolicyOutputs, RowBatch
from tests.conformance.batches import SEEDS, Batch, random_batch
from tests.conformance.compare import FLOAT32, FLOAT64, assert_close, assert_same_loss
from tests.conformance.peer_openrlhf import loss as openrlhf
from tests.conformance.peer_trl_pairs import Dpo, Kto, Orpo

BETA = 0.3
NUM_PAIRS = 6
# As many chosen rows as rejected ones.
GROUPS = (NUM_PAIRS, NUM_PAIRS)


def sums(batch: Batch, name: str, logprobs: Tensor, *, kl: float = 0.0, **settings: float) -> LossSums:
    """Our loss and metrics, summed over the pairs."""
    cfg = TrainPreferenceConfig(objective=name, beta=BETA, **settings)  # type: ignore[arg-type]
    quantities = {"ref_logprobs": batch.ref_logprobs, "batch_kl": torch.full_like(logprobs, kl)}
    rows = RowBatch(labels=batch.uids, loss_mask=batch.mask, quantities=quantities)
    return preference_objective(cfg).loss(rows, PolicyOutputs(logprobs=logprobs, entropy=None), AlgoState())


def our_loss(batch: Batch, name: str, **settings: float) -> Callable[[Tensor], Tensor]:
    return lambda logprobs: sums(batch, name, logprobs, **settings).total({"pairs": float(NUM_PAIRS)})


def whole(batch: Batch, logprobs: Tensor) -> tuple[Tensor, ...]:
    """Log-probs of whole responses: chosen and rejected under the policy, then under the reference."""
    return tuple(
        half for values in (logprobs, batch.ref_logprobs) for half in (values * batch.mask).sum(dim=1).chunk(2)
    )


@pytest.mark.parametrize(("name", "loss_type"), [("dpo", "sigmoid"), ("ipo", "ipo")])
@pytest.mark.parametrize("seed", SEEDS)
def test_dpo_and_ipo_of_trl(seed: int, name: str, loss_type: str) -> None:
    batch = random_batch(seed, group_sizes=GROUPS)
    trainer = Dpo(batch, beta=BETA, loss_types=[loss_type])
    assert_same_loss(our_loss(batch, name), trainer.loss, batch.logprobs, FLOAT64)


@pytest.mark.parametrize("seed", SEEDS)
def test_metrics_of_dpo(seed: int) -> None:
    batch = random_batch(seed, group_sizes=GROUPS)
    trainer = Dpo(batch, beta=BETA, loss_types=["sigmoid"])
    trainer.loss(batch.logprobs)
    ours, theirs = sums(batch, "dpo", batch.logprobs).metrics["pairs"], trainer.metrics()
    names = {
        "reward_chosen": "rewards/chosen",
        "reward_rejected": "rewards/rejected",
        "accuracy": "rewards/accuracies",
        "margin": "rewards/margins",
        "logprobs_chosen": "logps/chosen",
        "logprobs_rejected": "logps/rejected",
    }
    for our_name, their_name in names.items():
        mean = ours[f"preference/{our_name}"] / NUM_PAIRS
        assert_close(mean, torch.tensor(theirs[their_name]), FLOAT32)


@pytest.mark.parametrize("seed", SEEDS)
def test_dpo_of_openrlhf(seed: int) -> None:
    batch = random_batch(seed, group_sizes=GROUPS)
    theirs = openrlhf.DPOLoss(BETA)
    assert_same_loss(our_loss(batch, "dpo"), lambda lp: theirs(*whole(batch, lp))[0], batch.logprobs, FLOAT64)


@pytest.mark.parametrize("seed", SEEDS)
def test_ipo_of_openrlhf_differs_in_the_length(seed: int) -> None:
    """Known difference: a mean of ln(π/π_ref) per token here and in TRL; in OpenRLHF the sum, equal for one token."""
    theirs = openrlhf.DPOLoss(BETA, ipo=True)
    batch = random_batch(seed, group_sizes=GROUPS)
    counts = batch.mask.sum(dim=1, keepdim=True)
    assert_same_loss(
        our_loss(batch, "ipo"),
        lambda lp: theirs(*whole(batch, batch.ref_logprobs + (lp - batch.ref_logprobs) / counts))[0],
        batch.logprobs,
        FLOAT64,
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_kto_of_trl(seed: int, sign: float) -> None:
    """With a KL estimate above 0, and one below, which counts as 0."""
    batch, weights = random_batch(seed, group_sizes=GROUPS), {"desirable_weight": 1.5, "undesirable_weight": 0.7}
    ratios = sign * torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    trainer = Kto(batch, torch.stack([batch.ref_logprobs + ratios, batch.ref_logprobs]), beta=BETA, **weights)
    kl = max(float((ratios * batch.mask).sum(dim=1).mean()), 0.0)
    assert (kl > 0) == (sign > 0)
    assert_same_loss(our_loss(batch, "kto", kl=kl, **weights), trainer.loss, batch.logprobs, FLOAT64)
    assert_close(
        sums(batch, "kto", batch.logprobs, kl=kl).metrics["pairs"]["preference/kl"] / NUM_PAIRS,
        torch.tensor(trainer.metrics()["kl"]),
        FLOAT32,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_orpo_of_trl_differs_in_its_first_term(seed: int) -> None:
    """Known difference: the mean of each chosen response here; in TRL of all tokens of chosen rows, prompts too."""
    batch, vocab = random_batch(seed, group_sizes=GROUPS), 7
    generator = torch.Generator().manual_seed(seed)
    responses = torch.cat([torch.zeros_like(batch.mask[:, :2]), batch.mask], dim=1)
    attended = responses.clone()
    attended[:, :2] = True
    token_ids = torch.randint(0, vocab, responses.shape, generator=generator)
    logits = torch.randn(*responses.shape, vocab, generator=generator, dtype=torch.float64)

    def logprobs(at: Tensor) -> Tensor:
        """[B, 1 + T], of each token but the first, which nothing precedes."""
        return at[:, :-1].log_softmax(dim=-1).gather(-1, token_ids[:, 1:, None])[..., 0]

    def ours(at: Tensor) -> Tensor:
        found = logprobs(at)
        chosen, shown, trained = (values[:NUM_PAIRS] for values in (found, attended[:, 1:], responses[:, 1:]))
        their_term = -chosen[shown].mean()
        our_term = -((chosen * trained).sum(dim=1) / trained.sum(dim=1)).mean()
        return our_loss(batch, "orpo")(found[:, 1:]) - our_term + their_term

    trainer = Orpo(beta=BETA)
    assert_same_loss(ours, lambda at: trainer.loss(at, token_ids, attended, responses), logits, FLOAT32)
